"""verl's function, its tests' shapes and tolerances, and its models' forwards with our kernels in them."""

import importlib
import inspect
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from exgrpo.integrations import verl as integration
from exgrpo.integrations.verl import linear_cross_entropy, patch_verl
from tests.gloo import on_ranks
from tests.integrations import tiny

TEMPERATURE = 1.5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Tokens, width, vocabulary of shapes in verl's own test of its kernel. The width decides how far the logits spread, so
# it stays; a CPU does some 100 Gflop/s and not 500 Tflop/s: a 32nd of the tokens is left to it and a 16th of the
# vocabulary.
SHAPES = [(1937, 3584, 152064), (2169, 896, 151936), (8192, 4096, 102400)]
if DEVICE.type == "cpu":
    SHAPES = [(tokens // 32, width // 4, vocabulary // 16) for tokens, width, vocabulary in SHAPES]


@pytest.fixture
def verl(monkeypatch):
    """verl's modules without what its packages' __init__ import, ray among it; a function that imports one."""
    if find_spec("verl") is None:
        pytest.skip("verl is not installed")
    if find_spec("triton") is None:
        pytest.skip("verl's torch backend imports Liger, which needs Triton")
    remove_verl(monkeypatch.delitem)
    empty_packages(monkeypatch, "verl.utils", "verl.utils.kernel", "verl.models", "verl.models.transformers")
    yield importlib.import_module
    remove_verl(dict.__delitem__)


def remove_verl(delete):
    for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
        delete(sys.modules, name)


def empty_packages(monkeypatch, *names):
    """Put empty packages in the place of verl's, of which one imports ray."""
    root = Path(find_spec("verl").submodule_search_locations[0])
    for name in ("verl", *names):
        package = ModuleType(name)
        package.__path__ = [str(root.parent.joinpath(*name.split(".")))]
        monkeypatch.setitem(sys.modules, name, package)


def uniform(*shape, bound=0.5, dtype=torch.bfloat16, device="cpu"):
    return torch.empty(shape, dtype=dtype, device=device).uniform_(-bound, bound).requires_grad_()


def head(tokens, width, vocabulary, dtype=torch.bfloat16, device="cpu"):
    """As verl's test makes them: one row of tokens, everything uniform in [-1/2, 1/2]."""
    hidden = uniform(1, tokens, width, dtype=dtype, device=device)
    weight = uniform(vocabulary, width, dtype=dtype, device=device)
    return hidden, weight, torch.randint(vocabulary, (1, tokens), device=device)


def full_logits(hidden, weight, labels, dtype=torch.float32):
    """Log-probabilities and entropies [T] of the rounded inputs, in another dtype."""
    logits = hidden.flatten(0, -2).to(dtype) @ weight.to(dtype).T / TEMPERATURE
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, labels.reshape(-1, 1)).squeeze(-1), entropy


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_verls_own_shapes_and_tolerances(shape):
    hidden, weight, labels = head(*shape, device=DEVICE)
    upstream = [uniform(labels.numel(), bound=bound, device=DEVICE).detach() for bound in (1.0, 0.5)]
    ours = linear_cross_entropy(hidden, weight, labels, TEMPERATURE)
    exact = full_logits(hidden, weight, labels)
    torch.testing.assert_close(ours[0], exact[0], atol=1e-3, rtol=2e-4)
    torch.testing.assert_close(ours[1], exact[1], atol=5e-3, rtol=5e-4)
    found = torch.autograd.grad(ours, (hidden, weight), upstream)
    wanted = torch.autograd.grad(exact, (hidden, weight), upstream)
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=4e-2)


@pytest.mark.parametrize(("reduction", "reduce"), [("none", lambda x: x), ("sum", torch.sum), ("Mean", torch.mean)])
def test_reductions_concern_the_log_probabilities_alone(reduction, reduce):
    hidden, weight, labels = head(29, 24, 101, torch.float64)
    with pytest.raises(ValueError, match="reduction.*'average'"):
        linear_cross_entropy(hidden, weight, labels, 1.0, "average")
    log_prob, entropy = linear_cross_entropy(hidden, weight, labels, TEMPERATURE, reduction)
    exact, exact_entropy = full_logits(hidden, weight, labels, torch.float64)
    torch.testing.assert_close(log_prob, reduce(exact))
    torch.testing.assert_close(entropy, exact_entropy)
    found = torch.autograd.grad(log_prob.sum() + 0.3 * entropy.sum(), (hidden, weight))
    torch.testing.assert_close(
        found, torch.autograd.grad(reduce(exact).sum() + 0.3 * exact_entropy.sum(), (hidden, weight))
    )


