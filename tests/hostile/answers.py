"""Hostile answers of rollout servers: a stand-in that sends any bytes, at any pace, to the trainer's client."""

import copy
import functools
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from exgrpo.train.rollout import Sampling
from exgrpo.train.rollout.server.client import ServerClient
from exgrpo.train.rollout.server.pool import Job, NoServerError, ServerPool
from exgrpo.train.rollout.server.reply import LARGEST_ID, Reply, ServerError
from tests.hostile import texts
from tests.hostile.judge import Trial

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


def pause(part: bytes) -> None:
    """Between parts of an answer that drips; large ones come at once."""
    time.sleep(0.1 if len(part) < 100 else 0.0)


def http(body: bytes, status: str = "200 OK", length: object = None) -> bytes:
    """An answer as it goes over the line."""
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n".encode() + body


def client() -> ServerClient:
    """A client of the stand-in, which does not wait long between its attempts."""
    made = ServerClient(server().url, VOCABULARY)
    for adapter in made._session.adapters.values():
        adapter.max_retries.backoff_factor = 0.001  # type: ignore[attr-defined]
    return made


def ask(script: Script, count: int = 1) -> Reply:
    """What the client makes of what the stand-in sends."""
    server().script = script
    with closing(client()) as asking:
        return asking.generate("name", np.array([3, 4], np.int32), count, SAMPLING, [EOS], SECONDS)


def ask_pool(script: Script, count: int) -> Reply:
    """The same as a run asks: through the pool of its servers."""
    server().script = script
    with closing(client()) as asking:
        pool = ServerPool([asking], [EOS])
        pool.expect("default")
        pool.renew({server().url: ""})
        ((_, reply),) = pool.generate([Job(0, 0, count, np.array([3, 4], np.int32), SAMPLING)])
    return reply


