"""The logits never exist whole: peak of the memory that tensors hold, counted operation by operation."""

import os
import re
import weakref
from functools import partial

import pytest
import torch

from exgrpo.kernels import dispatch, linear_log_prob
from exgrpo.kernels.chunks import chunking
from tests.programs import python

from .conftest import BACKENDS, DEVICE
from .support import INTERPRETING, Case, InsideMode, make_case

CPU = torch.device("cpu")
CPU_CHUNK = chunking.CHUNK_BYTES["cpu"]
TOKENS, WIDTH, VOCABULARY = 2000, 16, 3000


class PeakMemory(InsideMode):
    """Bytes of the storages made while it is active that were alive at once, inside our operators too."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.note((args, kwargs), counted=False)  # what existed before; a view of it is no new memory
        out = function(*args, **(kwargs or {}))
        self.note(out, counted=True)
        return out

    def note(self, values, counted):
        for value in torch.utils._pytree.tree_leaves(values):
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in self.known:
                storage = value.untyped_storage()
                size = storage.nbytes() if counted else 0
                self.known.add(storage._cdata)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.forget, storage._cdata, size)

    def forget(self, key, size):
        self.known.discard(key)
        self.live -= size


@pytest.fixture
def case():
    hidden, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH)
    return Case(hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, VOCABULARY, (TOKENS,)))


def peak_of(case, operation):
    """Of a call that is not the first of its kind, which tests the backend where it is not interpreted."""
    if not INTERPRETING:
        operation(case)
    for leaf in case.leaves:
        leaf.grad = None
    with PeakMemory() as memory:
        operation(case)
    return memory.peak


def forward(case):
    with torch.no_grad():
        case.log_prob()


def log_prob(case):
    result = case.log_prob()
    (result.log_prob.sum() + result.entropy.sum()).backward()


def policy_loss(case, function=None, entropy_coef=0.01):
    advantage = torch.ones_like(case.target, dtype=torch.float32)
    old = -8 * advantage
    advantage[::3] = 0
    more = {"function": function} if function else {}
    case.policy_loss(old, advantage, clip=None, entropy_coef=entropy_coef, **more).loss.backward()


OPERATIONS = {
    "forward": forward,
    "log_prob": log_prob,
    "policy_loss": policy_loss,
    "policy_loss_without_entropy": partial(policy_loss, entropy_coef=0.0),
}


def outside(case):
    """What the bound leaves out: results and what is saved with them, and gradients as sums and as results."""
    sums = sum(leaf.numel() for leaf in case.leaves)
    return 2 * 4 * sums + 10 * 4 * case.target.numel()


def least_of(case):
    """What the message says of a bound that no call can meet."""
    with pytest.raises(ValueError, match=r"memory: .* needs \d+ bytes at least, got 1$") as raised:
        case.log_prob(memory=1)
    return int(re.search(r"needs (\d+)", str(raised.value))[1])


FEW = 140 if INTERPRETING else 200  # more than a tile
CAPPED = {"softcap": 10.0, "temperature": 0.7}
ALLOWED = {"allowed_tokens": (2, 1, 3)}
MORE = pytest.param(9_000, 100, {}, marks=[pytest.mark.long] * INTERPRETING)
MOST = pytest.param(70_000, 100, CAPPED, marks=pytest.mark.long)


SETTINGS = [(1, 1000, {}), (FEW, 1000, CAPPED), (FEW, 1000, ALLOWED), MORE, MOST]


@pytest.mark.parametrize(("tokens", "vocabulary", "options"), SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_allocates_what_it_may(backend, operation, dtype, options, tokens, vocabulary):
    """As little as one tile needs, and several times that; a bound that is larger is used."""
    case = make_case(tokens, 16, vocabulary, dtype, DEVICE, bias=bool(options), ignored=False, **options)
    case.options["backend"] = backend
    least = least_of(case)
    chunk = 0 if options is ALLOWED else min(tokens, 600) * vocabulary * 4  # sets have no logits of all words
    for memory in [least] * (tokens <= FEW) + [least + (2 * chunk or least)]:
        case.options["memory"] = memory
        peak = peak_of(case, OPERATIONS[operation])
        assert peak <= memory + outside(case)
    assert peak >= chunk * dtype.itemsize / 4 or operation == "forward"


def test_a_gradient_that_is_added_to_takes_no_memory(case):
    total = torch.zeros_like(case.weight)
    usual = peak_of(case, policy_loss)
    case.options["weight_grad"] = total.detach()
    assert peak_of(case, policy_loss) <= usual - total.nbytes


def test_nothing_is_kept_for_the_backward_but_statistics(case):
    with PeakMemory() as memory:
        result = linear_log_prob(case.hidden, case.weight, case.target, backend="torch")
        held = memory.live
    assert result.log_prob.requires_grad
    assert held <= 8 * TOKENS * 8


RESIDENT = """
import sys
from pathlib import Path
import torch
from exgrpo.kernels import linear_log_prob, linear_policy_loss
tokens, width, vocabulary = 4096, 32, 32000
dtype, backend = getattr(torch, sys.argv[1]), sys.argv[2]

def problem(tokens, vocabulary):
    hidden, weight = torch.empty(tokens, width, dtype=dtype), torch.empty(vocabulary, width, dtype=dtype)
    return hidden.normal_().requires_grad_(), weight.normal_().requires_grad_(), torch.arange(tokens) % vocabulary

def call(hidden, weight, target):
    old, advantage = torch.full(target.shape, -8.0), torch.ones(target.shape)
    linear_policy_loss(hidden, weight, target, old, advantage, clip=None, backend=backend).loss.backward()

def kibibytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])

call(*problem(64, 1000))  # what is loaded and built once
inputs = problem(tokens, vocabulary)
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
before = kibibytes("VmRSS")
call(*inputs)
print(1024 * (kibibytes("VmHWM") - before))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="it reads Linux's account of the memory")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [name for name in ("torch", "cpu") if not dispatch.unavailable(name, CPU)])
def test_resident_memory_stays_below_two_chunks(name, dtype):
    """What operators take within themselves counts too; logits would be 524 MB, a chunk is 134 MB."""
    gradients = 2 * (4096 + 32000) * 32 * 4
    assert int(python("-c", RESIDENT, dtype, name)) < 2 * CPU_CHUNK + gradients
