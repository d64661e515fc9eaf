"""The engine on a GPU, with a stand-in for vLLM: CPUs have no memory to give back, so the real one does not sleep."""

import dataclasses
from contextlib import suppress

import numpy as np
import pytest
import torch

from exgrpo.train.common.distributed import World
from exgrpo.train.common.errors import ConfigError, RolloutError
from exgrpo.train.rollout.engine import Sampling, collect
from exgrpo.train.rollout.vllm import engine as engine_module
from exgrpo.train.rollout.vllm.engine import GIB, VllmEngine, arguments, cache_gib, sequences, token_bytes
from exgrpo.train.rollout.vllm.process import Guest
from tests.train import tiny
from tests.train.asking import requests_for
from tests.train.rollout.vllm.signatures import recorded, signature
from tests.train.rollout.vllm.stand_in import Module, Weights

PROMPT = np.array([1, 2, 3], np.int32)
ASKED = requests_for([PROMPT], [1], Sampling(1), [0])
GPU = torch.device("cuda", 0)


@pytest.fixture(params=sorted(recorded()))
def module(request, monkeypatch):
    """A version of vLLM, and a GPU as far as the engine asks for one."""
    module = Module(request.param)
    monkeypatch.setattr(engine_module, "import_vllm", lambda device: module)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(module, "emptied", True))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: module.states.append(1))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: module.seeds.append(seed))
    module.states, module.seeds = [], []
    return module


@pytest.fixture
def opened(module, folder):
    def make(level=2, **rollout):
        settings = tiny.engine_settings(folder, sleep_level=level, **rollout)
        return VllmEngine(settings, World(0, 1, GPU, None))

    return make


def generated(engine):
    engine.wake()
    ((rollout,),) = collect(ASKED, engine.generate(ASKED))
    engine.sleep()
    return rollout.response[0]


@pytest.mark.parametrize("level", [None, 0, 1, 2])
def test_every_order_of_the_trainer_is_right(module, opened, level):
    engine = opened(level)
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
    assert module.reloads == 1  # then the weight is copied in place


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_refuses_to_work(opened, level):
    engine = opened(level)
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep: wake it"):
        next(engine.generate(ASKED))
    with pytest.raises(RuntimeError, match="asleep: compare its weights before"):
        engine.differing(Weights(2))
    if level == 2:
        with pytest.raises(RuntimeError, match="dropped its weights .*: push them before it wakes"):
            engine.wake()
    engine.push_weights(Weights(2))
    with pytest.raises(RuntimeError, match="asleep: wake it"):  # it has its weights, but no cache yet
        next(engine.generate(ASKED))
    assert [generated(engine), generated(engine)] == [2, 2]


