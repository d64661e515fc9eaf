"""log1p and expm1 as the kernels over tokens compute them, against float64."""

import math
import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET")):
    pytest.skip("Triton kernels need a GPU, or TRITON_INTERPRET=1 in the environment", allow_module_level=True)

import triton
import triton.language as tl

from exgrpo.kernels.triton_chunks.token_kernels import expm1, log1p


@pytest.fixture(params=[torch.float32, torch.float64], ids=["fp32", "fp64"])
def dtype(request):
    return request.param


@triton.jit
def apply_kernel(x, out, size, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + index, mask=index < size, other=0.0)
    tl.store(out + index, log1p(value) if FUNCTION == "log1p" else expm1(value), mask=index < size)


def apply(function, x):
    out = torch.empty_like(x)
    apply_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), FUNCTION=function, BLOCK=1024)
    return out


@pytest.mark.parametrize(
    ("function", "largest", "smallest"), [("log1p", 1e30, 1e-30), ("log1p", -0.9, -1e-30), ("expm1", -1e4, -1e-30)]
)
def test_small_arguments_keep_their_digits(function, largest, smallest, dtype, device):
    """To a few ulps of the result, from where it is the argument itself to where the 1 is lost."""
    sign = math.copysign(1.0, largest)
    size = torch.logspace(math.log10(abs(smallest)), math.log10(abs(largest)), 4096, dtype=torch.float64)
    x = (sign * size).to(dtype).to(device)
    exact = getattr(torch, function)(x.double())
    # Of 1 + x, the rounding counts for more the nearer it is to 0.
    conditioning = (x.double() / (1 + x.double()) / exact).abs().clamp(min=1) if function == "log1p" else 1
    error = (apply(function, x).double() - exact).abs() / exact.abs()
    assert (error <= 4 * torch.finfo(dtype).eps * conditioning).all(), error.max()


def test_zero_and_the_far_end(dtype, device):
    x = torch.tensor([0.0, -math.inf, -1e30, math.nan], dtype=dtype, device=device)
    assert apply("expm1", x)[:3].tolist() == [0.0, -1.0, -1.0]
    assert apply("expm1", x)[3].isnan()
    assert apply("log1p", x[:1]).tolist() == [0.0]