def test_it_takes_what_verl_takes_and_gives_what_verl_gives(verl):
    theirs = inspect.signature(verl("verl.utils.kernel.linear_cross_entropy").LinearCrossEntropy.forward)
    expected = [(p.name, p.default) for p in theirs.parameters.values()][1:]  # without autograd's ctx
    shared = [p for p in inspect.signature(linear_cross_entropy).parameters.values() if p.name != "memory"]
    assert [(p.name, p.default) for p in shared] == expected
    hidden, weight, labels = head(12, 16, 33)
    shaped = linear_cross_entropy(hidden.reshape(3, 4, 16), weight, labels.reshape(3, 4).int(), TEMPERATURE)
    flat = linear_cross_entropy(hidden, weight, labels, TEMPERATURE)
    assert [(x.shape, x.dtype) for x in shaped] == 2 * [((12,), torch.float32)]
    assert all(torch.equal(*pair) for pair in zip(shaped, flat, strict=True))


def outputs_and_gradients(model, tokens, upstream):
    output = model(input_ids=tokens, temperature=TEMPERATURE, return_dict=True, use_cache=False)
    results = output.log_probs.reshape(-1), output.entropy.reshape(-1)
    gradients = torch.autograd.grad(results, list(model.parameters()), upstream)
    return *(x.detach() for x in results), *gradients


@pytest.mark.parametrize("backend", ["triton", "torch", "liger"])
@pytest.mark.parametrize("name", ["qwen2", "llama"])  # a tied head, one of its own
def test_models_forwarded_by_verl_give_the_results_of_its_torch_backend(verl, monkeypatch, name, backend):
    patch_forward = verl("verl.models.transformers.monkey_patch").patch_forward_with_backends
    model, tokens = tiny.model(name), torch.randint(tiny.VOCABULARY, (1, 40))
    upstream = (torch.randn(40), torch.randn(40))
    monkeypatch.setattr(type(model), "forward", type(model).forward)  # verl replaces it on the class
    patch_forward(model, use_fused_kernels=True, fused_kernels_backend="torch")
    expected = outputs_and_gradients(model, tokens, upstream)
    linear_log_prob, calls = integration.linear_log_prob, []

    def counted(*tensors, **options):
        calls.append(len(tensors))
        return linear_log_prob(*tensors, **options)

    monkeypatch.setattr(integration, "linear_log_prob", counted)
    undo = patch_verl()
    patch_forward(model, use_fused_kernels=True, fused_kernels_backend=backend)
    found = outputs_and_gradients(model, tokens, upstream)
    undo()
    assert len(calls) == 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_its_fused_linear_keeps_the_shape_of_a_batch(verl):
    fused_linear = verl("verl.utils.experimental.torch_functional").FusedLinearForPPO
    hidden, weight, labels = uniform(3, 5, 16), uniform(33, 16), torch.randint(33, (3, 5))
    theirs = fused_linear()(hidden, weight, labels, TEMPERATURE)
    undo = patch_verl()
    ours = fused_linear()(hidden, weight, labels, temperature=TEMPERATURE)
    undo()
    exact = full_logits(hidden, weight, labels, torch.float64)
    for mine, yours, true in zip(ours, theirs, exact, strict=True):
        assert mine.shape == yours.shape == (3, 5)
        assert mine.dtype == torch.float32
        # Its logits are bfloat16; ours are not rounded.
        assert (mine.flatten() - true).abs().max() < 0.01 * (yours.flatten() - true).abs().max()


