import subprocess
import sys
from pathlib import Path

import pytest
import torch

import exgrpo
from exgrpo.kernels import backend_choice, dispatch, extension, linear_log_prob, linear_policy_loss

from .support import make_case, make_tokens


def test_the_debug_switch_says_what_was_taken_once(monkeypatch, capfd):
    case = make_case((3, 8), 16, 30, torch.float32, "cpu")
    backend_choice.say.cache_clear()
    case.log_prob(backend="torch")
    assert not capfd.readouterr().err
    monkeypatch.setenv("EXGRPO_DEBUG", "1")
    for _ in range(2):
        case.log_prob(backend="torch")
    line = "exgrpo: linear_log_prob, small, torch.float32 on cpu: torch (torch requested)"
    assert capfd.readouterr().err.splitlines() == [line]


def test_a_fallback_is_said_once(monkeypatch, capfd):
    monkeypatch.delenv("EXGRPO_BACKEND", raising=False)
    monkeypatch.setattr(extension, "MISSING", "it was not built")
    backend_choice.say.cache_clear()
    case = make_case((3, 8), 16, 30, torch.float32, "cpu")
    case.log_prob(backend="torch")
    assert not capfd.readouterr().err
    for _ in range(2):
        case.log_prob()
        case.policy_loss(*make_tokens(case)[:2])
    line = "exgrpo: the torch backend computes on cpu, as cpu is not available: it was not built"
    assert capfd.readouterr().err.splitlines() == [line]
    backend_choice.say.cache_clear()


def test_a_line_for_each_backend(monkeypatch):
    """python -m exgrpo.kernels: each is right, or says why it is not there."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-m", "exgrpo.kernels"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith(f"exgrpo {exgrpo.__version__} in {Path(exgrpo.__file__).parents[1]}, torch ")
    _, backends, choices = run.stdout.split("\n\n")
    lines = [line.split(maxsplit=2) for line in backends.splitlines()[1:]]
    assert [name for device, name, _ in lines if device == "cpu"] == list(dispatch.BACKENDS)
    assert all(text.startswith(("right", "not available: ", "plain PyTorch")) for *_, text in lines)
    taken = {name for line in choices.splitlines()[1:] for name in line.split()[2:]}
    assert taken <= {name for _, name, text in lines if not text.startswith("not")}
    assert len(choices.splitlines()) == 1 + 4 * len({device for device, *_ in lines})


def test_reference_has_no_vocab_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        arguments = torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64)
        with pytest.raises(
            ValueError, match="backend='reference': it has no vocab_group; expected auto, torch, triton, cpu or cuda"
        ):
            linear_log_prob(*arguments, vocab_group=group, backend="reference")
        one = linear_policy_loss(*arguments, torch.zeros(2), torch.ones(2), vocab_group=group)
        assert one.loss == linear_policy_loss(*arguments, torch.zeros(2), torch.ones(2)).loss
    finally:
        torch.distributed.destroy_process_group()


def test_torch_is_the_only_dependency():
    """Imports and runs with everything else out of reach, and without loading the compiler or the trainer."""
    program = """
import sys
for name in ("numpy", "triton", "transformers", "deepspeed", "datasets", "scipy"):
    sys.modules[name] = None
import torch
from exgrpo.kernels import linear_policy_loss
assert "torch._dynamo" not in sys.modules
assert not any(name.startswith("exgrpo.train") for name in sys.modules)
w = torch.randn(5, 4, requires_grad=True)
t = torch.zeros(3, dtype=torch.int64)
linear_policy_loss(torch.randn(3, 4), w, t, torch.zeros(3), torch.ones(3)).loss.backward()
assert w.grad.isfinite().all()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
