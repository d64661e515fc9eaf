"""The statistics kernel by itself, writing exp(d) beside the logits: through the backend only GPUs take that path.

It belongs to bf16 products with fp32 results, and CPUs have none.
"""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET")):
    pytest.skip("Triton kernels need a GPU, or TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from exgrpo.kernels.triton_chunks.row_kernels import LARGEST_SUM, listed_largest_kernel, statistics_kernel

BLOCK = 128
ROUNDINGS = {torch.float32: 16 * 2.0**-23, torch.bfloat16: 2.0**-7}  # the interpreter cuts bf16 off: a whole ulp


def run(logits, target, out, *, bias=None, temperature=None, given=None, listed=None):
    """Anchors, gaps, S and M of the rows of a view."""
    rows, vocabulary = logits.shape
    anchor, gap, rest, moment = logits.new_empty(4, rows)
    statistics_kernel[(rows,)](
        logits,
        logits if bias is None else bias,
        out,
        target,
        logits.new_ones(rows) if temperature is None else temperature,
        anchor if given is None else given,
        anchor if listed is None else listed,
        anchor,
        gap,
        rest,
        moment,
        logits.new_ones(1),
        vocabulary,
        logits.stride(0),
        HAS_BIAS=bias is not None,
        HAS_SOFTCAP=False,
        GIVEN=given is not None,
        LISTED=listed is not None,
        WRITE=True,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return anchor, gap, rest, moment


def oracle(logits, target, *, bias=None, temperature=None, given=None):
    """The same in float64, and exp(d), 0 at the target; an anchor that is not given is chosen as the kernel does."""
    z = logits.double() if bias is None else logits.double() + bias.double()
    tau = torch.ones(len(z), 1, device=z.device).double() if temperature is None else temperature.double().unsqueeze(1)
    held = target >= 0
    index = target.clamp(min=0).unsqueeze(1)
    at_target = torch.where(held.unsqueeze(1), z.gather(1, index), -torch.inf)

    def sums(anchor):
        d = (z - anchor) / tau
        e = d.exp().scatter(1, index, torch.where(held.unsqueeze(1), 0.0, d.exp().gather(1, index)))
        return e, e.sum(1, keepdim=True), torch.where(e > 0, e * d, 0.0).sum(1, keepdim=True)

    if given is None:
        far = sums(at_target)[1] > LARGEST_SUM.value
        anchor = torch.where(far, z.amax(1, keepdim=True), at_target)
    else:
        anchor = given.double().unsqueeze(1)
    e, rest, moment = sums(anchor)
    return [x.squeeze(1) for x in (anchor, (at_target - anchor) / tau, rest, moment)], e


def assert_close(found, exact, roundings=ROUNDINGS[torch.float32]):
    """Up to roundings of each value, and what is lost below 1e-30 with the smallest numbers of fp32."""
    assert found.isfinite().all()
    error = (found.double() - exact).abs()
    assert (error <= roundings * exact.abs() + 1e-30).all(), error.max()


def check(logits, target, dtype, **more):
    """Compares everything the kernel gives; returns the anchors."""
    storage = torch.full((len(logits), logits.stride(0)), 7.0, dtype=dtype, device=logits.device)
    before = logits.clone()
    found = run(logits, target, storage, **more)
    exact, e = oracle(logits, target, **more)
    # z is rounded before d is formed, and exp turns an absolute error of d into a relative one of e.
    largest = logits.abs().max().item() + (more["bias"].abs().max().item() if more.get("bias") is not None else 0.0)
    if more.get("temperature") is not None:
        largest /= more["temperature"].min().item()
    roundings = (16 + 4 * largest) * 2.0**-23
    kept = exact[1].isfinite()
    assert_close(found[0], exact[0], roundings)
    assert (found[1][~kept] == -torch.inf).all()
    assert ((found[1] - exact[1])[kept].abs() <= roundings).all()
    assert_close(found[2], exact[2], roundings)
    # Terms of both signs: the error is that of the largest, not of the sum.
    assert ((found[3] - exact[3]).abs() <= roundings * (1 + largest) * (1 + exact[2])).all()
    written, beyond = storage.split([logits.shape[1], storage.shape[1] - logits.shape[1]], dim=1)
    assert_close(written, e, roundings + ROUNDINGS[dtype])
    held = (target >= 0).nonzero().squeeze(1)
    assert (written[held, target[held]] == 0).all()
    assert (beyond == 7).all()
    assert torch.equal(logits, before)
    return found[0]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request):
    return request.param


def make_rows(device, vocabulary, *, rows=6, stride=None):
    """Rows of a wider matrix, NaN beyond the vocabulary; the targets are likely words."""
    stride = stride or vocabulary
    matrix = torch.full((rows, stride), torch.nan)
    matrix[:, :vocabulary] = 2 * torch.randn(rows, vocabulary)
    target = torch.randint(0, vocabulary, (rows,))
    matrix[torch.arange(rows), target] = 5.0 + torch.rand(rows)
    return matrix.to(device)[:, :vocabulary], target.to(device)


@pytest.mark.parametrize("vocabulary", [1, 128, 300])
@pytest.mark.parametrize("bias", [None, torch.bfloat16])
def test_exponentials_and_sums(vocabulary, bias, dtype, device):
    logits, target = make_rows(device, vocabulary)
    if bias is not None:
        bias = torch.randn(vocabulary, device=device).to(bias)
    check(logits, target, dtype, bias=bias)


def test_rows_of_a_wider_matrix(dtype, device):
    """Nothing beyond the vocabulary is read or written."""
    logits, target = make_rows(device, 300, stride=336)
    assert logits.stride() == (336, 1)
    check(logits, target, dtype, temperature=torch.linspace(0.5, 2.0, len(target), device=device))


def test_both_sides_of_the_threshold(dtype, device):
    """64 words as likely as the target do not move the anchor, 65 a little likelier ones do."""
    logits = torch.zeros(2, 140, device=device)
    logits[:, 65:] = -200.0
    logits[1, 1:66] = 0.25
    anchor = check(logits, torch.zeros(2, dtype=torch.int64, device=device), dtype)
    assert anchor.tolist() == [0.0, 0.25]


def test_given_anchors_stay(dtype, device):
    """Another shard holds some of the targets: nothing is taken out of their sums, and their gap is -inf."""
    logits, target = make_rows(device, 200, rows=4)
    target[::2] = -1
    given = logits.amax(1) + 0.5
    assert torch.equal(check(logits, target, dtype, given=given), given)


def test_rows_that_are_not_listed_stay_as_they_are(dtype, device):
    logits, target = make_rows(device, 300)
    given, listed = logits.amax(1), torch.tensor([True, False, False, True, False, True], device=device)
    whole, some = torch.full((2, 6, 300), 7.0, dtype=dtype, device=device)
    everything = run(logits, target, whole, given=given)
    _, _, rest, moment = run(logits, target, some, given=given, listed=listed)
    assert torch.equal(rest, torch.where(listed, everything[2], 0.0))
    assert torch.equal(moment, torch.where(listed, everything[3], 0.0))
    assert torch.equal(some, torch.where(listed.unsqueeze(1), whole, 7.0))


@pytest.mark.parametrize("vocabulary", [1, 128, 300])
def test_largest_logits_of_listed_rows(vocabulary, device):
    logits, _ = make_rows(device, vocabulary, stride=336)
    bias, listed = torch.randn(vocabulary, device=device), torch.arange(6, device=device) % 2 == 0
    largest, cap = torch.full((6,), 7.0, device=device), torch.full((1,), 3.0, device=device)
    switches = {"HAS_BIAS": True, "HAS_SOFTCAP": True, "BLOCK": BLOCK, "num_warps": 4}
    listed_largest_kernel[(6,)](logits, bias, listed, largest, cap, vocabulary, logits.stride(0), **switches)
    exact = 3 * torch.tanh((logits.double() + bias).amax(1) / 3)
    assert (largest[~listed] == -torch.inf).all()
    assert_close(largest[listed], exact[listed])
