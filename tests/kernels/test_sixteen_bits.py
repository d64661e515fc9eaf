"""What only a GPU does by itself: 16-bit operands multiplied into float32. Here its products are imitated on the CPU.

The process that interprets Triton kernels tests the Triton backend, with the library's product and its own, and the
CUDA backend with its kernel emulated; the other one tests the torch backend.
"""

import re
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from exgrpo.kernels import linear_log_prob, reference
from exgrpo.kernels.chunks import products

from .conftest import DEVICE
from .cuda_support import ON_GPU, emulate_backend
from .support import INTERPRETING, coarsen, compare, error, fewer_interpreted, make_case, make_tokens, relative_error
from .test_memory import PeakMemory, outside


class Path(NamedTuple):
    """A backend, the product that its logits come from, and the operands' dtype."""

    backend: str
    logits: str
    dtype: str


HALVES = (torch.bfloat16, torch.float16)
TORCH = [Path("torch", "library", "bfloat16"), Path("torch", "library", "float16")]
GPU = [Path("triton", way, dtype) for way in ("fused", "library") for dtype in ("bfloat16", "float16")]
CUDA = [Path("cuda", "fused", "bfloat16")]
PATHS = GPU + CUDA if INTERPRETING else TORCH
if DEVICE.type == "cuda":
    PATHS = TORCH + GPU + CUDA * ON_GPU
if INTERPRETING or DEVICE.type == "cuda":
    pytest.importorskip("triton", reason="triton is not installed")
    from exgrpo.kernels.cuda_chunks import cuda_fused
    from exgrpo.kernels.triton_chunks import fused_product, launch, triton_passes
    from exgrpo.kernels.triton_chunks.triton_fused import FusedTritonPasses

MM, ADDMM = torch.mm, torch.addmm
fused_only = pytest.mark.parametrize(
    "path", [path for path in PATHS if path.logits == "fused"], indirect=True, ids="-".join
)


@pytest.fixture(params=PATHS, ids="-".join)
def path(request, monkeypatch):
    chosen = request.param
    if chosen.backend == "cuda" and not ON_GPU:
        emulate_backend(monkeypatch)
    if chosen.backend != "torch":
        tile = launch.Tile(16, 32, 32, 4, 2)
        request.getfixturevalue("set_plan")(fused=chosen.logits == "fused", tile=tile)
    return chosen


@pytest.fixture
def backend(path):
    return path.backend


@pytest.fixture
def dtype(path):
    return getattr(torch, path.dtype)


@pytest.fixture(autouse=True)
def multiplied(monkeypatch):
    """Operands' dtypes of the products so far; see `imitated`."""
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


@pytest.fixture
def used(monkeypatch):
    """Products that calls of the Triton and CUDA backends took: "library", "fused" and "cuda"."""
    monkeypatch.setenv("EXGRPO_SELF_TEST", "0")  # whose products would be listed too
    seen = set()
    if not (INTERPRETING or DEVICE.type == "cuda"):
        return seen
    begin, launch_it = triton_passes.TritonPasses.__init__, cuda_fused.launch

    def begun(self, *rest):
        seen.add("library" if type(self) is triton_passes.TritonPasses else "fused")
        begin(self, *rest)

    def launched(arguments, device):
        seen.add("cuda")
        launch_it(arguments, device)

    monkeypatch.setattr(triton_passes.TritonPasses, "__init__", begun)
    monkeypatch.setattr(cuda_fused, "launch", launched)
    return seen


def names_of(path, *, fits=True):
    """What `used` has after a call; ``fits``: the product in CUDA takes the operands."""
    if path.backend == "torch":
        return set()
    return {path.logits} | ({"cuda"} if path.backend == "cuda" and fits else set())


