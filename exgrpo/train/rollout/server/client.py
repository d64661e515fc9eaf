"""HTTP to one `vllm serve` instance: token ids in, checked token ids and log-probs out, and weight-transfer routes."""

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import requests
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError, ReadTimeoutError

from exgrpo.train.common import plain
from exgrpo.train.common.errors import cut, printable, shown
from exgrpo.train.common.records import Rollout, TokenIds
from exgrpo.train.config.section import explain
from exgrpo.train.rollout.engine import Sampling

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
LARGEST_ID = 2**31 - 1
LOWEST_LOG_PROB = float(np.finfo(np.float32).min)
ROUNDING = 1e-3
"""Rounding error by which a log-prob may exceed 0."""
UNKNOWN = "an answer that is not understood"
ALIVE = [
    *HTTPConnection.default_socket_options,
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    # Keepalive probes are not sent while data is unacknowledged; this limit covers that case.
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREACHED_SECONDS),
]
T = TypeVar("T")


class ServerError(RuntimeError):
    """A request to a server failed, with one line of its or the network's message and the HTTP status, if any."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(printable(message))
        self.status = status


class SilentServerError(ServerError):
    """Raised when a server does not respond in time."""


@dataclass(frozen=True, eq=False)
class Reply:
    """A server's answers to one prompt.

    Attributes:
        rollouts: answers in sampling order.
        versions: labels of the weights that wrote them, at least one.
        cached_tokens: prompt tokens read from the prefix cache, summed over the samples.
    """

    rollouts: tuple[Rollout, ...]
    versions: frozenset[str]
    cached_tokens: int


Number = Annotated[int, Field(ge=0, le=LARGEST_ID)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class _Token(_Part):
    logprob: float = Field(ge=LOWEST_LOG_PROB, le=ROUNDING)  # a NaN is neither


class _LogProbs(_Part):
    content: list[_Token]


class _Span(_Part):
    version: str = Field(min_length=1)


class _Choice(_Part):
    index: int
    finish_reason: Literal["stop", "length"]
    token_ids: list[Number] = Field(min_length=1)
    weight_versions: list[_Span] = Field(min_length=1)
    logprobs: _LogProbs | None = None


class _Details(_Part):
    cached_tokens: Number | None = None


class _Usage(_Part):
    prompt_tokens_details: _Details | None = None


class _Answers(_Part):
    choices: list[_Choice]
    usage: _Usage


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
        """Return the JSON at a path; raise ServerError if the request fails or takes longer."""
        return self._ask("GET", path, seconds)

    def post(self, path: str, body: Mapping[str, Any] | None = None, seconds: float = CONTROL_SECONDS) -> Any:
        """Post JSON to a path and return the JSON response; raise ServerError if it fails or takes longer."""
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
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, socket_options=ALIVE, **kwargs)


def _cause(error: BaseException) -> str:
    """Return the innermost reason, which is the clearest: connection refused, timed out."""
    reason = getattr(error.args[0], "reason", None) if error.args else None
    text = str(reason or error)
    return cut(" ".join(text.rpartition(": ")[2].strip("'\")( ").split()), 300) or type(error).__name__


def _message(content: bytes) -> str:
    try:
        body = plain.parse_json(content)
        message = body["error"]["message"] if "error" in body else body["detail"]
    except (ValueError, KeyError, TypeError):
        message = content[:1000].decode(errors="replace")
    return cut(" ".join((message if isinstance(message, str) else shown(message)).split()), 300)


def part(answer: Any, key: str, kind: type[T]) -> T:
    """Return the value of a key in a server's response; raise ServerError if it is missing or of another type."""
    value = answer.get(key) if isinstance(answer, dict) else None
    if type(value) is not kind or value == "":
        raise ServerError(f"{UNKNOWN}: {key} is {shown(value)}")
    return value


def read_reply(reply: Any, count: int, sampling: Sampling, vocabulary: int) -> Reply:
    """Parse the response to a request; raise ServerError if it is not `count` complete answers."""
    try:
        answers = _Answers.model_validate(reply)
    except ValidationError as error:
        raise ServerError(cut(explain(error, _Answers, UNKNOWN), 300)) from None
    choices = sorted(answers.choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(count)):
        raise ServerError(f"{len(choices)} answers of {count}")
    details = answers.usage.prompt_tokens_details
    cached = details.cached_tokens if details else None
    return Reply(
        rollouts=tuple(sampling.stop.cut(_rollout(choice, sampling, vocabulary)) for choice in choices),
        versions=frozenset(span.version for choice in choices for span in choice.weight_versions),
        # The server reports one sample that read the cache; the first sample filled it for the others.
        cached_tokens=(cached or 0) * max(1, count - 1),
    )


def _rollout(choice: _Choice, sampling: Sampling, vocabulary: int) -> Rollout:
    tokens = np.array(choice.token_ids, np.int32)
    if len(tokens) > sampling.max_tokens:
        raise ServerError(f"an answer of {len(tokens)} tokens, and 1 to {sampling.max_tokens} were asked for")
    if tokens.max() >= vocabulary:
        raise ServerError(f"an answer with the token id {tokens.max()}, and ids are from 0 to {vocabulary - 1}")
    log_prob = None
    if sampling.log_prob:
        log_prob = np.array([token.logprob for token in choice.logprobs.content] if choice.logprobs else [], np.float32)
        if len(log_prob) != len(tokens):
            raise ServerError(f"an answer of {len(tokens)} tokens with {len(log_prob)} log-probs")
    return Rollout(tokens, choice.finish_reason == "stop", log_prob)
