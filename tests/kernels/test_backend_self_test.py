"""Backends that are made wrong in one place are found out before their first use, and the right ones never are."""

import random
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.func import vmap

from exgrpo import kernels
from exgrpo.kernels.torch_chunks.torch_allowed import AllowedPasses
from exgrpo.kernels.torch_chunks.torch_passes import TorchPasses
from tests.gloo import on_ranks

CPU = torch.device("cpu")
TORCH = kernels.dispatch.load("torch")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing has been tested or printed, and the backend of CPUs is there."""
    for name in ("EXGRPO_BACKEND", kernels.self_test.ENVIRONMENT, "EXGRPO_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(kernels.extension, "MISSING", "")
    monkeypatch.setattr(kernels.dispatch, "_LEFT_OUT", {})
    forget()
    yield
    forget()


def forget():
    kernels.self_test._VERDICTS.clear()
    kernels.dispatch._AGREED.clear()
    kernels.backend_choice.say.cache_clear()


def install(monkeypatch, **functions):
    """Make the cpu backend one that is plain torch but for some functions."""
    backend = SimpleNamespace(**{**vars(TORCH), **functions})
    monkeypatch.setattr(kernels.dispatch, "load", lambda name: backend if name == "cpu" else TORCH)


def passes_with(method, change, base=TorchPasses, of="passes_of"):
    """Passes of plain torch one of whose methods returns what ``change`` makes of the right result."""

    def changed(self, *given, **more):
        return change(getattr(base, method)(self, *given, **more))

    return {of: type("Changed", (base,), {method: changed})}


def log_prob_of(bad):
    return lambda found: (found[0], found[1]._replace(log_prob=bad(found[1].log_prob)))


def values_of(bad):
    return lambda gradient: gradient._replace(values=bad(gradient.values))


def ratio_of(bad):
    return lambda rows: (rows.ratio.copy_(bad(rows.ratio)), rows)[1]


def slightly(values):
    return values * 1.0005


def one_entry(entry):
    def change(values):
        values = values.clone()
        values.view(-1)[values.numel() // 2] = entry
        return values

    return change


def refuse(_):
    raise ValueError("no such instruction\non this machine")


def scale_slightly_wrong(values, factor):
    TORCH.scale(values, factor)
    values.mul_(1.0005)


def wrong_coefficients(*given):
    found = TORCH.token_objective(*given)
    return found._replace(coefficient=one_entry(7.0)(found.coefficient))


WRONG = {
    "log_prob": passes_with("finished", log_prob_of(slightly)),
    "gradient": passes_with("chunk_gradient", values_of(one_entry(7.0))),
    "gradient is nan": passes_with("chunk_gradient", values_of(one_entry(torch.nan))),
    "gradient raises": passes_with("chunk_gradient", refuse),
    "gradient over sets": passes_with("chunk_gradient", values_of(slightly), AllowedPasses, "allowed_passes_of"),
    "ratio": passes_with("policy", ratio_of(slightly)),
    "tokens": {"token_objective": wrong_coefficients},
    "groups": {"centre_groups": lambda *given: TORCH.centre_groups(*given) + 100},
    "segments": {"segment_mean": lambda *given: TORCH.segment_mean(*given)[:-1]},
    "scale": {"scale": scale_slightly_wrong},
}


def advantages(**more):
    return kernels.group_advantage(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]), **more)


def score(group, backend="auto"):
    """Log-probs of some tokens."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(*size, generator=generator) for size in ((6, 8), (30, 8)))
    return kernels.linear_log_prob(hidden, weight, torch.arange(6), vocab_group=group, backend=backend).log_prob


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_backend_is_left_out_and_an_error_where_it_was_named(name, monkeypatch, capfd):
    install(monkeypatch, **WRONG[name])
    for _ in range(2):
        assert advantages().tolist() == [0.5, -0.5, 0.0]
    (line,) = capfd.readouterr().err.splitlines()
    begin = "exgrpo: the torch backend computes on cpu, as cpu is not available: it failed its self-test in"
    reasons = {"gradient raises": "raised ValueError: no such instruction (", "segments": "mean has shape [3]"}
    assert line.startswith(begin)
    assert reasons.get(name, " is off by ") in line
    expected = r"backend='cpu': it failed its self-test in torch.float32 on cpu: .*; expected auto or torch, or EXGRPO"
    monkeypatch.setenv("EXGRPO_BACKEND", "cpu")
    with pytest.raises(RuntimeError, match=expected):
        advantages()
    with pytest.raises(RuntimeError, match=expected):
        score(None, "cpu")


def test_a_right_backend_is_tested_once_for_each_dtype_but_for_a_switch(monkeypatch):
    computed = []
    install(monkeypatch, centre_groups=lambda *given: computed.append(given) or TORCH.centre_groups(*given))
    monkeypatch.setenv(kernels.self_test.ENVIRONMENT, "0")
    advantages()
    assert len(computed) == 1
    monkeypatch.delenv(kernels.self_test.ENVIRONMENT)
    for _ in range(3):
        advantages()
    assert len(computed) == 1 + 1 + 3
    kernels.group_advantage(torch.zeros(2, dtype=torch.float64), torch.arange(2))
    score(None)
    assert len(computed) == 5 + 2


