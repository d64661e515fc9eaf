"""What only a GPU does by itself: 16-bit operands multiplied into float32. Here its products are imitated on the CPU.

The process that interprets Triton kernels tests the Triton backend, and the CUDA backend with its kernels emulated; the
other one tests the torch backend. On a GPU the imitation is not needed: the real products take its place.
"""

from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from exgrpo.kernels import linear_log_prob
from exgrpo.kernels.chunks import products

from .conftest import DEVICE
from .cuda_support import ON_GPU, emulate_backend
from .support import INTERPRETING, compare, make_case, make_tokens, relative_error
from .test_memory import PeakMemory


class Path(NamedTuple):
    """Of a call; ``logits`` is library or fused, and torch takes the library's product always."""

    backend: str
    logits: str
    dtype: str


HALVES = (torch.bfloat16, torch.float16)
TORCH = [Path("torch", "library", "bfloat16"), Path("torch", "library", "float16")]
GPU = [Path("triton", way, dtype) for way in ("library", "fused") for dtype in ("bfloat16", "float16")]
CUDA = [Path("cuda", "fused", "bfloat16")]
"""The backend is Triton's elsewhere."""
PATHS = GPU + CUDA if INTERPRETING else TORCH
if DEVICE.type == "cuda":
    PATHS = TORCH + GPU + CUDA * ON_GPU
if INTERPRETING or DEVICE.type == "cuda":
    pytest.importorskip("triton", reason="triton is not installed")

OPTIONS = [
    {},
    {"bias": True, "temperature": 0.7, "softcap": 5.0},
    {"bias": True, "temperature": torch.linspace(0.5, 2.0, 45)},  # the fused product takes no cap
]
MM, ADDMM = torch.mm, torch.addmm


@pytest.fixture(params=PATHS, ids="-".join)
def path(request, monkeypatch):
    chosen = request.param
    if chosen.backend == "torch":
        return chosen
    if chosen.backend == "cuda" and not ON_GPU:
        emulate_backend(monkeypatch)
    request.getfixturevalue("set_plan")(fused=chosen.logits == "fused")
    return chosen


@pytest.fixture
def backend(path):
    return path.backend


@pytest.fixture
def dtype(path):
    return getattr(torch, path.dtype)


@pytest.fixture(autouse=True)
def multiplied(monkeypatch):
    """Operands' dtypes of the products so far; see `mm` and `addmm`."""
    seen = []
    if DEVICE.type == "cpu":
        monkeypatch.setattr(
            products, "multiplies_into_float32", lambda device, dtype: device == DEVICE and dtype in HALVES
        )
        monkeypatch.setattr(torch, "mm", lambda a, b, **more: imitated(seen, None, a, b, **more))
        monkeypatch.setattr(torch, "addmm", lambda c, a, b, **more: imitated(seen, c, a, b, **more))
    return seen


def imitated(seen, added, a, b, *, out_dtype=None, beta=1.0, out=None):
    """A GPU's product: float32 sums of 16-bit products, which are exact in float32, rounded once where it is written.

    What it needs in between is not seen by who counts memory.
    """
    assert a.dtype == b.dtype
    if out_dtype is None and a.dtype not in HALVES:
        return MM(a, b, out=out) if added is None else ADDMM(added, a, b, beta=beta, out=out)
    assert a.dtype in HALVES
    seen.append(a.dtype)
    into = a.dtype if out_dtype is None else out_dtype
    with _disable_current_modes():
        found = MM(a.float(), b.float())
        if added is not None and beta:
            assert added.dtype == into
            found.add_(added, alpha=beta)
        if out is None:
            return found.to(into)
        assert (out.dtype, out.shape) == (into, found.shape)
        return out.copy_(found)