# Tokens, width, vocabulary, options of the head, and rows of a chunk.
CASES = {
    "chunks": (45, 40, 130, {}, 20),
    "cap": (45, 40, 130, {"bias": True, "temperature": 0.7, "softcap": 5.0}, 20),
    "per token": (45, 40, 130, {"bias": True, "temperature": torch.linspace(0.5, 2.0, 45)}, 20),
    "odd": (35, 45, 37, {"bias": True}, None),  # through pointers, where 16 bytes do not divide a row
    "nothing divides it": (fewer_interpreted(252, 8), fewer_interpreted(507, 5), fewer_interpreted(123, 2), {}, None),
    "many row tiles": (fewer_interpreted(530, 2), 16, 40, {}, None),  # more than share a stretch of the vocabulary
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
def test_values_and_gradients(name, entropy_coef, path, dtype, device, set_chunk, multiplied, used):
    """As good as plain torch; and products of 16-bit numbers are exact in float32, so values have the error of sums."""
    *shape, options, rows = CASES[name]
    if rows:
        set_chunk(rows * shape[2] * 4)
    case = make_case(*shape, dtype, device, **options)
    old, advantage, replayed = make_tokens(case)

    def call(some, backend):
        more = {"replayed": replayed, "entropy_coef": entropy_coef, "clip": None, "backend": backend}
        result = some.policy_loss(old, advantage, **more)
        log_prob, entropy = some.log_prob(linear_log_prob, backend=backend)
        loss = (log_prob * advantage.to(log_prob.dtype)).sum() + entropy_coef * entropy.sum()
        values = [log_prob.detach(), entropy.detach(), result.log_prob, result.entropy, result.ratio]
        return values, some.gradients(result.loss) + some.gradients(loss)

    compare(call, case, path.backend)
    assert device.type == "cuda" or set(multiplied) == {dtype}
    capped = path._replace(logits="library") if "softcap" in options else path
    assert used == names_of(capped, fits="softcap" not in options and shape[1] % 8 == 0)
    exact = case.to(torch.float64).log_prob(reference.linear_log_prob)
    with torch.no_grad():
        found = case.log_prob(backend=path.backend)
    assert all(error(mine, true) <= 2e-5 for mine, true in zip(found, exact, strict=True))


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
        return some.gradients(some.policy_loss(old, advantage, **more).loss / scale)

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
    monkeypatch.setattr(products.Products, "_converted", lambda *_: pytest.fail("a part of the weight is converted"))
    monkeypatch.setenv("EXGRPO_SELF_TEST", "0")  # it makes products of its own
    more = {"clip": None, "backend": backend}
    with torch.autocast(device.type, dtype):
        gradients = wide.gradients(wide.policy_loss(old, advantage, **more).loss)
    narrow = case.gradients(case.policy_loss(old, advantage, **more).loss)
    for ours, theirs in zip(gradients, narrow, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.to(dtype), theirs, rtol=0, atol=0)


def hide_interpreter(monkeypatch):
    """The interpreter works on copies of a kernel's arguments, which no GPU makes."""
    from triton.runtime.interpreter import GridExecutor

    inside = GridExecutor.__call__

    def unseen(*arguments, **more):
        with _disable_current_modes():
            return inside(*arguments, **more)

    monkeypatch.setattr(GridExecutor, "__call__", unseen)


BYTES = {"library": 6, "fused": 2}
"""Of a logit at the peak: fp32 products beside F, or exponentials alone."""


@pytest.mark.skipif(DEVICE.type == "cuda", reason="what a GPU's own products allocate is not seen here")
@pytest.mark.parametrize("path", [one for one in PATHS if one.dtype == "bfloat16"], indirect=True, ids="-".join)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
def test_bytes_of_a_logit(entropy_coef, path, dtype, backend, device, set_chunk, set_plan, monkeypatch):
    """What a row more in every chunk adds to the peak, beside some numbers of the row."""
    if INTERPRETING:
        hide_interpreter(monkeypatch)
        set_plan(fused=path.logits == "fused")  # in tiles of the usual size: it has a program for each
    vocabulary = 3000
    case = make_case(60, 8, vocabulary, dtype, device, ignored=False)
    old, advantage = torch.full((60,), -8.0), torch.ones(60)

    def peak(rows):
        set_chunk(rows * vocabulary * 4, vocabulary)
        with PeakMemory() as memory:
            case.policy_loss(old, advantage, clip=None, entropy_coef=entropy_coef, backend=backend).loss.backward()
        return memory.peak

    expected = BYTES[path.logits]
    assert expected <= (peak(30) - peak(15)) / (15 * vocabulary) < expected + 0.2


@fused_only
def test_a_bound_that_the_backward_cannot_meet_is_refused_before_the_forward(path, dtype, device):
    """The forward of the fused product has no exponentials, and could do with less."""
    case = make_case(20, 32, 64, dtype, device)
    with pytest.raises(ValueError, match=r"needs \d+ bytes at least, got 1$") as raised:
        case.log_prob(backend=path.backend, memory=1)
    least = int(re.search(r"needs (\d+)", str(raised.value))[1])
    with pytest.raises(ValueError, match=f"needs {least} bytes at least"):
        case.log_prob(backend=path.backend, memory=least - 1)
    case.log_prob(backend=path.backend, memory=least).log_prob.sum().backward()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="what a GPU's own products allocate is not seen here")
