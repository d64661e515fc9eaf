"""The secret that rollout servers and the trainer share: who knows it may ask, and nobody else.

vLLM's own key guards a part of its routes only, and those that replace weights are not among them. So `vllm serve
--middleware exgrpo.train.rollout.server.guard.Guard` asks for the token in every request. A page in a browser on the
server's machine does not know it, by whatever name it calls the server.
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
"""The environment variable that holds it: every user of a machine can read command lines."""
TOKEN_FILE = Path("~/.exgrpo_server_token")
"""What holds it where the variable is not set."""
LEAST = 16
"""Characters: a shorter one can be guessed."""
READABLE_BY_OTHERS = 0o077
REFUSAL = (
    f"no token, or one that is not this server's: set {TOKEN} to the same value for both, or copy {TOKEN_FILE} of the "
    "server's user to the trainer's"
)


def server_token() -> str:
    """The token in this process's environment or in the user's file; "" where there is none.

    Raises:
        ConfigError: it is too short, or has characters that a header of HTTP cannot hold, or others can read the file.
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
    """Make the user's file with a new token, where there is none yet, and say where; None: there is one.

    Raises:
        ConfigError: see `server_token`, or it cannot be written.
    """
    if server_token():
        return None
    with os_errors_as(ConfigError, f"{TOKEN_FILE} cannot be written: set {TOKEN} instead"):
        file = TOKEN_FILE.expanduser()
        try:
            with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as opened:
                opened.write(f"{secrets.token_urlsafe()}\n")
        except FileExistsError:  # of a server that starts at the same time
            return None
    return file


class Guard:
    """An ASGI application in front of another one, which gets only the requests that have the token.

    Args:
        app: the application behind it.

    Raises:
        ConfigError: there is no token in the environment, nor in the user's file.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        token = server_token()
        if not token:
            raise ConfigError(f"a rollout server needs a token: set {TOKEN}")
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Have a request answered, or refuse it."""
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
