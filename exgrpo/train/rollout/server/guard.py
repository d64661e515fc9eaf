"""Shared secret between rollout servers and the trainer.

vLLM's own API key guards only a part of its routes, not those that replace weights. So `vllm serve --middleware
exgrpo.train.rollout.server.guard.Guard` requires the token in every request. This also keeps out web pages in a browser
on the server's machine, whatever host name they use for it.
"""

import hmac
import json
import os
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from exgrpo.train.common.errors import ConfigError, os_errors_as

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

TOKEN = "EXGRPO_SERVER_TOKEN"
"""Environment variable with the token; not an option, since every user of a machine can read command lines."""
TOKEN_FILE = Path("~/.exgrpo_server_token")
"""File with the token if the variable is not set."""
LEAST = 16
"""Minimum number of characters: a shorter token can be guessed."""
READABLE_BY_OTHERS = 0o077
REFUSAL = (
    f"no token, or one that is not this server's: set {TOKEN} to the same value for both, or copy {TOKEN_FILE} of the "
    "server's user to the trainer's"
)


def server_token() -> str:
    """Return the token in the environment or else in the user's file; "" if there is none.

    Raises:
        ConfigError: it is too short or has characters not allowed in an HTTP header, or others can read the file.
    """
    origin, token = TOKEN, os.environ.get(TOKEN, "")
    if not token:
        with os_errors_as(ConfigError, f"{TOKEN_FILE} cannot be read: set {TOKEN} instead"):
            file = TOKEN_FILE.expanduser()
            if not file.exists():
                return ""
            if file.stat().st_mode & READABLE_BY_OTHERS:
                raise ConfigError(f"{file}: others can read this secret: `chmod 600 {file}`")
            origin, token = str(file), file.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(rf"[!-~]{{{LEAST},}}", token):
        raise ConfigError(
            f"{origin} must have at least {LEAST} printable ASCII characters without spaces: without it, the next "
            f"start of a server makes a token in {TOKEN_FILE}"
        )
    return token


def made_token() -> Path | None:
    """Create the user's file with a new token and return its path; None: there is a token already.

    Raises:
        ConfigError: as `server_token`, or the file cannot be written.
    """
    if server_token():
        return None
    with os_errors_as(ConfigError, f"{TOKEN_FILE} cannot be written: set {TOKEN} instead"):
        file = TOKEN_FILE.expanduser()
        try:
            with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as opened:
                opened.write(f"{secrets.token_urlsafe()}\n")
        except FileExistsError:  # written by a server that starts at the same time
            return None
    return file


class Guard:
    """ASGI middleware that passes on only requests with the token; ConfigError if this machine has none."""

    def __init__(self, app: App) -> None:
        self._app = app
        token = server_token()
        if not token:
            raise ConfigError(f"a rollout server needs a token: set {TOKEN}")
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it with status 401."""
        given = [value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"]
        known = len(given) == 1 and hmac.compare_digest(given[0], self._expected)
        if known or scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
        else:
            body = json.dumps({"error": {"message": REFUSAL}}).encode()
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            headers.append((b"content-length", str(len(body)).encode()))
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