@pytest.mark.parametrize("level", [None, 0, 1, 2])
def test_the_time_asleep_ends_with_a_push_or_a_wake(opened, level, monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    engine = opened(level)
    engine.sleep()
    engine.push_weights(Weights(2))
    assert (engine.counts().asleep_seconds > 0) == (level != 0)
    engine.wake()
    assert engine.counts().asleep_seconds == 0


def test_what_vllm_is_told_on_gpus(module, opened, folder):
    settings = tiny.engine_settings(folder, kv_cache_gib=20, tensor_parallel=2, sleep_level=2)
    told = arguments(settings, GPU)
    assert told["enable_sleep_mode"]
    assert "enforce_eager" not in told
    assert told["gpu_memory_utilization"] == 0.25
    assert (told["tensor_parallel_size"], told["distributed_executor_backend"]) == (2, "external_launcher")
    on_cpu = arguments(settings, torch.device("cpu"))
    assert not {"enable_sleep_mode", "gpu_memory_utilization", "attention_backend"} & set(on_cpu)
    awake = dataclasses.replace(settings, rollout=settings.rollout.model_copy(update={"sleep_level": 0}))
    assert not arguments(awake, GPU)["enable_sleep_mode"]
    half = dataclasses.replace(settings, dtype=torch.bfloat16)
    for of, attention in ((settings, "FLEX_ATTENTION"), (half, None)):
        told = arguments(of, GPU)
        assert told.get("attention_backend") == attention
        assert attention is None or attention in signature(module.version, "AttentionBackendEnum").parameters
        assert told["hf_overrides"] == {"head_dtype": "float32"}


def test_a_gpu_is_filled_with_answers_and_what_is_set_is_kept(folder):
    """Of Qwen2.5-1.5B in bf16: 28 layers, 2 heads of 128 numbers for keys and values; lengths by default."""
    token = 2 * 28 * 2 * 128 * 2
    default = tiny.engine_settings(folder).rollout
    at_once = [sequences(default, 1024, cache_gib(default, gib * GIB) * GIB, token) for gib in (24, 80, 141, 10**6)]
    assert at_once == [131, 438, 773, 1024]
    wide = tiny.engine_settings(folder, kv_cache_gib=4, max_tokens=1000).rollout
    assert cache_gib(wide, 80 * GIB) == cache_gib(wide, None) == 4
    assert sequences(wide, 500, 4 * GIB, token) == 4 * GIB // (token * 1000)
    assert sequences(wide, 500, 1, token) == 1
    assert cache_gib(default, None) == 1


@pytest.mark.parametrize(("ranks", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_ranks_share_the_heads_and_have_at_least_one(tmp_path, ranks, heads):
    tiny.save_model(tmp_path, tied=True, heads=4, head_width=16)
    settings = tiny.engine_settings(tmp_path, "bf16", tensor_parallel=ranks)
    shape = settings.source.config
    kept = shape.num_key_value_heads / ranks
    assert token_bytes(settings) == 2 * shape.num_hidden_layers * max(1, kept) * 16 * 2


def test_requests_have_seeds_of_their_own_and_steps_leave_the_random_state_alone(module, opened):
    engine, saved = opened(0), []
    for count in (1, 30):
        asked = requests_for([PROMPT], [count], Sampling(1), [0])
        before = len(module.states)
        list(engine.generate(asked))
        saved.append(len(module.states) - before)
    assert saved[0] == saved[1]  # a step for each answer
    seeds = [parameters.seed for parameters in module.made.parameters]
    assert len({*seeds}) == 30
    assert seeds[0] == seeds[1]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_older_runner_has_a_generator_for_each_call_and_none_for_an_answer(module, opened):
    module.older_runner = True
    engine = opened(0)
    for seed in (0, 1, 0):
        asked = requests_for([PROMPT], [5], Sampling(1), [seed])
        before = len(module.states)
        list(engine.generate(asked))
        assert len(module.states) - before >= 2 * 5  # the trainer's state and the engine's, around each step
    assert {parameters.seed for parameters in module.made.parameters} == {None}
    assert module.seeds[0] == module.seeds[2] != module.seeds[1]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried\n2 GiB"), r"kv_cache_gib \(24\) does not suit .*2 GiB"),
        (AssertionError("CuMem allocator can only be used for one instance."), "cannot use the GPU: .*one inst"),
        (RuntimeError("CUDA error: no kernel image\n\nCompile"), "cannot use the GPU: CUDA error: no kernel"),
        (AssertionError(), "cannot take the model: AssertionError; the engine transformers may"),
    ],
)
def test_an_engine_that_cannot_be_made_is_one_line(module, opened, error, message):
    module.error = error
    with pytest.raises(ConfigError, match=message) as raised:
        opened()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("error", "clear"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), True),
        (RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:119"), True),
        (AssertionError("Memory usage increased after sleeping."), True),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_what_fails_on_the_gpu_later_is_one_line_and_a_defect_stays_one(module, opened, error, clear):
    engine = opened(1)
    module.made.error = error
    with pytest.raises(RolloutError if clear else type(error)) as raised:
        list(engine.generate(ASKED))
    assert isinstance(raised.value, RolloutError) == clear
    engine.sleep()
    with pytest.raises(RolloutError if clear else type(error)):
        engine.wake()
    assert not clear or ("lower rollout.kv_cache_gib" in str(raised.value) and "\n" not in str(raised.value))


def test_cached_prompts_are_forgotten_or_it_is_an_error(module, opened):
    engine = opened(0)
    module.made.steps_behind = 1  # blocks of an answer that was given up
    assert generated(engine) == 1
    module.made.steps_behind = 10
    with pytest.raises(RolloutError, match="keeps keys and values of an earlier call"):
        next(engine.generate(ASKED))


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
