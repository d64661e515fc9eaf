"""Which backend computes a call, and why.

- ``torch``: chunks of tokens in plain PyTorch. Runs on every device: the choice of ``auto``. On a GPU it waits for the
  number of tokens that take part: once a call, and once a chunk where gradients are formed with the loss.
- ``reference``: full logits and plain autograd. The oracle; only on request, since its memory is [T, V].

The argument ``backend`` decides; where it is ``"auto"``, the environment variable EXGRPO_BACKEND does.
"""

import os
from typing import Protocol

from torch import Tensor, dtype

from exgrpo.kernels import torch_chunks
from exgrpo.kernels.inputs import Gradients, Head, Needed, PolicyTerms
from exgrpo.kernels.results import LogProb, PolicyLoss

ENVIRONMENT = "EXGRPO_BACKEND"
REFERENCE = "reference"


class Backend(Protocol):
    """What a backend provides; a module of plain functions is one. All inputs are checked already."""

    def log_prob_forward(self, head: Head) -> tuple[LogProb, tuple[Tensor, ...]]:
        """Log-probability and entropy of each token [T], 0 where left out; and tensors to save."""

    def log_prob_backward(
        self,
        head: Head,
        saved: tuple[Tensor, ...],
        grad_log_prob: Tensor | None,
        grad_entropy: Tensor | None,
        needed: Needed,
    ) -> Gradients:
        """Gradients from those of the two outputs [T]; None stands for zero."""

    def policy_loss_forward(
        self, head: Head, terms: PolicyTerms, needed: Needed
    ) -> tuple[PolicyLoss, tuple[Tensor | None, ...]]:
        """Loss and per-token results [T]; and tensors to save."""

    def policy_loss_backward(
        self, saved: tuple[Tensor | None, ...], grad_loss: Tensor, tokens: int, dtype: dtype
    ) -> Gradients:
        """Gradients from that of the loss; that of hidden is [tokens, D] in ``dtype``."""


BACKENDS: dict[str, Backend] = {"torch": torch_chunks}


def backend_name(requested: str, vocab_group: object = None) -> str:
    """The backend that a call with this argument gets.

    Raises:
        ValueError: there is no such backend, or it has no vocab_group.
    """
    name = requested
    source = f"backend={requested!r}"
    if requested == "auto" and os.environ.get(ENVIRONMENT):
        name = os.environ[ENVIRONMENT]
        source = f"{ENVIRONMENT}={name}"
    if name == "auto":
        return "torch"
    names = [*BACKENDS, REFERENCE]
    if name not in names:
        raise ValueError(f"{source}: expected auto, {' or '.join(names)}")
    if name == REFERENCE and vocab_group is not None:
        raise ValueError(f"{source}: it has no vocab_group; expected auto or {' or '.join(BACKENDS)}")
    return name
