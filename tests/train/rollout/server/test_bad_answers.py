"""Servers that answer nonsense, or nothing: they are left out like dead ones, and the others do their work."""

import json
import logging
import math
import socket
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.common.errors import ConfigError
from exgrpo.train.rollout.server import client, pool
from exgrpo.train.rollout.server import sender as sender_module
from exgrpo.train.rollout.server.check import FRESH, PACKED_NCCL
from exgrpo.train.rollout.server.client import ServerClient, ServerError, SilentServerError, read_reply
from exgrpo.train.rollout.server.pool import NoServerError
from exgrpo.train.rollout.server.sender import WeightSender
from tests.train.configs import configured
from tests.train.rollout.server.fake_server import choice, reply
from tests.train.rollout.server.test_client import CPU, PROMPT, SAMPLING, jobs, pool_of
from tests.train.values import ANY, tried

VOCABULARY = 100


def changed(**values):
    """A sound answer but for some values."""
    return reply({**choice(0), **values})


def log_probs(*values):
    return {"content": [{"logprob": value} for value in values]}


BAD = {
    "negative id": (changed(token_ids=[-7, 2]), r"token_ids\.0: .*greater than or equal to 0 \(got -7\)"),
    "id beyond the vocabulary": (changed(token_ids=[100, 2]), "token id 100, and ids are from 0 to 99"),
    "too many": (changed(token_ids=[7] * 5, logprobs=log_probs(*[-0.5] * 5)), "5 tokens, and 1 to 4 were asked for"),
    "missing log-prob": (changed(logprobs=log_probs(-0.5)), "2 tokens with 1 log-probs"),
    "nan": (changed(logprobs=log_probs(-0.5, math.nan)), r"logprob: .*\(got nan\)"),
    "no label": (changed(weight_versions=[]), "weight_versions"),
    "reason": (changed(finish_reason="x" * 100_000), "finish_reason: Input should be 'stop' or 'length'"),
    "index": (changed(index=3), "1 answers of 1"),
    "none": (reply(), "0 answers of 1"),
    "list": ([1, 2], "not understood"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_answer_is_named(name):
    answer, message = BAD[name]
    with pytest.raises(ServerError, match=message) as error:
        read_reply(json.loads(json.dumps(answer)), 1, SAMPLING, VOCABULARY)
    assert len(str(error.value)) < 400


def places(value, path=()):
    """Where in a reply a value can be replaced, as keys one after the other."""
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(one, (*path, key))


@given(st.sampled_from(list(places(reply(choice(0))))), ANY)
def test_any_value_in_an_answer_is_an_error_or_what_a_model_can_have_written(path, value):
    found = answer = reply(choice(0))
    for key in path[:-1]:
        found = found[key]
    found[path[-1]] = value
    taken, error = tried(lambda: read_reply(answer, 1, SAMPLING, VOCABULARY), ServerError)
    assert len(error) < 1000
    for rollout in taken.rollouts if taken else ():
        assert 1 <= len(rollout.response) == len(rollout.log_prob) <= SAMPLING.max_tokens
        assert ((rollout.response >= 0) & (rollout.response < VOCABULARY)).all()
        assert ((rollout.log_prob <= 0.001) & (rollout.log_prob > -math.inf)).all()


@pytest.fixture
def sends():
    """The URL of a server that sends what a function writes to the connection, whatever it is asked."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(script):
        def accept():
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        connection.recv(2**16)
                        script(connection)
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(2**16):  # what comes later would reset the connection
                            pass

        threading.Thread(target=accept, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield serve
    listener.close()


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"\x16\x03\x01\x00",
        OK + b"a: b\r\n" * 200 + b"\r\n",
        OK + b"Content-Length: 1000000000000\r\n\r\n{",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        OK + b"Content-Encoding: gzip\r\n\r\nxx",
        b"HTTP/1.1 302 Go\r\nLocation: /\r\n\r\n",
        b"HTTP/1.1 500 Oh\r\n\r\n\x1b]0;x\x07" + b"\xff" * 100,
    ],
    ids=lambda content: str(content[:20]),
)
def test_what_is_no_http_or_no_answer_is_one_error(sends, content):
    url = sends(lambda to: to.sendall(content))
    with pytest.raises(ServerError) as error:
        ServerClient(url).generate("name", PROMPT, 1, SAMPLING, [2], 5)
    assert len(str(error.value)) < 500


def test_a_push_to_a_server_without_sense_leaves_it_out(fakes, settings):
    fake = fakes()
    fake.answers["weight_info"] = {"weight_version": 7}
    sender = WeightSender([ServerClient(fake.url)], settings, CPU, 1000)
    sender._receivers[0].channel = closed = Closed()
    (problem,) = sender.push([], "run-1").values()
    assert "weight_version is 7" in problem
    assert closed.closed
    sender.close()


class Closed:
    closed = False

    def close(self):
        self.closed = True


@pytest.fixture
def hung(fakes):
    """A server that takes requests and never answers, as one that was stopped."""
    server, released = fakes(), threading.Event()

    def wait(request):
        released.wait(60)
        return (None, None)

    server.generates(wait)
    yield server
    released.set()


def test_a_server_that_hangs_is_waited_for_in_proportion_to_the_work_and_with_a_word(fakes, hung, caplog, monkeypatch):
    monkeypatch.setattr(pool, "LEAST_SECONDS", 0.3)
    monkeypatch.setattr(pool, "TOKEN_SECONDS", 0.25)  # of 4 tokens
    good = fakes()
    good.generates(reply(choice(0)))
    got = [job.request for job, _ in pool_of(hung, good).generate(jobs(10))]
    assert sorted(got) == list(range(10))
    first, *_, last = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert first.startswith(f"no answer of a rollout server for 0 s: {hung.url} has ")
    assert last == f"rollout server {hung.url} is left out until the next push of weights: no answer for 1 s"
    assert len(hung.requests()) < 10  # none is asked of it again


def test_a_push_gives_a_server_up_whose_engine_hangs_before_ranks_give_each_other_up(settings, monkeypatch):
    known, waited = {"version": {"version": "0.33.0"}, "weight_info": {"weight_version": FRESH}}, []

    def hang(client, method, path, seconds, *_):
        if path not in known:
            waited.append((path, seconds))
            raise SilentServerError("no answer")
        return known[path]

    monkeypatch.setattr(ServerClient, "_ask", hang)
    sender = WeightSender([ServerClient("http://127.0.0.1:1")], settings, CPU, 1)
    (receiver,) = sender._receivers
    receiver.channel, receiver.label = SimpleNamespace(close=lambda: None), FRESH
    problems = [problem for _ in range(2) for problem in sender.push([], "next").values()]
    assert ["no answer" in problem for problem in problems] == [True, True]
    assert [path for path, _ in waited] == ["pause?mode=wait", "collective_rpc", "resume"]
    assert sum(seconds for _, seconds in waited) < 60 * configured().distributed.timeout_minutes


def test_weights_over_nccl_need_vllm_here_too_which_is_told_before_a_server_waits(fakes, settings, monkeypatch):
    fake, facts = fakes(), SimpleNamespace(backend=PACKED_NCCL, workers=1, label=FRESH)
    fake.answers["shutdown_weight_transfer_engine"] = {}
    monkeypatch.setattr(sender_module, "check_server", lambda *_: facts)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.nccl_common", None)  # vLLM is not installed
    sender = WeightSender([ServerClient(fake.url)], settings, CPU, 1)
    with pytest.raises(ConfigError, match=r"the trainer needs vLLM 0\.32 to 0\.33, too \(.*pip install"):
        sender.open()
    assert not fake.requests("init_weight_transfer_engine")


def test_a_consumer_that_leaves_waits_for_no_server_that_is_left_out(hung, monkeypatch):
    monkeypatch.setattr(pool, "LEAST_SECONDS", 0.3)
    monkeypatch.setattr(pool, "TOKEN_SECONDS", 0.0)
    hung.answers["abort_requests"] = hung.answers["inference/v1/generate"]
    with pytest.raises(NoServerError, match="no answer for 0 s"):
        list(pool_of(hung).generate(jobs(20)))
    assert not hung.requests("abort_requests")


@pytest.mark.parametrize(
    ("part", "pause", "seconds", "message"),
    [(b" ", 0.05, 0.3, "no whole answer for 0 s"), (b"1," * 2**19, 0, 60, "more than")],
)
def test_an_answer_without_an_end_is_given_up(sends, monkeypatch, part, pause, seconds, message):
    """The stand-in sends for ten seconds; who reads to the end sees it close the connection."""
    monkeypatch.setattr(client, "MOST_BYTES", 2**22)

    def script(to):
        to.sendall(OK + b"\r\n")
        end = time.monotonic() + 10
        while time.monotonic() < end:
            to.sendall(part)
            time.sleep(pause)

    with pytest.raises(ServerError, match=message):
        ServerClient(sends(script)).generate("name", PROMPT, 1, SAMPLING, [2], seconds)
