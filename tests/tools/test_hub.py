"""The folder for the Hub: the package `kernels` loads it where exgrpo cannot be imported, and its results are right."""

import os
import subprocess
import sys

import pytest
import torch

from exgrpo.kernels import reference
from exgrpo.tools.hub import VARIANTS, main

NAME = "owner/exgrpo"
MISSING = "kernels is not installed: pip install --no-deps kernels==0.17.2 kernels-data==0.16.2"
PROGRAM = """
import sys
import torch
sys.modules["exgrpo"] = None  # its import raises an error
from kernels import Metadata, get_kernel, get_loaded_kernels
head = get_kernel(sys.argv[1], version=0)
backend, inputs, more = torch.load(sys.argv[2])
hidden, weight = (x.requires_grad_() for x in inputs[:2])
log_prob, entropy = head.linear_log_prob(hidden, weight, inputs[2], backend=backend)
found = [log_prob, entropy, *torch.autograd.grad(log_prob.sum() + entropy.sum(), (hidden, weight))]
loss = head.linear_policy_loss(*inputs, backend=backend, **more).loss
found += [loss, *torch.autograd.grad(loss, (hidden, weight))]
del sys.modules["exgrpo"]  # both in one process: their operators have namespaces of their own
from exgrpo.kernels import linear_log_prob
torch.testing.assert_close(linear_log_prob(hidden, weight, inputs[2], backend=backend).log_prob, log_prob)
torch.save([x.detach() for x in found], sys.argv[2])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("hub") / "exgrpo"
    assert main([str(made)]) == 0
    return made


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_the_package_kernels_loads_it_by_name_and_it_computes_the_reference(folder, tmp_path, backend):
    pytest.importorskip("kernels", reason=MISSING)
    environment = {**os.environ, "LOCAL_KERNELS": f"{NAME}={folder}", "TRITON_INTERPRET": ""}
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
        environment |= {"TRITON_INTERPRET": "1", "EXGRPO_SELF_TEST": "0"}  # which takes a minute in the interpreter
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*size, generator=draw, dtype=torch.float64) for size in ((7, 5), (11, 5)))
    target = torch.tensor([3, 0, -100, 10, 4, 4, 1])
    old, advantage = torch.randn(2, 7, generator=draw, dtype=torch.float64)
    inputs, more = [hidden, weight, target, old - 2.4, advantage], {"entropy_coef": 0.1}
    torch.save((backend, inputs, more), tmp_path / "case.pt")
    command = [sys.executable, "-c", PROGRAM, NAME, tmp_path / "case.pt"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    hidden.requires_grad_(), weight.requires_grad_()
    log_prob, entropy = reference.linear_log_prob(hidden, weight, target)
    right = [log_prob, entropy, *torch.autograd.grad(log_prob.sum() + entropy.sum(), (hidden, weight))]
    loss = reference.linear_policy_loss(*inputs, **more).loss
    right += [loss, *torch.autograd.grad(loss, (hidden, weight))]
    for one, exact in zip(torch.load(tmp_path / "case.pt"), right, strict=True):
        # Sums of at most eleven float64 numbers of the size of one.
        torch.testing.assert_close(one, exact.detach(), rtol=1e-12, atol=1e-12)


def test_variants_have_the_same_files_their_digests_and_the_licence(folder):
    data = pytest.importorskip("kernels_data", reason=MISSING)
    assert (folder / "README.md").read_text().startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n---\n")
    variants = [folder / "build" / f"torch-{name}" for name in VARIANTS]
    assert {path.name for path in (folder / "build").iterdir()} == {path.name for path in variants}
    for variant in variants:
        described = data.Metadata.read_from_file(variant / "metadata.json")
        assert (described.name.python_name, described.version) == ("exgrpo", 0)
        assert described.id.isidentifier()
        described.digest.validate(data.Digest.hash_variant(described.digest.algorithm, variant))
        assert "Apache License" in (variant / "LICENSE").read_text()
        assert "exgrpo.kernels import" not in "".join(path.read_text() for path in variant.rglob("*.py"))


def test_a_folder_that_exists_is_left_as_it_is(folder, capsys):
    before = sorted(folder.rglob("*"))
    assert main([str(folder)]) == 2
    assert "exists; name a new folder" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before
