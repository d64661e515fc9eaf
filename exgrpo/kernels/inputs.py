"""Checked inputs, as the backends receive them, and what the public functions return."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

PRESENT = math.inf
"""As an old log-probability: that of the present policy, whatever it is."""
IGNORED = -100
"""Target of a position that the caller leaves out, unless the caller says otherwise."""

LEFT_OUT = -1
"""Target of such a token inside the backends."""

Fields = TypeVar("Fields", bound=tuple[Any, ...])


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of logits, statistics, sums and results for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def mapped(values: Fields, function: Callable[[Tensor], Tensor]) -> Fields:
    """Return a structure of tensors with a function of each; what is None stays so."""
    make: Any = type(values)
    return make(*(None if x is None else function(x) if isinstance(x, Tensor) else mapped(x, function) for x in values))


@dataclass(frozen=True)
class VocabShard:
    """Rows [offset, offset + size) of a weight [V, D], and what the ranks of its group have to agree on."""

    size: int
    """Rows held here; any number, 0 included."""
    offset: int
    vocabulary: int
    """V, the sum of all ranks' sizes."""
    largest: int
    """The largest size of any rank: the ranks' chunks must have the same rows."""
    group_name: str = ""
    """Of the process group; empty: there is none."""

    @classmethod
    def whole(cls, size: int) -> "VocabShard":
        """The shard that is everything."""
        return cls(size, 0, size, size)

    @property
    def group(self) -> "dist.ProcessGroup | None":
        """The process group by its name: an operator's schema has names only."""
        resolve: Any = dist.distributed_c10d._resolve_process_group
        return resolve(self.group_name) if self.group_name else None

    @classmethod
    @torch._disable_dynamo  # a graph break: sizes of other ranks are no constants of a graph
    def exchange(cls, size: int, group: "dist.ProcessGroup", device: torch.device) -> "VocabShard":
        """Gather the other ranks' sizes; a collective call that waits for its result."""
        mine = torch.tensor([size], dtype=torch.int64, device=device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, mine, group=group)
        sizes = torch.cat(gathered).tolist()
        rank = dist.get_rank(group)
        return cls(size, sum(sizes[:rank]), sum(sizes), max(sizes), group.group_name)

    def locate(self, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Local index of each target, clamped into range, and where it lies in this part (None: everywhere)."""
        if not self.group_name and self.size == self.vocabulary:
            return target.clamp(0, self.size - 1), None
        local = target - self.offset
        held = (local >= 0) & (local < self.size)
        return local.clamp(0, max(0, self.size - 1)), held

    def largest_of(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Elementwise maximum over the ranks; inf where one has NaN, of which no softmax is made either."""
        if not self.group_name:
            return values
        infinite = tuple(value.nan_to_num(torch.inf, torch.inf, -torch.inf) for value in values)
        return self._reduce(infinite, dist.ReduceOp.MAX)  # which may lose NaN

    def sum_of(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Elementwise sum over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM if self.group_name else None)

    def _reduce(self, values: tuple[Tensor, ...], operation: object) -> tuple[Tensor, ...]:
        if not self.group_name:
            return values
        joined = torch.stack(values)
        dist.all_reduce(joined, op=operation, group=self.group)
        return joined.unbind()


class AllowedIds(NamedTuple):
    """The sets of vocabulary ids over which the tokens' softmaxes are."""

    ids: Tensor
    """[M] int32, over the whole vocabulary, those of a token in any order."""
    offsets: Tensor
    """[T + 1] int64: token t has ids [offsets[t], offsets[t + 1]); none of them stand for the whole vocabulary."""


class HeadArguments(NamedTuple):
    """Arguments of the public functions on a head, as they were given; see :func:`exgrpo.kernels.linear_log_prob`."""

    bias: Tensor | None
    temperature: float | Tensor
    softcap: float | None
    allowed_tokens: tuple[Tensor, Tensor] | None
    ignore_index: int


class LossArguments(NamedTuple):
    """Arguments of the public losses, as they were given; see :func:`exgrpo.kernels.linear_policy_loss`."""

    replayed: Tensor | None
    clip: tuple[float, float] | None
    beta: float | None
    entropy_coef: float
    normalizer: float | Tensor | None
    mask: Tensor | None


@dataclass(frozen=True)
class HeadOptions:
    """Options of a linear head: logits = cap(hidden @ weight.T + bias) / temperature."""

    temperature: Tensor | None
    """[T]; None: 1."""
    softcap: float | None
    """cap(x) = softcap * tanh(x / softcap); None: no cap."""
    operand: torch.dtype
    """The dtype to which hidden states and weight are rounded: theirs, or that of autocast."""
    shard: VocabShard
    """The part of the vocabulary that is held here."""
    memory: int | None = None
    """Bytes that a call may allocate besides its inputs, its outputs and the gradients with their sums; None: the
    backend decides."""
    counts: tuple[int, int] | None = None
    """Tokens that take part, and those of them that may have a gradient; None: the host reads them from the device."""
    allowed_tokens: AllowedIds | None = None
    """None: each softmax is over the whole vocabulary."""


class Head(NamedTuple):
    """Tokens and the head that scores them."""

    hidden: Tensor
    """[T, D]"""
    weight: Tensor
    """[V, D], or this rank's part of it; the caller's own tensor, never a view or cast of it."""
    bias: Tensor | None
    """[V]"""
    target: Tensor
    """[T] int64, over the whole vocabulary; LEFT_OUT where a token takes no part."""
    options: HeadOptions


class PolicyTokens(NamedTuple):
    """Inputs of the objective but for the log-probabilities, all [T]."""

    old_log_prob: Tensor
    """Under the policy that generated the tokens."""
    advantage: Tensor
    replayed: Tensor | None
    """bool; None: no token is replayed."""


class Surrogate(NamedTuple):
    """Treatment of the importance ratio w."""

    clip: tuple[float, float] | None
    """Of fresh tokens w is clipped to [1 - clip[0], 1 + clip[1]]; None: w is not clipped."""
    beta: float | None
    """Of replayed tokens w is shaped to w / (w + beta); None: w is not shaped."""

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The lowest and the highest ratio that are not clipped."""
        return None if self.clip is None else (1 - self.clip[0], 1 + self.clip[1])


class ScoredTokens(NamedTuple):
    """Tokens whose log-probabilities are known."""

    log_prob: Tensor
    """[T], float32 or float64: the dtype of all results."""
    entropy: Tensor | None
    """[T], any floating dtype, as the fields of ``policy``; None: 0."""
    policy: PolicyTokens
    mask: Tensor | None
    """[T] bool; where it is False, a token counts as 0 whatever it holds. None: all tokens take part."""


class PolicyTerms(NamedTuple):
    """Terms of the loss but for the log-probabilities."""

    tokens: PolicyTokens
    surrogate: Surrogate
    entropy_coef: float
    """Weight of the sum of entropies."""
    normalizer: Tensor | None
    """Without dimensions; None: the number of tokens that take part."""


class Needed(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


class Gradients(NamedTuple):
    """Gradients of hidden [T, D], weight [V, D] and bias [V]; None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class LogProb(NamedTuple):
    """Per-token results of :func:`exgrpo.kernels.linear_log_prob`.

    Attributes:
        log_prob: log-probability of each target in nats, shaped like ``target``; 0 at ignored positions.
        entropy: Shannon entropy of each token's distribution, over the whole vocabulary or its allowed tokens, in nats,
            same shape.
    """

    log_prob: Tensor
    entropy: Tensor


class PolicyLoss(NamedTuple):
    """Results of :func:`exgrpo.kernels.linear_policy_loss` and :func:`exgrpo.kernels.policy_loss`.

    Every per-token tensor is detached, in the dtype of the loss and shaped like ``target`` (``log_prob``),
    and is 0 at positions that are left out.

    Attributes:
        loss: differentiable scalar.
        log_prob: log-probability of each token under the current policy, in nats.
        entropy: entropy of each token's distribution in nats (0 where none was given to ``policy_loss``).
        ratio: importance ratio, current over behaviour policy, before clipping and shaping.
        clipped: 1 where clipping has cut the token's gradient off, else 0.
    """

    loss: Tensor
    log_prob: Tensor
    entropy: Tensor
    ratio: Tensor
    clipped: Tensor
