"""Hostile answers of rollout servers: a stand-in that sends any bytes to the trainer's client.

Those that come slowly, or have no end, are in tests/train/rollout/server/test_bad_answers.py.
"""

import functools
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import sampled_from as of

from exgrpo.train.rollout.engine import Sampling
from exgrpo.train.rollout.server import pool
from exgrpo.train.rollout.server.client import ServerClient
from exgrpo.train.rollout.server.pool import Job, NoServerError, ServerPool
from exgrpo.train.rollout.server.reply import LARGEST_ID, Reply, ServerError
from tests.hostile.judge import Trial
from tests.hostile.values import ANY, Draw, damaged, some

VOCABULARY, TOKENS, SECONDS = 100, 6, 1.0
EOS = 2
SAMPLING = Sampling(TOKENS, log_prob=True)
LATE = 20.0
"""Seconds. A client that has not given up by then waits for what never comes."""
Script = Callable[[socket.socket], None]


class Server:
    """Answers every request by the script of the moment."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.script: Script = socket.socket.close
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.settimeout(LATE)
            asked = b""
            while b"\r\n\r\n" not in asked and (part := connection.recv(2**16)):
                asked += part
            head, _, body = asked.partition(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0
            )
            while len(body) < length and (part := connection.recv(2**16)):
                body += part
            self.script(connection)


@functools.cache
def server() -> Server:
    """The one of this process."""
    return Server()


def http(body: bytes, status: str = "200 OK", length: object = None) -> bytes:
    """An answer as it goes over the line."""
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n".encode() + body


def ask(script: Script, count: int = 1) -> Reply:
    """What the client makes of what the stand-in sends."""
    server().script = script
    with closing(ServerClient(server().url, VOCABULARY)) as asking:
        return asking.generate("name", np.array([3, 4], np.int32), count, SAMPLING, [EOS], SECONDS)


def ask_pool(script: Script, count: int) -> Reply:
    """The same as a run asks: through the pool of its servers."""
    server().script = script
    with closing(ServerClient(server().url, VOCABULARY)) as asking, mock.patch.object(pool, "PAUSE_SECONDS", 0.001):
        made = ServerPool([asking], [EOS])
        made.expect("default")
        made.renew({server().url: ""})
        ((_, reply),) = made.generate([Job(0, 0, count, np.array([3, 4], np.int32), SAMPLING)])
    return reply


LOG_PROBS = st.floats(-30, 0, width=32)


def choices(draw: Draw, most: int) -> list[dict[str, Any]]:
    """Sound answers."""
    made = []
    for index in range(some(draw, 1, most)):
        tokens = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=TOKENS))
        made.append(
            {
                "index": index,
                "finish_reason": draw(of(("stop", "length"))),
                "token_ids": tokens,
                "weight_versions": [{"version": "default", "start": 0, "end": len(tokens)}],
                "logprobs": {"content": [{"logprob": draw(LOG_PROBS)} for _ in tokens]},
            }
        )
    return made


def reply(of_request: list[dict[str, Any]]) -> dict[str, Any]:
    """A sound answer to a request."""
    return {"choices": of_request, "usage": {"prompt_tokens_details": None}}


def sent(of_request: Any) -> bytes:
    """The same over the line."""
    return http(json.dumps(of_request).encode())


def other_than(right: list[dict[str, Any]]) -> Callable[[Reply], str]:
    """Says what is wrong with a reply that was taken."""

    def wrong(found: Reply) -> str:
        got = [(one.response.tolist(), one.finished, np.float32(one.log_prob).tolist()) for one in found.rollouts]
        expected = [
            (one["token_ids"], one["finish_reason"] == "stop", _log_probs(one["logprobs"]["content"])) for one in right
        ]
        return "" if got == expected else f"{got!r:.300} instead of {expected!r:.300}"

    return wrong


def _log_probs(content: list[dict[str, float]]) -> list[float]:
    return np.array([token["logprob"] for token in content], np.float32).tolist()


def sensible(found: Reply) -> str:
    """What is wrong with a reply to a damaged answer that was taken: it must be one that a model can have written."""
    for one in found.rollouts:
        sizes = 1 <= len(one.response) == len(one.log_prob) <= TOKENS  # type: ignore[arg-type]
        ids = sizes and one.response.min() >= 0 and one.response.max() < VOCABULARY
        if not ids or not np.isfinite(one.log_prob).all() or (one.log_prob > 0.001).any():  # type: ignore[arg-type,operator]
            return f"no answer of a model: {one}"
    return "" if found.versions else "nobody knows its weights"


def trial(draw: Draw, what: str, content: bytes, count: int = 1, expected: Any = "refused", **more: Any) -> Trial:
    """One answer, to the client or to the pool."""
    asked, error = draw(of((*[(ask, ServerError)] * 9, (ask_pool, NoServerError))))
    call = lambda: asked(lambda to: to.sendall(content), count)  # noqa: E731
    return Trial(what, call, expected, **{"wrong": sensible, **more}, errors=(error,))


def _sound(draw: Draw, folder: Path) -> Trial:
    right = choices(draw, 5)
    content = sent(reply(draw(st.permutations(right))))
    return trial(draw, "sound", content, len(right), "right", wrong=other_than(right))


WRONG: dict[str, tuple[Any, ...]] = {
    "token_ids": ([], None, "x", [-1], [VOCABULARY], [LARGEST_ID + 1], [10**30], ["1"], [1.5], [[1]], [None], [1] * 99),
    "finish_reason": (None, "", "abort", 7, ["stop"], "x" * 10**5, "\x1b[2J"),
    "index": (None, -1, 7, 10**30, "0", 0.0, True),
    "weight_versions": (None, [], "x", [None], [{}], [{"version": 3}], [{"version": ""}]),
    "logprobs": (None, [], {}, {"content": None}, {"content": []}, {"content": [None]}, {"content": 7}),
}
NO_LOG_PROBS: tuple[Any, ...] = (float("nan"), float("inf"), -float("inf"), 0.5, 2.0, 1e308, -1e308, -1e39, None)
NO_LOG_PROBS += (-(10**400), {}, [-1.0], "-1", [])
NO_REPLIES = (b"", b"{", b"null", b"7", b"[]", b"{}", b'"x"', b"\xff\xfe", b"[" * 10**5, b'{"a":' * 10**5, b"9" * 5000)
NO_REPLIES += (b"<html>", b"\x00", b"\x1b[2J" * 100, b'{"choices": [7]}', b'{"choices": [[]]}', b"NaN", b'"\\ud800"')
STATUS = ("400 Bad", "401 No", "404 None", "500 Oh", "503 Later", "301 Away", "204 Nothing", "600 X", "99 Y")
BODIES = (b"", b"{}", b'{"error": {"message": 7}}', b'{"error": 7}', b'{"detail": null}', b"x" * 10**6, b"[" * 10**5)
BODIES += (b'{"error": {"message": "\\u001b[2J"}}', b"\x1b]0;x\x07", b"\xff" * 100)
OK = b"HTTP/1.1 200 OK\r\n"
NO_HTTP = (b"", b"\r\n\r\n", b"HTTP/9.9 200 OK\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01\x00")
NO_HTTP += (b"x" * 70_000, OK + b"a: b\r\n" * 200 + b"\r\n", OK + b"Content-Length: -7\r\n\r\n{}")
NO_HTTP += (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"HTTP/1.1 302 Go\r\nLocation: /\r\n\r\n")
NO_HTTP += (OK + b"Content-Encoding: gzip\r\n\r\nxx", b"HTTP/1.1 100 Go\r\n\r\n" * 300, http(b"{", length=10**12))
NO_HTTP += (OK + b"Transfer-Encoding: chunked\r\n\r\nffffffffff\r\n{",)


def _wrong(draw: Draw, folder: Path) -> Trial:
    """One value that no server in order sends, or more or fewer answers, tokens or log-probs than there should be."""
    made = choices(draw, 4)
    one, count, key = draw(of(made)), len(made), draw(of((*WRONG, "logprob", "logprob", "logprob", "number")))
    content = one["logprobs"]["content"]
    if key in WRONG:
        one[key] = draw(of(WRONG[key]))
    elif key == "logprob":
        draw(of(content))["logprob"] = draw(of(NO_LOG_PROBS))
    else:
        draw(of((made.pop, lambda: made.append(one), content.pop, lambda: content.extend(content[:]),
                 lambda: one["token_ids"].extend(one["token_ids"][:]))))()  # fmt: skip
    return trial(draw, f"wrong {key}", sent(reply(made)), count)


def _any_value(draw: Draw, folder: Path) -> Trial:
    made: Any = reply(choices(draw, 3))
    count = len(made["choices"])
    *path, last = draw(of([path for path in _places(made) if path]))
    place = made
    for key in path:
        place = place[key]
    place[last] = draw(ANY)
    return trial(draw, "any value", sent(made), count, "either")


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(one, (*path, key))


def _damaged(draw: Draw, folder: Path) -> Trial:
    made = choices(draw, 3)
    return trial(draw, "damaged", damaged(draw, sent(reply(made))) + b"\r\n\r\n", len(made), "either")


def _no_answer(draw: Draw, folder: Path) -> Trial:
    no_status = http(draw(of(BODIES)), draw(of(STATUS)))
    return trial(draw, "no answer", draw(of((http(draw(of(NO_REPLIES))), no_status, draw(of(NO_HTTP))))))


def _cut(draw: Draw, folder: Path) -> Trial:
    """A connection that is closed, or reset, before the answer is whole."""
    content = sent(reply(choices(draw, 1)))
    part, reset = content[: some(draw, 0, len(content) - 1)], draw(st.booleans())

    def script(to: socket.socket) -> None:
        to.sendall(part)
        if reset:
            to.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    return Trial("cut", lambda: ask(script), "refused", errors=(ServerError,))


WAYS = (*(_wrong, _any_value, _damaged, _wrong, _sound, _wrong, _any_value, _no_answer) * 4, _cut)