def test_a_test_that_does_not_end_is_left_behind(monkeypatch, capfd):
    end = threading.Event()
    install(monkeypatch, centre_groups=lambda *given: end.wait(20) and TORCH.centre_groups(*given))
    monkeypatch.setattr(kernels.self_test, "LIMIT", 0.2)
    advantages()
    assert "it failed its self-test in torch.float32 on cpu: it did not end within 0 s" in capfd.readouterr().err
    end.set()


@pytest.mark.parametrize("wrong", ["it did not end within 0 s", "it made the device fail"])
def test_a_gpu_that_is_lost_is_an_error(wrong, monkeypatch):
    end = threading.Event()

    def lost(device):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(kernels.self_test, "LIMIT", 0.2)
    monkeypatch.setattr(kernels.self_test, "_compared", lambda *_: end.wait(20 * ("end" in wrong)) or "")
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(RuntimeError, match=f"the cuda backend .*: {wrong}; the GPU is lost .* EXGRPO_BACKEND=torch in"):
        kernels.self_test.fault("cuda", torch.device("cuda", 0), torch.float32, lambda name: name)
    end.set()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_capture_is_not_disturbed(device):
    call = "triton", torch.device("cuda", 0), torch.float32, kernels.dispatch.load
    value, graph, before = torch.zeros(1, device=device), torch.cuda.CUDAGraph(), torch.cuda.get_rng_state()
    with torch.cuda.graph(graph):
        value += 1
        assert not kernels.self_test.fault(*call)
    assert not kernels.self_test._VERDICTS
    graph.replay()
    assert value.item() == 1
    assert not kernels.self_test.fault(*call)
    assert list(kernels.self_test._VERDICTS.values()) == [""]
    assert torch.equal(torch.cuda.get_rng_state(), before)


def in_backward(call):
    x = torch.ones(1, requires_grad=True).clone()
    x.register_hook(lambda gradient: (call(), None)[1])
    x.sum().backward()


def under_other_defaults(call):
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    with torch.device("meta"):
        call()
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


CALLERS = {
    "inference": lambda call: torch.inference_mode()(call)(),
    "autocast": lambda call: torch.autocast("cpu", torch.bfloat16)(call)(),
    "defaults": under_other_defaults,
    "backward": in_backward,
    "vmap": lambda call: vmap(lambda x: (call(), x)[1])(torch.ones(3)),
    "compiled": lambda call: torch.compile(call, backend="eager")(),
}


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("caller", CALLERS)
def test_the_callers_modes_and_random_numbers_are_left_alone(caller, wrong, monkeypatch):
    install(monkeypatch, **WRONG["ratio"] if wrong else {})
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(5, 8, generator=generator), torch.randn(30, 8, generator=generator), torch.arange(5)
    tokens = torch.full((5,), -3.0), torch.ones(5)
    before = torch.get_rng_state(), random.getstate()
    CALLERS[caller](lambda: kernels.linear_policy_loss(*given, *tokens))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    (found,) = kernels.self_test._VERDICTS.values()
    assert found.startswith("own ratio is off by ") if wrong else not found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_right_backends_pass(dtype, backend, device, monkeypatch):
    monkeypatch.undo()
    assert not kernels.self_test.fault(backend, device, dtype, kernels.dispatch.load)


def one_rank_is_wrong(rank):
    """Rank 1 differs from rank 0, whose cpu backend is right but has not the bits of torch."""
    group = dist.group.WORLD
    for how in ("right", "wrong", "missing", "untested"):
        differs = how if rank == 1 else "right"
        forget()
        dist.barrier()
        with pytest.MonkeyPatch.context() as patch:
            factor = 2.0 if differs == "wrong" else 1 + 1e-6
            install(patch, **passes_with("finished", log_prob_of(lambda values, factor=factor: values * factor)))
            patch.setattr(kernels.extension, "MISSING", "it was not built" if differs == "missing" else "")
            patch.setenv(kernels.self_test.ENVIRONMENT, "0" if differs == "untested" else "1")
            for _ in range(2):
                assert torch.equal(score(group), score(group, "torch")) == (how in ("wrong", "missing"))
            if how == "wrong":
                fault = "another rank of the vocab_group cannot" if rank == 0 else "it failed .* log_prob is off by"
                with pytest.raises(RuntimeError, match=f"backend='cpu': {fault}.*; expected auto or torch"):
                    score(group, "cpu")


def test_all_ranks_of_a_group_take_the_same_backend(tmp_path):
    on_ranks(one_rank_is_wrong, 2, tmp_path)


def test_what_one_process_passes_over_another_one_leaves_out(monkeypatch, capfd):
    with monkeypatch.context() as this_process:
        install(this_process)
        assert kernels.dispatch.passed_over("auto", CPU, torch.float32) == {}
    with monkeypatch.context() as other_process:
        kernels.self_test._VERDICTS.clear()
        install(other_process, **WRONG["gradient"])
        passed_over = kernels.dispatch.passed_over("auto", CPU, torch.float32)
        with pytest.raises(RuntimeError, match="backend='cpu': it failed its self-test"):
            kernels.dispatch.passed_over("cpu", CPU, torch.float32)
    assert list(passed_over) == ["cpu"]
    kernels.dispatch.leave_out(passed_over)
    for _ in range(2):
        advantages()
    line = f"exgrpo: the torch backend computes on cpu, as cpu is not available: {passed_over['cpu']}"
    assert capfd.readouterr().err.splitlines() == [line]
    with pytest.raises(RuntimeError, match="backend='cpu': it failed its self-test in torch.float32"):
        score(None, "cpu")
