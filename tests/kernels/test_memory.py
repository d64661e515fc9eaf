"""The logits never exist whole: peak of the memory that tensors hold, counted operation by operation."""

import os
import subprocess
import sys
import weakref
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from exgrpo.kernels import dispatch, linear_log_prob, reference
from exgrpo.kernels.chunks import chunking, walks

from .support import Case

CPU = torch.device("cpu")
CPU_CHUNK = chunking.CHUNK_BYTES["cpu"]
TOKENS, WIDTH, VOCABULARY = 2000, 16, 3000
LOGITS = TOKENS * VOCABULARY * 4
CHUNK, BLOCK = 100 * VOCABULARY * 4, 10 * VOCABULARY * 4
WALKS = ("log_prob_forward", "log_prob_backward", "policy_loss_forward")


class PeakMemory(TorchDispatchMode):
    """Bytes of the storages made while it is active that were alive at once, inside our operators too."""

    def __init__(self):
        super().__init__()
        self.patches = pytest.MonkeyPatch()
        self.live = self.peak = 0
        self.known = set()

    def __enter__(self):
        # A mode sees an operator, not what the operator does: it is entered again there.
        for name in WALKS:
            self.patches.setattr(walks, name, partial(self.within, getattr(walks, name)))
        return super().__enter__()

    def __exit__(self, *error):
        self.patches.undo()
        return super().__exit__(*error)

    def within(self, function, *args, **kwargs):
        super().__enter__()
        try:
            return function(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

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


@pytest.fixture(autouse=True)
def small_chunks(set_chunk):
    set_chunk(CHUNK, BLOCK, BLOCK)


def peak_of(case, operation):
    with PeakMemory() as memory:
        operation(case)
    return memory.peak


def forward(case):
    with torch.no_grad():
        case.log_prob(backend="torch")


def log_prob(case):
    result = case.log_prob(backend="torch")
    (result.log_prob.sum() + result.entropy.sum()).backward()


def policy_loss(case, function=None, entropy_coef=0.01):
    old, advantage = torch.full((TOKENS,), -8.0), torch.ones(TOKENS)
    advantage[::3] = 0
    more = {"function": function} if function else {"backend": "torch"}
    case.policy_loss(old, advantage, clip=None, entropy_coef=entropy_coef, **more).loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("operation", "gradients"),
    [(forward, 0), (log_prob, 1), (policy_loss, 1), (lambda case: policy_loss(case, entropy_coef=0.0), 1)],
    ids=["forward", "log_prob", "policy_loss", "policy_loss_without_entropy"],
)
def test_one_chunk_and_its_scratch(operation, gradients, dtype, case):
    """Below two chunks, beside the gradients (sum and result: two copies of each) and a few numbers per token."""
    expected = CHUNK + 3 * BLOCK + 20 * TOKENS * 8
    expected += gradients * 2 * (TOKENS + VOCABULARY) * WIDTH * 4
    peak = peak_of(case.to(dtype), operation)
    assert CHUNK <= peak <= expected
    assert peak < 2 * CHUNK
    assert peak < LOGITS / 10


def test_softcap_takes_one_more_block(case):
    case.options = {"softcap": 10.0}
    assert peak_of(case, policy_loss) < 2 * CHUNK


def test_plain_torch_holds_the_logits(case):
    """The measure sees [T, V] where it exists."""

    def full(case):
        logits = case.hidden @ case.weight.T
        torch.nn.functional.cross_entropy(logits, case.target).backward()

    assert peak_of(case, full) >= 2 * LOGITS
    assert peak_of(case, lambda case: policy_loss(case, reference.linear_policy_loss)) >= 3 * LOGITS


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
    run = subprocess.run([sys.executable, "-c", RESIDENT, dtype, name], capture_output=True, text=True, check=True)
    gradients = 2 * (4096 + 32000) * 32 * 4
    assert int(run.stdout) < 2 * CPU_CHUNK + gradients
