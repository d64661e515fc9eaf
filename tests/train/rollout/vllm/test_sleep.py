"""Sleeping engines, on a stand-in for a GPU's vLLM: it raises where the real one would touch memory that is not there.

CPUs have no memory to give back, so the real engine cannot sleep here.
"""

import dataclasses
from contextlib import suppress

import numpy as np
import pytest
import torch
from exgrpo.train.rollout.vllm.sleep import Sleep

from exgrpo.train.rollout.engine import Sampling, collect
from exgrpo.train.rollout.vllm.engine import GIB, VllmEngine, _arguments
from exgrpo.train.rollout.vllm.process import Guest
from tests.train import tiny
from tests.train.asking import requests_for

PROMPT = np.array([1, 2, 3], np.int32)
ASKED = requests_for([PROMPT], [1], Sampling(1), [0])
GARBAGE = -1


class StandIn:
    """Memory by tag as vLLM keeps it; its one weight is the token that it generates."""

    def __init__(self, weight=1):
        self.asleep = set()
        self.weight = weight
        self.saved = None
        self.requests = {}

    def sleep(self, level):
        assert not self.requests, "asleep with requests under way"
        assert "weights" not in self.asleep, "vLLM passes over a second sleep"
        self.saved = self.weight if level == 1 else None
        self.weight = GARBAGE
        self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags):
        for tag in tags:
            assert tag in self.asleep, f"vLLM passes over a wake of {tag}, which is awake"
        self.asleep -= set(tags)
        if "weights" in tags and self.saved is not None:
            self.weight = self.saved

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        assert "weights" not in self.asleep, "weights are loaded into memory that is not there"
        ((_, weight),) = kwargs["weights_iterator"]
        self.weight = int(weight)

    def apply_model(self, function):
        raise AssertionError("reads memory that may not be there")

    def has_unfinished_requests(self):
        return bool(self.requests)

    def reset_prefix_cache(self):
        assert not self.asleep

    def add_request(self, name, prompt, parameters):
        assert not self.asleep, "generates while it is asleep"
        self.requests[name] = prompt

    def step(self):
        assert not self.asleep, "generates while it is asleep"
        name, _ = self.requests.popitem()
        return [Output(name, self.weight)]

    def abort_request(self, names):
        for name in names:
            self.requests.pop(name)


class Output:
    num_cached_tokens = 0
    finished = True

    def __init__(self, request_id, token):
        self.request_id = request_id
        self.outputs = [self]
        self.token_ids = [token]
        self.finish_reason = "stop"


class Weights:
    """Can be run through again, as the trainer's."""

    def __init__(self, weight):
        self.weight = weight

    def __iter__(self):
        return iter([("weight", torch.tensor(self.weight))])


class GpuEngine(VllmEngine):
    """The engine around the stand-in, which needs no vLLM."""

    def __init__(self, level):
        self._llm = self._engine = StandIn()
        self._guest = Guest(torch.device("cpu"))
        self._guest.device = torch.device("meta")
        self._sleep = Sleep(self._llm, level)
        self._weights = None
        self._prompt_tokens = self._cached_tokens = 0

    def _add(self, name, request, sample):
        self._engine.add_request(name, PROMPT, request.sampling)


def generated(engine):
    engine.wake()
    ((rollout,),) = collect(ASKED, engine.generate(ASKED))
    engine.sleep()
    return rollout.response[0]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_every_order_of_the_trainer_is_right(level):
    engine = GpuEngine(level)
    engine.sleep()  # while the trainer's own model is loaded
    engine.push_weights(Weights(2))
    assert generated(engine) == 2  # the check at the start
    assert generated(engine) == 2  # the evaluation before
    for weight in (3, 4, 5):
        assert generated(engine) == weight - 1
        engine.sleep()
        engine.push_weights(Weights(weight))
        if weight == 4:
            assert generated(engine) == weight  # a check
            assert generated(engine) == weight  # an evaluation
    engine.push_weights(Weights(6))
    engine.sleep()  # before any generation
    assert generated(engine) == 6


def test_nothing_is_generated_from_lost_weights_and_at_level_1_they_come_back():
    engine = GpuEngine(1)
    engine.push_weights(iter(Weights(2)))
    assert [generated(engine), generated(engine)] == [2, 2]
    engine = GpuEngine(2)
    engine.push_weights(iter(Weights(2)))
    assert generated(engine) == 2
    with pytest.raises(RuntimeError, match="dropped its weights .*: push them before it wakes"):
        engine.wake()
    engine.push_weights(iter(Weights(3)))
    assert generated(engine) == 3


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_refuses_to_work(level):
    engine = GpuEngine(level)
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep: wake it"):
        next(engine.generate(ASKED))
    with pytest.raises(RuntimeError, match="asleep: compare its weights before"):
        engine.differing(Weights(2))
    engine.push_weights(Weights(2))
    with pytest.raises(RuntimeError, match="asleep: wake it"):  # it has its weights, but no cache yet
        next(engine.generate(ASKED))


@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_time_asleep_ends_with_a_push_or_a_wake(level, monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    engine = GpuEngine(level)
    engine.sleep()
    asleep = engine.counts().asleep_seconds
    engine.push_weights(Weights(2))
    assert (asleep > 0) == (engine.counts().asleep_seconds > 0) == (level > 0)
    engine.wake()
    assert engine.counts().asleep_seconds == 0


def test_what_vllm_is_told_on_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    tiny.save_model(tmp_path, tied=True)
    settings = tiny.engine_settings(tmp_path, kv_cache_gib=20, tensor_parallel=2, sleep_level=2)
    gpu, cpu = torch.device("cuda", 1), torch.device("cpu")
    told = _arguments(settings, gpu)
    assert told["enable_sleep_mode"]
    assert "enforce_eager" not in told
    assert told["gpu_memory_utilization"] == 0.25
    assert (told["tensor_parallel_size"], told["distributed_executor_backend"]) == (2, "external_launcher")
    assert not {"enable_sleep_mode", "gpu_memory_utilization"} & set(_arguments(settings, cpu))
    awake = dataclasses.replace(settings, rollout=settings.rollout.model_copy(update={"sleep_level": 0}))
    assert not _arguments(awake, gpu)["enable_sleep_mode"]


def test_a_guest_has_random_numbers_and_threads_of_its_own_and_leaves_when_it_fails():
    guest, threads = Guest(torch.device("cpu")), torch.get_num_threads()

    def draws(host):
        guest.seed(3)
        torch.manual_seed(host)
        of_guest, of_host = [], []
        for _ in range(3):
            with suppress(ZeroDivisionError), guest:
                of_guest.append((torch.rand(1).item(), np.random.rand()))  # noqa: NPY002
                torch.set_num_threads(threads + 1)
                raise ZeroDivisionError
            of_host.append(torch.rand(1).item())
        assert torch.get_num_threads() == threads
        return of_guest, of_host

    torch.manual_seed(1)
    alone = [torch.rand(1).item() for _ in range(3)]
    first, of_host = draws(host=1)
    assert of_host == alone
    assert draws(host=2)[0] == first
    assert len(set(first)) == 3