def hide_interpreter(monkeypatch):
    """The interpreter works on copies of a kernel's arguments, which no GPU makes."""
    from triton.runtime.interpreter import GridExecutor

    inside = GridExecutor.__call__

    def unseen(*arguments, **more):
        with _disable_current_modes():
            return inside(*arguments, **more)

    monkeypatch.setattr(GridExecutor, "__call__", unseen)


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "cap", "per token"])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
def test_values_and_gradients(options, entropy_coef, dtype, backend, device, set_chunk, multiplied):
    set_chunk(20 * 130 * 4)
    case = make_case(45, 40, 130, dtype, device, **options)
    old, advantage, replayed = make_tokens(case)

    def call(some, name):
        more = {"replayed": replayed, "entropy_coef": entropy_coef, "clip": None, "backend": name}
        result = some.policy_loss(old, advantage, **more)
        log_prob, entropy = some.log_prob(linear_log_prob, backend=name)
        loss = (log_prob * advantage.to(log_prob.dtype)).sum() + entropy_coef * entropy.sum()
        values = [result.log_prob, result.entropy, result.ratio, log_prob.detach(), entropy.detach()]
        return values, some.gradients(result.loss) + some.gradients(loss)

    compare(call, case, backend)
    assert device.type == "cuda" or set(multiplied) == {dtype}


@pytest.mark.parametrize(("size", "entropy_coef"), [(1e-9, 0.0), (1e-9, 0.05), (1e9, 0.05)])
def test_gradients_of_any_size(size, entropy_coef, dtype, backend, device, set_chunk):
    """A mean over many tokens has gradients far below float16's range, and a scaled loss far above it.

    Before they are cast to the weight's dtype the gradients are in fp32: the error is that of rounded operands.
    """
    set_chunk(20 * 130 * 4)
    case = make_case(45, 40, 130, dtype, device)
    old, advantage, _ = make_tokens(case)

    def gradients(some, name, scale):
        more = {"entropy_coef": entropy_coef, "normalizer": 1 / size, "clip": None, "backend": name}
        loss = some.policy_loss(old, advantage, **more).loss
        return some.gradients(loss / scale if scale else loss)

    found = gradients(case, backend, size)
    exact = gradients(case.to(torch.float64), "reference", size)
    for ours, true in zip(found, exact, strict=True):
        assert relative_error(ours, true) < 4 * torch.finfo(dtype).eps


def test_autocast_rounds_the_weight_once_a_call(dtype, backend, device, set_chunk, monkeypatch):
    """And takes the product that 16-bit weights take; the gradient of the weight is not rounded."""
    set_chunk(20 * 130 * 4)
    case = make_case(45, 40, 130, dtype, device)
    wide = case.to(torch.float32)
    old, advantage, _ = make_tokens(case)
    monkeypatch.setenv("EXGRPO_SELF_TEST", "0")  # it makes products of its own
    made = []
    inside = products.Products.__init__
    monkeypatch.setattr(products.Products, "__init__", lambda self, *rest: (inside(self, *rest), made.append(self))[0])
    monkeypatch.setattr(products.Products, "_converted", lambda *_: pytest.fail("a part of the weight is converted"))
    more = {"clip": None, "backend": backend}
    with torch.autocast(device.type, dtype):
        gradients = wide.gradients(wide.policy_loss(old, advantage, **more).loss)
    assert [one.weight.dtype for one in made] == [dtype]
    narrow = case.gradients(case.policy_loss(old, advantage, **more).loss)
    for ours, theirs in zip(gradients, narrow, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.to(dtype), theirs, rtol=0, atol=0)


BYTES = {"library": 6, "fused": 2}
"""Of a logit at the peak: fp32 products beside F, or exponentials alone."""


@pytest.mark.skipif(DEVICE.type == "cuda", reason="what a GPU's own products allocate is not seen here")
@pytest.mark.parametrize("path", [one for one in PATHS if one.dtype == "bfloat16"], indirect=True, ids="-".join)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
def test_bytes_of_a_logit(entropy_coef, path, dtype, backend, device, set_chunk, monkeypatch):
    """What a row more in every chunk adds to the peak, beside some numbers of the row."""
    if INTERPRETING:
        hide_interpreter(monkeypatch)
    vocabulary = 3000
    case = make_case(120, 8, vocabulary, dtype, device, ignored=False)
    old, advantage = torch.full((120,), -8.0), torch.ones(120)

    def peak(rows):
        set_chunk(rows * vocabulary * 4, vocabulary)
        with PeakMemory() as memory:
            case.policy_loss(old, advantage, clip=None, entropy_coef=entropy_coef, backend=backend).loss.backward()
        return memory.peak

    expected = BYTES[path.logits]
    assert expected <= (peak(60) - peak(30)) / (30 * vocabulary) < expected + 0.2
