"""Backends that are made wrong are found out before their first call, and the right ones never are."""

import random
import threading
from contextlib import contextmanager
from itertools import cycle, product

import pytest
import torch
import torch.distributed as dist
from torch.func import vmap

from exgrpo.kernels import (
    backend_choice,
    dispatch,
    extension,
    group_advantage,
    linear_log_prob,
    linear_policy_loss,
    policy_loss,
    self_test,
    sequence_entropy,
)
from exgrpo.kernels.trials import TokenTrial, Trial, head_trials
from tests.gloo import on_ranks

from .support import make_case
from .wrong_backends import (
    DEFECTS,
    PLACES,
    TORCH,
    group_call,
    head_call,
    install,
    loss_call,
    mean_call,
    passes_with,
    refuse,
    row_of,
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing has been tested or said, and the backend of CPUs is there."""
    for name in ("EXGRPO_BACKEND", self_test.ENVIRONMENT, "EXGRPO_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(extension, "MISSING", "")
    monkeypatch.setattr(dispatch, "_LEFT_OUT", {})
    forget()
    yield
    forget()


def forget():
    self_test.forget()
    backend_choice.say.cache_clear()


def seeded(call, **more):
    torch.manual_seed(5)
    return call(**more)


@pytest.mark.parametrize(
    ("place", "defect"), [*zip(PLACES, cycle(DEFECTS), strict=False), ("gradient", "raises"), ("gradient", "nan")]
)
def test_a_wrong_backend_is_left_out_and_that_is_said_once(place, defect, monkeypatch, capfd):
    call, spoil = PLACES[place]
    monkeypatch.setenv("EXGRPO_BACKEND", "torch")
    right = seeded(call)
    monkeypatch.delenv("EXGRPO_BACKEND")
    install(monkeypatch, **spoil(DEFECTS[defect]))
    for _ in range(2):
        for mine, true in zip(seeded(call), right, strict=True):
            assert torch.equal(mine, true)
    (line,) = capfd.readouterr().err.splitlines()
    said = "exgrpo: the torch backend computes on cpu, as cpu is not available: it failed its self-test of "
    assert line.startswith(said)
    assert line.endswith(f" ({dispatch.REPORT})")
    said = {"raises": ": it raised ValueError: no such instruction (", "shape": ""}
    assert said.get(defect, " is off by ") in line
    assert [name for (name, _), fault in self_test.verdicts().items() if fault] == ["cpu"]


@pytest.mark.parametrize("call", [head_call, loss_call])
def test_a_backend_that_was_named_is_an_error(call, monkeypatch, capfd):
    install(monkeypatch, **passes_with(gradient=DEFECTS["much"]))
    expected = r"backend='cpu': it failed its self-test of linear_.* on cpu\): .*; expected auto or torch, or EXGRPO"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=expected):
            call(backend="cpu")
    monkeypatch.setenv("EXGRPO_BACKEND", "cpu")
    with pytest.raises(RuntimeError, match=expected):
        call()
    assert not capfd.readouterr().err


def test_a_right_backend_is_tested_once_for_each_kind_of_call_but_for_a_switch(monkeypatch):
    computed = []
    install(monkeypatch, centre_groups=lambda *given: computed.append(given) or TORCH.centre_groups(*given))
    reward, group = torch.rand(4), torch.tensor([0, 0, 1, 1])
    monkeypatch.setenv(self_test.ENVIRONMENT, "0")
    group_advantage(reward, group)
    assert len(computed) == 1
    assert not self_test.verdicts()
    monkeypatch.delenv(self_test.ENVIRONMENT)
    for _ in range(3):
        group_advantage(reward, group)
    assert len(computed) == 1 + 1 + 3
    group_advantage(reward, group, scale_by_std=True)
    group_advantage(reward.double(), group)
    assert len(computed) == 5 + 2 + 2
    assert list(self_test.verdicts().values()) == [""] * 3


def test_one_that_does_not_end_is_left_behind(monkeypatch, capfd):
    end, test = threading.Event(), threading.current_thread()

    def waiting(values):
        if threading.current_thread() is not test:
            end.wait()
        return values

    monkeypatch.setattr(self_test, "LIMIT", 0.2)
    install(monkeypatch, **PLACES["segments"][1](waiting))
    mean_call()
    end.set()
    assert ": it did not end within 0 s (" in capfd.readouterr().err


@pytest.mark.parametrize("hangs", [False, True])
def test_a_gpu_that_is_of_no_more_use_is_an_error(hangs, monkeypatch):
    """After an illegal access, or with a kernel that never ends, no other backend can go on."""
    end = threading.Event()

    class OnGpu(Trial):
        operation = "made_up"

        def outcomes(self, backend, *, exact=False):
            if backend == "cuda":
                end.wait() if hangs else refuse(backend)
            return {"zero": torch.zeros(1)}

    monkeypatch.setattr(self_test, "LIMIT", 0.2)
    monkeypatch.setattr(self_test, "_finishes", lambda device: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    wrong = "it did not end within 0 s" if hangs else "it raised ValueError: no such instruction"
    with pytest.raises(
        RuntimeError, match=f"made_up .*: {wrong}; the GPU is of no more use .* EXGRPO_BACKEND=torch in"
    ):
        self_test.fault("cuda", OnGpu(torch.device("cuda", 0), torch.float32), lambda name: name)
    end.set()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_capture_is_not_disturbed(device):
    trial = TokenTrial(torch.device("cuda", 0), torch.float32, *[True] * 5)
    value, graph, before = torch.zeros(1, device=device), torch.cuda.CUDAGraph(), torch.cuda.get_rng_state()
    with torch.cuda.graph(graph):
        value += 1
        assert not self_test.fault("triton", trial, dispatch.load)
    assert not self_test.verdicts()
    graph.replay()
    assert value.item() == 1
    assert not self_test.fault("triton", trial, dispatch.load)
    assert list(self_test.verdicts().values()) == [""]
    assert torch.equal(torch.cuda.get_rng_state(), before)


def in_backward(call):
    """Makes a call within a backward."""
    x = torch.ones(1, requires_grad=True).clone()
    x.register_hook(lambda gradient: (call(), None)[1])
    x.sum().backward()


def vmapped(call):
    vmap(lambda x: (call(), x)[1])(torch.ones(3))


def within(context):
    """A caller that makes a call in a context."""

    def caller(call):
        with context():
            call()

    return caller


@contextmanager
def wide_and_deterministic():
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


CALLERS = {
    "inference": within(torch.inference_mode),
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "default device": within(lambda: torch.device("meta")),
    "defaults": within(wide_and_deterministic),
    "backward": in_backward,
    "vmap": vmapped,
    "compiled": lambda call: torch.compile(call, backend="eager")(),
}


@pytest.mark.parametrize(("caller", "wrong"), [*product(CALLERS, [False]), ("inference", True), ("vmap", True)])
def test_the_callers_modes_and_random_numbers_are_left_alone(caller, wrong, monkeypatch):
    install(monkeypatch, **passes_with(policy=row_of(ratio=DEFECTS["a little"])) if wrong else {})
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(5, 8, generator=generator), torch.randn(30, 8, generator=generator), torch.arange(5)
    tokens = torch.full((5,), -3.0), torch.ones(5)
    before = torch.get_rng_state(), random.getstate()
    CALLERS[caller](lambda: linear_policy_loss(*given, *tokens))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    (found,) = self_test.verdicts().values()
    assert found.startswith("ratio is off by ") if wrong else not found


@pytest.mark.parametrize(
    ("dtype", "width", "options"),
    [
        (torch.float32, 1, {}),
        (torch.bfloat16, 40, {"softcap": 5.0, "bias": True}),
        (torch.float16, 1000, {}),
        (torch.float64, 640, {"temperature": 0.7}),
    ],
)
def test_right_backends_pass(options, width, dtype, backend, device, monkeypatch):
    monkeypatch.undo()
    inputs = make_case(6, width, 20, dtype, device, **options)
    inputs.log_prob(backend=backend)
    tokens = torch.full((6,), -3.0, device=device), torch.ones(6, device=device)
    replayed = torch.tensor([True, False] * 3, device=device)
    for more in ({"entropy_coef": 0.1, "clip": None}, {"replayed": replayed}, {"replayed": replayed, "beta": None}):
        inputs.policy_loss(*tokens, backend=backend, **more)
    monkeypatch.setenv("EXGRPO_BACKEND", backend)
    policy_loss(tokens[0].to(dtype), *tokens, replayed=replayed, mask=replayed, entropy=tokens[1], entropy_coef=0.1)
    group_advantage(tokens[1].to(dtype), torch.arange(6, device=device) // 4, scale_by_std=True)
    sequence_entropy(inputs.hidden, inputs.weight, inputs.target, torch.tensor([0, 6], device=device))
    assert not any(self_test.verdicts().values())
    assert bool(self_test.verdicts()) == (backend != "torch")


def score(group, backend="auto"):
    """The log-probs of some tokens."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(*size, generator=generator) for size in ((6, 8), (30, 8)))
    return linear_log_prob(hidden, weight, torch.arange(6), vocab_group=group, backend=backend).log_prob


def one_rank_is_wrong(rank):
    """Rank 1 differs from rank 0, whose cpu backend is right but has not the bits of torch."""
    group = dist.group.WORLD
    for how in ("right", "wrong", "missing", "untested"):
        differs = how if rank == 1 else "right"
        forget()
        dist.barrier()
        with pytest.MonkeyPatch.context() as patch:
            change = DEFECTS["much"] if differs == "wrong" else lambda values: values * (1 + 1e-6)
            install(patch, **passes_with(finished=row_of(log_prob=change)))
            patch.setattr(extension, "MISSING", "it was not built" if differs == "missing" else "")
            patch.setenv(self_test.ENVIRONMENT, "0" if differs == "untested" else "1")
            for _ in range(2):
                assert torch.equal(score(group), score(group, "torch")) == (how in ("wrong", "missing"))
            if how == "wrong":
                fault = (
                    "another rank of the vocab_group cannot use it" if rank == 0 else "it failed .* log_prob is off by"
                )
                with pytest.raises(RuntimeError, match=f"backend='cpu': {fault}.*; expected auto or torch"):
                    score(group, "cpu")


def test_all_ranks_of_a_group_take_the_same_backend(tmp_path):
    on_ranks(one_rank_is_wrong, 2, tmp_path)


def test_what_one_process_passes_over_another_one_leaves_out(monkeypatch, capfd):
    cpu = torch.device("cpu")
    shape = head_trials(cpu, torch.float32, 4096)
    with monkeypatch.context() as this_process:
        install(this_process)
        assert dispatch.passed_over("auto", shape) == {}
    with monkeypatch.context() as other_process:
        self_test.forget()
        install(other_process, **passes_with(gradient=DEFECTS["much"]))
        passed_over = dispatch.passed_over("auto", shape)
        with pytest.raises(RuntimeError, match="backend='cpu': it failed its self-test"):
            dispatch.passed_over("cpu", shape)
    assert list(passed_over) == ["cpu"]
    assert dispatch.passed_over("torch", shape) == dispatch.passed_over("reference", shape) == {}
    assert not capfd.readouterr().err
    dispatch.leave_out(passed_over)
    for _ in range(2):
        group_call()
    line = f"exgrpo: the torch backend computes on cpu, as cpu is not available: {passed_over['cpu']}"
    assert capfd.readouterr().err.splitlines() == [line]
    with pytest.raises(RuntimeError, match="backend='cpu': it failed its self-test of linear_policy_loss"):
        head_call("cpu")
