"""The backend as a whole: on a GPU, or with its kernels on an emulated machine and Triton's in their interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from .cuda_support import INTERPRETING, ON_GPU, emulate_backend

if not (ON_GPU or INTERPRETING):
    reason = "the backend needs a GPU and _cuda.so, or TRITON_INTERPRET=1 in the environment"
    pytest.skip(reason, allow_module_level=True)

from exgrpo.kernels import dispatch, linear_log_prob
from exgrpo.kernels.cuda_chunks import cuda_passes
from exgrpo.kernels.cuda_chunks.binding import Call, Output
from exgrpo.kernels.triton_chunks import launch

from .conftest import DEVICE
from .support import assert_as_good, make_case, relative_error
from .test_linear_policy_loss import check


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """What was launched: the row kernel's outputs, and "product"."""
    monkeypatch.setenv("EXGRPO_SELF_TEST", "0")  # whose launches would be listed too
    seen = []
    if ON_GPU:
        monkeypatch.setitem(dispatch.BACKENDS, "cuda", "exgrpo.kernels.cuda_chunks")
    else:
        emulate_backend(monkeypatch)
    launch_it = Call.launch

    def noted(call, device):
        seen.append(Output(call.arguments.output) if call.function == "exgrpo_rows" else "product")
        launch_it(call, device)

    monkeypatch.setattr(Call, "launch", noted)
    return seen


@pytest.fixture(autouse=True)
def logits(request, tmp_path, monkeypatch):
    """How bf16 logits are formed: by the library's product where a test says nothing."""
    table, way = tmp_path / "launch.toml", getattr(request, "param", "library")
    table.write_text(f'[{launch.architecture(DEVICE)}.bfloat16]\nlogits = "{way}"\n', encoding="utf-8")
    monkeypatch.setenv(launch.ENVIRONMENT, str(table))
    launch.forget()
    yield
    launch.forget()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("terms", "output"),
    [
        ({}, Output.EXPONENTIALS),
        ({"temperature": 0.6}, Output.EXPONENTIALS),
        ({"entropy_coef": 0.1}, Output.GRADIENT),
        ({"softcap": 5.0, "beta": None}, Output.GRADIENT),
        ({"softcap": 5.0, "entropy_coef": -0.1, "temperature": 1.5}, Output.GRADIENT),
    ],
    ids=str,
)
def test_policy_loss(terms, output, dtype, device, launched, set_chunk):
    """Over several chunks; without clipping in 16 bits, since plain torch's logits are too coarse for its edges."""
    set_chunk(20 * 75 * 4)
    clip = None if dtype == torch.bfloat16 else (0.2, 0.2)
    check(make_case(45, 40, 75, dtype, device, bias=True), "cuda", clip=clip, **terms)
    assert launched.count(output) >= 2
    assert set(launched) <= {output, Output.NOTHING}


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"temperature": 0.7, "bias": True}], ids=str)
@pytest.mark.parametrize("with_entropy", [False, True])
def test_log_prob(options, with_entropy, device, launched):
    case = make_case(30, 40, 75, torch.float32, device, **options)

    def call(some, backend):
        log_prob, entropy = some.log_prob(linear_log_prob, backend=backend)
        gradients = some.gradients(log_prob.sum() + (entropy.sum() if with_entropy else 0))
        return [log_prob.detach(), entropy.detach()], gradients

    ours, gradients = call(case, "cuda")
    exact, exact_gradients = call(case.to(torch.float64), "reference")
    plain, plain_gradients = call(case, "reference")
    assert_as_good(ours, plain, exact)
    assert_as_good(gradients, plain_gradients, exact_gradients, measure=relative_error)
    assert launched == [Output.NOTHING]


def test_what_the_row_kernel_cannot_hold_is_left_to_triton(device, launched, monkeypatch):
    check(make_case(20, 16, 40, torch.float64, device), "cuda")
    monkeypatch.setattr(cuda_passes, "_fits", lambda vocabulary: False)
    check(make_case(20, 16, 40, torch.float32, device), "cuda", entropy_coef=0.1)
    assert launched == []


@pytest.mark.parametrize("logits", ["fused"], indirect=True)
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
    assert launched == ["product"]