def test_a_patch_reaches_every_module_and_is_undone(verl):
    kernel = verl("verl.utils.kernel.linear_cross_entropy")
    fused_linear = verl("verl.utils.experimental.torch_functional").FusedLinearForPPO
    originals = kernel.linear_cross_entropy, fused_linear.forward
    before, after = ModuleType("verl.loaded_before"), ModuleType("verl.loaded_after")  # Megatron's forward imports it
    sys.modules[before.__name__], before.linear_cross_entropy = before, kernel.linear_cross_entropy
    undo, undo_nothing = patch_verl(), patch_verl()
    sys.modules[after.__name__], after.linear_cross_entropy = after, kernel.linear_cross_entropy
    assert before.linear_cross_entropy is after.linear_cross_entropy is linear_cross_entropy
    assert fused_linear.forward is not originals[1]
    undo_nothing()
    assert kernel.linear_cross_entropy is linear_cross_entropy
    undo()
    assert before.linear_cross_entropy is after.linear_cross_entropy is kernel.linear_cross_entropy is originals[0]
    assert fused_linear.forward is originals[1]


def test_the_kernels_of_a_patch_have_the_memory_that_is_asked_for(verl):
    hidden, weight, labels = uniform(5, 16), uniform(33, 16), torch.randint(33, (5,))
    undo = patch_verl(memory=1)
    with pytest.raises(ValueError, match="memory: "):
        verl("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(ValueError, match="memory: "):
        verl("verl.utils.experimental.torch_functional").FusedLinearForPPO()(hidden, weight, labels)
    undo()


def test_without_verl_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(ImportError, match="pip install verl"):
        patch_verl()


def without_its_packages(monkeypatch):
    """Replace verl's packages, its module that looks for a GPU and what a GPU's tensors have."""
    empty_packages(monkeypatch, "verl.utils", "verl.utils.kernel")
    device = ModuleType("verl.utils.device")
    device.is_cuda_available = False  # no tensor memory accelerator in the interpreter
    device.get_device_name = device.get_device_capability = device.get_torch_device = None
    monkeypatch.setitem(sys.modules, "verl.utils.device", device)
    # It asserts that tensors are on a GPU, and marks ranges for a profiler of GPUs.
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda name: nullcontext())


def check_against_the_triton_kernel(rank):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden, weight, labels = head(32, 128, 1100, torch.float32)
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_its_packages(monkeypatch)
        theirs = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
        # "none" alone: its reduced values are added to memory that nothing has cleared.
        arguments = (hidden, weight, labels, TEMPERATURE, "none", None)
        found, expected = linear_cross_entropy(*arguments), theirs(*arguments)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        upstream = [torch.randn_like(x) for x in found]
        found, expected = (torch.autograd.grad(x, (hidden, weight), upstream) for x in (found, expected))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_its_triton_kernel_gives_the_same_in_the_interpreter(monkeypatch):
    for package in ("verl", "triton"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # heeded by a process that has not imported Triton yet
    torch.multiprocessing.spawn(check_against_the_triton_kernel, nprocs=1)


def check_rank(rank):
    """Each rank has its rows of the head; the gradients of the hidden states are summed outside, as in verl's test."""
    torch.manual_seed(0)
    hidden, weight, labels = head(37, 24, 2 * 51, torch.float64)
    mine = weight.detach()[51 * rank : 51 * (rank + 1)].requires_grad_()
    upstream = torch.randn(2, 37, dtype=torch.float64).unbind()
    exact = full_logits(hidden, weight, labels, torch.float64)
    wanted = torch.autograd.grad(exact, (hidden, weight), upstream)
    ours = linear_cross_entropy(hidden, mine, labels, TEMPERATURE, "none", dist.group.WORLD)
    found = torch.autograd.grad(ours, (hidden, mine), upstream)
    dist.all_reduce(found[0])
    torch.testing.assert_close(ours, exact)
    torch.testing.assert_close(found, (wanted[0], wanted[1][51 * rank : 51 * (rank + 1)]))
    alone = dist.new_group([0]), dist.new_group([1])  # a tensor-parallel size of 1
    ours = linear_cross_entropy(hidden, weight, labels, TEMPERATURE, "none", alone[rank])
    torch.testing.assert_close(torch.autograd.grad(ours, (hidden, weight), upstream), wanted)


def test_tensor_parallel_ranks_give_the_whole_results_and_shares_of_the_gradient(tmp_path):
    on_ranks(check_rank, 2, tmp_path)