def choices(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Sound answers."""
    made = []
    for index in range(count):
        tokens = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, TOKENS))]
        made.append(
            {
                "index": index,
                "finish_reason": rng.choice(("stop", "length")),
                "token_ids": tokens,
                "weight_versions": [{"version": "default", "start": 0, "end": len(tokens)}],
                "logprobs": {"content": [{"logprob": -rng.expovariate(1)} for _ in tokens]},
            }
        )
    return made


def reply(of: list[dict[str, Any]]) -> dict[str, Any]:
    """A sound answer to a request."""
    return {"choices": of, "usage": {"prompt_tokens_details": None}}


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


def trial(rng: random.Random, what: str, content: bytes, count: int = 1, **expected: Any) -> Trial:
    """One answer, to the client or to the pool; `expected` is that of the `Trial`."""
    given = {"wrong": sensible, **expected}
    if rng.random() < 0.1:
        return Trial(what, lambda: ask_pool(lambda to: to.sendall(content), count), **given, errors=(NoServerError,))
    return Trial(what, lambda: ask(lambda to: to.sendall(content), count), **given, errors=(ServerError,))


def drawn(rng: random.Random, folder: Path) -> Trial:
    """One of them."""
    return rng.choice(WAYS)(rng)


def _sound(rng: random.Random) -> Trial:
    right = choices(rng, count := rng.randint(1, 5))
    mixed = rng.sample(right, count)
    return trial(
        rng, "sound", http(json.dumps(reply(mixed)).encode()), count, expected="right", wrong=other_than(right)
    )


WRONG: dict[str, tuple[Any, ...]] = {
    "token_ids": ([], None, "x", [-1], [VOCABULARY], [LARGEST_ID + 1], [10**30], ["1"], [1.5], [[1]], [None], [1] * 99),
    "finish_reason": (None, "", "abort", 7, ["stop"], "x" * 10**5, "\x1b[2J"),
    "index": (None, -1, 7, 10**30, "0", 0.0, True),
    "weight_versions": (None, [], "x", [None], [{}], [{"version": 3}], [{"version": ""}]),
    "logprobs": (None, [], {}, {"content": None}, {"content": []}, {"content": [None]}, {"content": 7}),
}


def _wrong(rng: random.Random) -> Trial:
    """One value that no server in order sends."""
    made = choices(rng, count := rng.randint(1, 4))
    key = rng.choice(sorted(WRONG))
    rng.choice(made)[key] = rng.choice(WRONG[key])
    return trial(rng, f"wrong {key}", http(json.dumps(reply(made)).encode()), count, expected="refused")


def _log_prob(rng: random.Random) -> Trial:
    made = choices(rng, count := rng.randint(1, 4))
    values = (
        float("nan"),
        float("inf"),
        -float("inf"),
        0.5,
        1e308,
        -1e308,
        -1e39,
        None,
        "-1",
        [],
        -(10**400),
        {},
        [-1.0],
    )
    rng.choice(rng.choice(made)["logprobs"]["content"])["logprob"] = rng.choice(values)
    return trial(rng, "wrong log-prob", http(json.dumps(reply(made)).encode()), count, expected="refused")


def _number(rng: random.Random) -> Trial:
    """More or fewer answers, tokens or log-probs than there should be."""
    made = choices(rng, count := rng.randint(1, 4))
    one = rng.choice(made)
    match rng.randrange(5):
        case 0:
            made.pop()
        case 1:
            made.append(copy.deepcopy(one))
        case 2:
            one["logprobs"]["content"].pop()
        case 3:
            one["logprobs"]["content"] *= 2
        case _:
            one["token_ids"] *= 2
    return trial(rng, "wrong numbers", http(json.dumps(reply(made)).encode()), count, expected="refused")


def _any_value(rng: random.Random) -> Trial:
    made: Any = reply(choices(rng, count := rng.randint(1, 3)))
    *path, last = rng.choice([path for path in _places(made) if path])
    place = made
    for key in path:
        place = place[key]
    place[last] = texts.value(rng)
    return trial(rng, "any value", http(json.dumps(made).encode()), count)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(one, (*path, key))


def _no_json(rng: random.Random) -> Trial:
    bad = (b"", b"{", b"null", b"7", b"[]", b"{}", b'"x"', b"\xff\xfe", b"[" * 10**5, b'{"a":' * 10**5, b"9" * 5000)
    bad += (b"<html>", b"\x00", b"\x1b[2J" * 100, b'{"choices": [7]}', b'{"choices": [[]]}', b"NaN", b'"\\ud800"')
    return trial(rng, "no answer", http(rng.choice(bad)), expected="refused")


def _damaged(rng: random.Random) -> Trial:
    content = http(json.dumps(reply(choices(rng, count := rng.randint(1, 3)))).encode())
    return trial(rng, "damaged", texts.damaged(rng, content) + b"\r\n\r\n", count)


def _status(rng: random.Random) -> Trial:
    status = rng.choice(
        ("400 Bad", "401 No", "404 None", "500 Oh", "503 Later", "301 Away", "204 Nothing", "600 X", "99 Y")
    )
    bodies: tuple[bytes, ...] = (
        b"",
        b"{}",
        b'{"error": {"message": 7}}',
        b'{"error": 7}',
        b'{"detail": null}',
        b"x" * 10**6,
    )
    body = rng.choice((*bodies, b'{"error": {"message": "\\u001b[2J"}}', b"[" * 10**5, b"\x1b]0;x\x07", b"\xff" * 100))
    return trial(rng, "another status", http(body, status), expected="refused")


def _no_http(rng: random.Random) -> Trial:
    bad = (
        b"",
        b"\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"SSH-2.0-x\r\n",
        b"\x16\x03\x01\x00",
        b"x" * 70_000,
    )
    bad += (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: -7\r\n\r\n{}")
    bad += (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"HTTP/1.1 302 Go\r\nLocation: /\r\n\r\n")
    bad += (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nxx", b"HTTP/1.1 100 Go\r\n\r\n" * 300)
    bad += (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n{", http(b"{", length=10**12))
    return trial(rng, "no HTTP", rng.choice(bad), expected="refused")


def _cut(rng: random.Random) -> Trial:
    """A connection that is closed, or reset, before the answer is whole."""
    content = http(json.dumps(reply(choices(rng, 1))).encode())
    part, reset = content[: rng.randrange(len(content))], rng.random() < 0.5

    def script(to: socket.socket) -> None:
        to.sendall(part)
        if reset:
            to.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    return Trial("cut", lambda: ask(script), "refused", errors=(ServerError,))


def _slow(rng: random.Random) -> Trial:
    """Answers that come in parts, and do not end in time, or never."""
    content = http(json.dumps(reply(choices(rng, 1))).encode(), length=10**6)
    head = content.index(b"\r\n\r\n") + 4 if rng.random() < 0.7 else 0

    def script(to: socket.socket) -> None:
        to.sendall(content[:head])
        end = time.monotonic() + LATE
        while time.monotonic() < end:
            to.sendall(b" ") if head else None
            time.sleep(0.1)

    def asked() -> float:
        begun = time.monotonic()
        with suppress(ServerError):
            ask(script)
        return time.monotonic() - begun

    return Trial("slow", asked, "right", wrong=lambda took: f"waits for {took:.0f} s" if took > LATE / 2 else "")


def _enormous(rng: random.Random) -> Trial:
    """More than any answer has, with a length or without, or packed."""
    part = rng.choice((b" ", b"[", b"1,")) * 2**20
    head = rng.choice((http(b"", length=10**12), b"HTTP/1.1 200 OK\r\n\r\n"))

    def script(to: socket.socket) -> None:
        to.sendall(head)
        end = time.monotonic() + LATE
        while time.monotonic() < end:
            to.sendall(part)

    return Trial("enormous", lambda: ask(script), "refused", errors=(ServerError,))


WAYS = (
    *(_sound, _wrong, _wrong, _wrong, _log_prob, _number, _any_value, _any_value, _no_json, _damaged, _damaged) * 3,
    *(_status, _no_http, _cut, _cut, _status, _no_http, _slow, _enormous),
)
