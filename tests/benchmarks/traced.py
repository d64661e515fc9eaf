"""What a call of the GPU backends does: its own code, run on a CPU with kernels and products that compute nothing."""

import weakref
from collections import Counter
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from exgrpo import kernels
from exgrpo.kernels import dispatch, self_test
from exgrpo.kernels.chunks import products
from exgrpo.kernels.cuda_chunks import binding, cuda_fused
from exgrpo.kernels.triton_chunks import fused_product, launch, triton_fused, triton_passes, triton_tokens
from exgrpo.tools.heads import FORWARD, LOG_PROB, WITH_ENTROPY

RESERVES = ("empty", "empty_strided", "new_empty", "empty_like")
"""Operators that launch nothing."""
FACTORIES = ("new_full", "new_ones", "new_zeros", "ones_like")
"""Those that read nothing."""
KERNELS: dict[ModuleType, tuple[str, ...]] = {
    fused_product: (
        *("exponentials_kernel", "largest_kernel", "target_logit_kernel"),
        *("merge_kernel", "list_kernel", "anchor_kernel"),
    ),
    triton_fused: ("entropy_kernel",),
    triton_passes: ("gradient_kernel", "statistics_kernel"),
    triton_tokens: ("finish_kernel", "policy_rows_kernel", "scale_kernel"),
}


class Trace(TorchDispatchMode):
    """Counts what is done while it is entered.

    Attributes:
        launches: by the name of the operator, kernel or product.
        bytes: that operators of torch read and write.
        live: bytes of what was made while it was entered and is still there.
        peak: the most that there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.bytes = self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Runs an operator; those of the package in their own operators."""
        kwargs = kwargs or {}
        if function.namespace == "exgrpo":
            with self:
                return OPDEFS[function.name()]._init_fn(*args, **kwargs)
        found = function(*args, **kwargs)
        given, made = _tensors((args, kwargs)), _tensors(found)
        self._known |= {tensor.untyped_storage()._cdata for tensor in given}  # those of the caller do not count
        self._keep(made)
        name = function.overloadpacket.__name__
        writes = any(a.alias_info and a.alias_info.is_write for a in function._schema.arguments)
        old = {tensor.untyped_storage().data_ptr() for tensor in given}
        new = any(tensor.numel() and tensor.untyped_storage().data_ptr() not in old for tensor in made)
        if name not in RESERVES and (writes or new):
            self.launches[name] += 1
            if name != "index_put_":
                read = _tensors((args, {**kwargs, "out": None})) if name not in FACTORIES else []
                self.bytes += sum(tensor.nbytes for tensor in made + read)
        return found

    def kernel(self, name: str) -> "Kernel":
        """A kernel of this name that is only counted."""
        return Kernel(self, name)

    def product(self, *operands: Tensor, out_dtype=None, out=None, beta=1.0) -> Tensor:
        """In the place of torch.mm and torch.addmm."""
        self.launches["product"] += 1
        left, right = operands[-2:]
        return left.new_empty(len(left), right.shape[1], dtype=out_dtype) if out is None else out

    def _keep(self, made: list[Tensor]) -> None:
        for tensor in made:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    def _drop(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.live -= size


class Kernel:
    """A kernel that does nothing."""

    def __init__(self, trace: Trace, name: str) -> None:
        self.trace, self.name = trace, name

    def __getitem__(self, grid: object) -> "Kernel":
        return self

    def __call__(self, *arguments: object, **constants: object) -> None:
        self.trace.launches[self.name] += 1


def trace(
    patch: pytest.MonkeyPatch,
    operation: str,
    shape: tuple[int, int, int],
    backend: str,
    plan: launch.Plan,
    chunk_rows: int,
) -> Trace:
    """What a call in bf16 does by ``backend``, planned so, in chunks of so many rows."""
    seen = Trace()
    for module, names in KERNELS.items():
        for name in names:
            patch.setattr(module, name, seen.kernel(name))
    patch.setenv(self_test.ENVIRONMENT, "0")
    patch.setattr(dispatch, "unavailable", lambda *_: "")
    patch.setattr(products, "multiplies_into_float32", lambda *_: True)
    patch.setattr(triton_passes, "plan", lambda *_: plan)
    patch.setattr(triton_passes.TritonPasses, "chunk_rows", lambda *_, **__: chunk_rows)
    patch.setattr(cuda_fused, "fits", lambda *_: True)
    patch.setattr(binding.Call, "launch", lambda self, device: seen.kernel(self.function)())
    patch.setattr(torch, "mm", seen.product)
    patch.setattr(torch, "addmm", seen.product)
    tokens, width, vocabulary = shape
    hidden = torch.ones(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(vocabulary, width, dtype=torch.bfloat16, requires_grad=True)
    target, ones = torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens)
    with seen:
        if operation in (FORWARD, LOG_PROB):
            with torch.set_grad_enabled(operation == LOG_PROB):
                found, _ = kernels.linear_log_prob(hidden, weight, target, backend=backend)
            held = torch.autograd.grad(found, (hidden, weight), ones) if operation == LOG_PROB else found
        else:
            more = {"entropy_coef": 0.001 if operation == WITH_ENTROPY else 0.0, "normalizer": tokens}
            loss = kernels.linear_policy_loss(hidden, weight, target, ones, ones, backend=backend, **more).loss
            held = torch.autograd.grad(loss, (hidden, weight))
        del held
    return seen


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
