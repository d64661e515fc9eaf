"""HTTP to one `vllm serve` instance: token ids in, token ids and log-probs out, and its weight-transfer routes."""

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError, ReadTimeoutError

from exgrpo.train.common import plain
from exgrpo.train.common.errors import cut, shown
from exgrpo.train.common.records import TokenIds
from exgrpo.train.rollout.engine import Sampling
from exgrpo.train.rollout.server.reply import LARGEST_ID, Reply, ServerError, SilentServerError, part, read_reply

CONNECT_SECONDS = 10
ABORT_SECONDS = 10
FACT_SECONDS = 60
"""Time limit for requests that need no worker."""
STATE_SECONDS = 5
"""Time limit for requests that the engine answers between two steps."""
CONTROL_SECONDS = 300
LONG_SECONDS = 3600
"""Time limit for requests that take as long as answers; TCP keepalive notices a dead machine much earlier."""
UNREACHED_SECONDS = 60
"""Time after which TCP gives up a connection to a machine that does not acknowledge anything."""
CONNECTIONS = 256
MOST_BYTES = 2**26
"""Size limit of a response; generated answers may add `TOKEN_BYTES` per token."""
TOKEN_BYTES = 2**10
"""vLLM writes a few hundred bytes for a token and its log-prob."""
PART_BYTES = 2**16
ALIVE = [
    *HTTPConnection.default_socket_options,
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    # Keepalive probes are not sent while data is unacknowledged; this limit covers that case.
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREACHED_SECONDS),
]


class ServerClient:
    """HTTP client of one server, without retries; threads may share it.

    Args:
        url: for example http://host:8000.
        vocabulary: vocabulary size of the model: token ids are below it.
        token: the server's secret; "": none.
    """

    def __init__(self, url: str, vocabulary: int = LARGEST_ID + 1, token: str = "") -> None:
        self.url = url
        self._vocabulary = vocabulary
        self._session = requests.Session()
        self._session.trust_env = False  # ignore proxy settings: the machines of a run reach each other directly
        # A server may close an idle connection, or one with a failed request, while the next request is on its way.
        self._session.headers["Connection"] = "close"
        self._session.headers["Accept-Encoding"] = "identity"  # decompression would get around `MOST_BYTES`
        if token:
            self._session.headers["Authorization"] = f"Bearer {token}"
        self._session.mount(self.url, _Adapter(pool_maxsize=CONNECTIONS))

    def get(self, path: str, seconds: float = FACT_SECONDS) -> Any:
        """Return the JSON at a path.

        Raises:
            ServerError: the request fails or takes longer.
        """
        return self._ask("GET", path, seconds)

    def post(self, path: str, body: Mapping[str, Any] | None = None, seconds: float = CONTROL_SECONDS) -> Any:
        """Post JSON to a path and return the JSON response.

        Raises:
            ServerError: the request fails or takes longer.
        """
        return self._ask("POST", path, seconds, body)

    def call_workers(self, method: str, *args: Any, seconds: float = CONTROL_SECONDS) -> list[Any]:
        """Call a method of the server's workers; one result per worker."""
        return part(self.post("collective_rpc", {"method": method, "args": args}, seconds), "results", list)

    def weight_version(self) -> str:
        """Return the label of the server's weights."""
        return part(self.get("weight_info"), "weight_version", str)

    def paused(self) -> bool:
        """True if its engine waits for new weights; False also if it cannot be reached."""
        with suppress(ServerError):
            return part(self.get("is_paused", STATE_SECONDS), "is_paused", bool)
        return False

    def generate(
        self,
        request: str,
        prompt: TokenIds,
        count: int,
        sampling: Sampling,
        eos: list[int],
        seconds: float = CONTROL_SECONDS,
    ) -> Reply:
        """Sample `count` answers to a prompt.

        Args:
            request: name of the request, for `abort`.
            prompt: [P] token ids.
            eos: token ids that end an answer; no others do.

        Raises:
            SilentServerError: no response within the time limit.
            ServerError: the response is not `count` complete answers.
        """
        parameters = {
            "n": count,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": eos,
            "ignore_eos": True,  # the server's EOS may differ from `eos`
            "logprobs": 0 if sampling.log_prob else None,
            "stop": list(sampling.stop.strings),
            "detokenize": bool(sampling.stop),
            "skip_special_tokens": False,  # the trainer decodes answers with special tokens, too
            "spaces_between_special_tokens": False,
        }
        body = {"request_id": request, "token_ids": prompt.tolist(), "sampling_params": parameters}
        most = MOST_BYTES + TOKEN_BYTES * count * sampling.max_tokens
        reply = self._ask("POST", "inference/v1/generate", seconds, body, most)
        return read_reply(reply, count, sampling, self._vocabulary)

    def abort(self, requests: Sequence[str]) -> None:
        """Abort requests; a server that cannot be reached is ignored."""
        names = [f"generate-tokens-{request}" for request in requests]
        with suppress(ServerError):
            self.post("abort_requests", {"request_ids": names}, ABORT_SECONDS)

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def _ask(
        self, method: str, path: str, seconds: float, body: Mapping[str, Any] | None = None, most: int = MOST_BYTES
    ) -> Any:
        try:
            answer = self._session.request(
                method,
                f"{self.url}/{path}",
                json=body,
                timeout=(CONNECT_SECONDS, seconds),
                allow_redirects=False,  # a redirect could send the token to another host
                stream=True,
            )
            with answer:
                content = _content(answer, seconds, most)
        except (requests.ReadTimeout, ReadTimeoutError):
            raise SilentServerError(f"no answer for {seconds:.0f} s") from None
        except (requests.RequestException, HTTPError) as error:
            raise ServerError(_cause(error)) from None
        if answer.status_code != requests.codes.ok:
            raise ServerError(f"{answer.status_code} {_message(content)}", answer.status_code)
        try:
            return plain.parse_json(content)
        except ValueError:
            raise ServerError(f"no JSON but {shown(content[:80], 80)}", answer.status_code) from None


def _content(answer: requests.Response, seconds: float, most: int) -> bytes:
    """Read the body of a response.

    Raises:
        SilentServerError: it has not ended after these seconds, even if data still arrives.
        ServerError: it is longer than `most` bytes.
        HTTPError: urllib3's, if the connection breaks.
    """
    content, end = bytearray(), time.monotonic() + seconds
    while part := answer.raw.read1(PART_BYTES, decode_content=False):
        content += part
        if len(content) > most:
            raise ServerError(f"an answer of more than {most} bytes")
        if time.monotonic() > end:
            raise SilentServerError(f"no whole answer for {seconds:.0f} s")
    return bytes(content)


class _Adapter(HTTPAdapter):
    """Sets socket options that detect a dead peer."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, socket_options=ALIVE, **kwargs)


def _cause(error: BaseException) -> str:
    """Return the innermost reason, which is the clearest: connection refused, timed out."""
    reason = getattr(error.args[0], "reason", None) if error.args else None
    text = str(reason or error)
    return cut(" ".join(text.rpartition(": ")[2].strip("'\")( ").split()), 300) or type(error).__name__


def _message(content: bytes) -> str:
    """Return the error message in a response, or its beginning."""
    try:
        body = plain.parse_json(content)
        message = body["error"]["message"] if "error" in body else body["detail"]
    except (ValueError, KeyError, TypeError):
        message = content[:1000].decode(errors="replace")
    return cut(" ".join((message if isinstance(message, str) else shown(message)).split()), 300)
