"""The backend as a whole: on a GPU, or with its kernel on an emulated machine and Triton's in their interpreter.

Its gradients are tested in test_mixed_products.
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from .cuda_support import ON_GPU, emulate_backend
from .support import INTERPRETING

if not (ON_GPU or INTERPRETING):
    reason = "the backend needs a GPU and _cuda.so, or TRITON_INTERPRET=1 in the environment"
    pytest.skip(reason, allow_module_level=True)

from exgrpo.kernels import linear_log_prob
from exgrpo.kernels.cuda_chunks.binding import Call

from .support import assert_as_good, make_case
from .test_linear_policy_loss import check


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Names of the functions that were launched."""
    monkeypatch.setenv("EXGRPO_SELF_TEST", "0")  # whose launches would be listed too
    seen = []
    if not ON_GPU:
        emulate_backend(monkeypatch)
    launch_it = Call.launch

    def noted(call, device):
        seen.append(call.function)
        launch_it(call, device)

    monkeypatch.setattr(Call, "launch", noted)
    return seen


@pytest.fixture(autouse=True)
def fused(set_plan):
    set_plan(fused=True)


@pytest.mark.parametrize("impossible", [False, True])
def test_the_fused_product(impossible, device, launched):
    """Some targets are next to impossible: their rows are done again by the Triton kernels, over the same tiles."""
    case = make_case(20, 32, 150, torch.bfloat16, device, bias=True, ignored=False)
    if impossible:
        case.target[::3] = 7
        with torch.no_grad():
            case.bias[7] = -60.0
    with torch.no_grad():
        ours = case.log_prob(linear_log_prob, backend="cuda")
        exact = case.to(torch.float64).log_prob(linear_log_prob, backend="reference")
        plain = case.log_prob(linear_log_prob, backend="reference")
    assert_as_good(ours, plain, exact)
    assert launched == ["exgrpo_product"]


@pytest.mark.parametrize(("dtype", "softcap"), [(torch.float32, None), (torch.float16, None), (torch.bfloat16, 5.0)])
def test_what_the_product_cannot_take_is_left_to_triton(dtype, softcap, device, launched):
    """Other dtypes, and caps of the logits."""
    check(make_case(20, 16, 40, dtype, device), "cuda", clip=None, softcap=softcap)
    assert launched == []
