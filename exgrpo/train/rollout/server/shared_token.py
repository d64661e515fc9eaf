"""The secret that a rollout server and the trainer share: who knows it may ask, and nobody else."""

import os

from exgrpo.train.errors import ConfigError

TOKEN = "EXGRPO_SERVER_TOKEN"
"""The environment variable that holds it: every user of a machine can read command lines."""
LEAST = 16
"""Characters: a shorter one can be guessed."""
MAKE = f"""export {TOKEN}=$(python -c 'import secrets; print(secrets.token_urlsafe())')"""


def server_token() -> str:
    """The token in this process's environment; "" where there is none.

    Raises:
        ConfigError: it is too short, or has characters that a header of HTTP cannot hold.
    """
    token = os.environ.get(TOKEN, "")
    if token and (len(token) < LEAST or not token.isascii() or not token.isprintable() or " " in token):
        raise ConfigError(
            f"{TOKEN} must have at least {LEAST} printable ASCII characters without spaces: make one with `{MAKE}`"
        )
    return token
