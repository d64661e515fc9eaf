"""Which requests a rollout server answers: those of programs that know its token, and of no page in a browser.

The token is a secret that servers and trainer share: who knows it may ask, and nobody else.

vLLM's own key guards a part of its routes only, and those that replace weights are not among them. A page that somebody
opens on the server's machine can send requests to the loopback device, too. So `vllm serve --middleware
exgrpo.train.rollout.server.guard.Guard` asks of every request: is its `Host` a name of this server (a page's own name
may be made to point here), does it come from no page, has it the token, and is its content JSON, which a page cannot
send without a question that is answered with a refusal?
"""

import hmac
import json
import os
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from exgrpo.train.common.errors import ConfigError, os_errors_as

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

TOKEN = "EXGRPO_SERVER_TOKEN"
"""The environment variable that holds it: every user of a machine can read command lines."""
TOKEN_FILE = Path("~/.exgrpo_server_token")
"""What holds it where the variable is not set."""
LEAST = 16
"""Characters: a shorter one can be guessed."""
READABLE_BY_OTHERS = 0o077
NAMES = "EXGRPO_SERVER_NAMES"
"""The environment variable with the names by which the server is called, separated by commas."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
READING = ("GET", "HEAD", "OPTIONS")
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s:@/\[\]]+))(?::\d+)?")


def server_token() -> str:
    """The token in this process's environment or in the user's file; "" where there is none.

    Raises:
        ConfigError: it is too short, or has characters that a header of HTTP cannot hold, or others can read the file.
    """
    origin, token = TOKEN, os.environ.get(TOKEN, "")
    with os_errors_as(ConfigError, f"{TOKEN_FILE} cannot be read: set {TOKEN} instead"):
        if not token and (file := TOKEN_FILE.expanduser()).exists():
            if file.stat().st_mode & READABLE_BY_OTHERS:
                raise ConfigError(f"{file}: others can read this secret: `chmod 600 {file}`")
            origin, token = str(file), file.read_text(encoding="utf-8", errors="replace").strip()
            if not token:
                raise ConfigError(f"{file} is empty: remove it, and the next start of a server makes one")
    if token and (len(token) < LEAST or not token.isascii() or not token.isprintable() or " " in token):
        raise ConfigError(
            f"{origin} must have at least {LEAST} printable ASCII characters without spaces: without it, the next "
            f"start of a server makes a token in {TOKEN_FILE}"
        )
    return token


def made_token() -> Path | None:
    """Make the user's file with a new token, where there is none yet, and say where; None: there is one.

    Raises:
        ConfigError: see `server_token`, or it cannot be written.
    """
    if server_token():
        return None
    with os_errors_as(ConfigError, f"{TOKEN_FILE} cannot be written: set {TOKEN} instead"):
        file = TOKEN_FILE.expanduser()
        # Whole and readable by nobody else from its first moment: servers may start at the same time.
        unfinished = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            with os.fdopen(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as opened:
                opened.write(f"{secrets.token_urlsafe()}\n")
            os.link(unfinished, file)
        except FileExistsError:
            return None
        finally:
            unfinished.unlink(missing_ok=True)
    return file


@dataclass(frozen=True)
class Refusal:
    """Why a request is not answered."""

    status: HTTPStatus
    text: str


class Guard:
    """An ASGI application in front of another one, which gets only the requests that are answered.

    The token and the names of the server come from the environment; a server is also called by the names of the
    loopback device and by the address at which a request arrives.

    Args:
        app: the application behind it.

    Raises:
        ConfigError: there is no token.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._token = server_token()
        if not self._token:
            raise ConfigError(f"a rollout server needs a token: set {TOKEN}")
        self._names = {*LOOPBACK, *filter(None, os.environ.get(NAMES, "").lower().split(","))}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request, or have it answered."""
        refusal = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
        else:
            await _refuse(refusal, send)

    def _refusal(self, scope: Message) -> Refusal | None:
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        host = ", ".join(headers.get("host", ()))
        if not self._is_own(host, scope):
            return Refusal(
                HTTPStatus.FORBIDDEN,
                f"this server does not answer to the name {host[:100]!r}: start it with --names and that name",
            )
        if "origin" in headers or headers.get("sec-fetch-site", ["none"]) != ["none"]:
            return Refusal(HTTPStatus.FORBIDDEN, "requests of pages in a browser are not answered")
        if not self._is_known(headers.get("authorization", [])):
            return Refusal(
                HTTPStatus.UNAUTHORIZED,
                f"no token, or one that is not this server's: set {TOKEN} to the same value for both, or copy "
                f"{TOKEN_FILE} of the server's user to the trainer's",
            )
        media = [value.partition(";")[0].strip().lower() for value in headers.get("content-type", ())]
        if scope.get("method", "GET") not in READING and media != ["application/json"]:
            return Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the content type must be application/json")
        return None

    def _is_own(self, host: str, scope: Message) -> bool:
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = match[1] or match[2]
        address = (scope.get("server") or ("",))[0].removeprefix("::ffff:")  # IPv4 on a socket of IPv6
        return name in self._names or name == address

    def _is_known(self, given: list[str]) -> bool:
        scheme, _, token = (given[0] if len(given) == 1 else "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), self._token.encode())


async def _refuse(refusal: Refusal, send: Send) -> None:
    body = json.dumps({"error": {"message": refusal.text}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": int(refusal.status), "headers": headers})
    await send({"type": "http.response.body", "body": body})