@fused_only
@pytest.mark.parametrize("added", [False, True])
def test_one_chunk_has_the_bytes_of_the_sum_that_it_does_not_need(added, path, dtype, device, monkeypatch):
    """The bound is on the peak: the gradient of the weight that is written once has no fp32 sum in bf16."""
    hide_interpreter(monkeypatch)
    monkeypatch.setenv("EXGRPO_SELF_TEST", "0")
    chunks, forward = [], FusedTritonPasses.chunk_forward
    monkeypatch.setattr(
        FusedTritonPasses, "chunk_forward", lambda self, chunk, **more: chunks.append(0) or forward(self, chunk, **more)
    )
    case = make_case(132, 128, 150, dtype, device, ignored=False)
    more = {"clip": None, "backend": path.backend}
    if added:
        more["weight_grad"] = torch.zeros(150, 128)
    old, advantage = torch.full((132,), -8.0), torch.ones(132)
    with pytest.raises(ValueError, match="memory") as raised:
        case.policy_loss(old, advantage, memory=1, **more)
    memory = int(re.search(r"needs (\d+)", str(raised.value))[1])
    with PeakMemory() as peak:
        case.policy_loss(old, advantage, memory=memory, **more).loss.backward()
    assert len(chunks) == (2 if added or dtype == torch.float16 else 1)
    assert peak.peak <= memory + outside(case)


@fused_only
def test_targets_that_are_next_to_impossible(path, dtype, device, used):
    """Their rows are done again, over the same tiles, from another anchor; some words are ruled out by the bias."""
    case = make_case(20, 32, 150, dtype, device, bias=True, ignored=False)
    case.target.clamp_(max=140)
    case.target[::3] = 7
    with torch.no_grad():
        case.bias[7] = -60.0
        case.bias[141:] = -torch.inf

    def call(some, backend):
        log_prob, entropy = some.log_prob(linear_log_prob, backend=backend)
        hidden, weight, _ = some.gradients(log_prob.sum())
        return [log_prob.detach(), entropy.detach()], [hidden, weight]

    compare(call, case, path.backend)
    assert used == names_of(path)


@fused_only
def test_weights_of_any_strides_and_pointers_in_the_place_of_descriptors(path, dtype, device, monkeypatch):
    """A machine without descriptors has the whole tile's pointers, one with them half of it where strides are odd."""
    case = make_case(20, 32, 50, dtype, device, ignored=False)
    hidden, weight, target = case.hidden.detach(), case.weight.detach(), case.target
    scattered = weight.new_full((100, 96), torch.nan)
    wide = weight.new_full((50, 96), torch.nan)
    scattered[::2, 16:80:2] = wide[:, 16:48] = weight
    exact = case.to(torch.float64).log_prob(reference.linear_log_prob)

    def check(view):
        found = linear_log_prob(hidden, view, target, backend=path.backend)
        assert all(error(mine, true) <= 1e-5 for mine, true in zip(found, exact, strict=True))

    for view in (weight, wide[:, 16:48], scattered[::2, 16:80:2], weight.T.contiguous().T):
        check(view)
    without = fused_product.Traits(described=False, overlapped=False, parts=1)
    monkeypatch.setattr(fused_product, "traits", lambda name: without)
    check(weight)


@fused_only
def test_same_bits_in_any_chunks(path, dtype, device, set_chunk):
    """Nothing but the product, which is exact here, may depend on where a row stands in its chunk."""
    case = make_case(40, 32, 150, dtype, device)
    coarsen(case.hidden, case.weight)
    old, advantage, _ = make_tokens(case)
    whole = case.policy_loss(old, advantage, backend=path.backend)
    set_chunk(16 * 150 * 4)
    parts = case.policy_loss(old, advantage, backend=path.backend)
    assert torch.equal(whole.log_prob, parts.log_prob)
    assert torch.equal(whole.entropy, parts.entropy)
