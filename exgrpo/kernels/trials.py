"""Small cases of the operations, the same every time, by which a backend is held against another: see `self_test`.

A trial has what decides which code of a backend computes a call: width, dtypes, and which optional arguments there are.
It works below autograd and torch's dispatcher: nothing of the caller's modes reaches it. Its numbers come from a
generator of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from exgrpo.kernels import torch_chunks
from exgrpo.kernels.chunks import walks
from exgrpo.kernels.chunks.passes import Backend
from exgrpo.kernels.inputs import (
    LEFT_OUT,
    PRESENT,
    Head,
    HeadOptions,
    Kept,
    Needed,
    PolicyTerms,
    PolicyTokens,
    ScoredTokens,
    Surrogate,
    VocabShard,
    compute_dtype,
)

TOKENS, VOCABULARY = 33, 161
OF_KEPT = 1031
"""Vocabulary where there are kept sets: some of them are small parts of it, which a backend has kernels for."""
CPU_COLUMNS = 256
"""On a CPU a wider head has so many columns, and its own remainder by 128: its kernels know no other difference."""
UNLIKELY = 1
"""The token whose target is next to impossible: the fused products take another anchor there."""
SPREAD = 8.0
"""Of its logits, in nats; its share of the gradients is so much smaller that it is like another token's."""
CLIP, BETA = (0.2, 0.2), 0.1
SET_SIZES = (3, 0, 8, 1, 5)
"""Of the kept sets of the tokens in turn; 0: the whole vocabulary."""
LOG_RATIOS = (-0.6, -0.1, 0.1, 0.6)
"""Of the tokens in turn: clipped at either side or at none, and far from the bounds, where rounding would decide."""
ENTROPY_COEF = 0.05
EXACT = torch.float64

Outcomes = Mapping[str, Tensor]
"""Results by name; those whose name begins with GRADIENT may be rounded to the operands' dtype on their way."""
GRADIENT = "gradient of "


@dataclass(frozen=True)
class Trial:
    """Of an operation on a device, for operands of a dtype."""

    operation: ClassVar[str]
    device: torch.device
    operand: torch.dtype

    def __str__(self) -> str:
        return f"{self.operation} ({self.operand} on {self.device.type})"

    def outcomes(self, backend: Backend, *, exact: bool = False) -> Outcomes:
        """What a backend computes; ``exact``: in float64, from the same numbers."""
        raise NotImplementedError

    def generator(self) -> torch.Generator:
        """The source of the numbers, on the CPU."""
        return torch.Generator("cpu").manual_seed(20251002)


@dataclass(frozen=True)
class HeadTrial(Trial):
    """Of an operation on a linear head."""

    width: int
    stored: torch.dtype
    """Of the weight."""
    bias: torch.dtype | None = None
    temperature: bool = False
    softcap: bool = False
    kept: bool = False

    @classmethod
    def of(cls, head: Head, **more: bool) -> Self:
        """Of calls such as one on this head."""
        hidden, weight, bias, _, options = head
        return cls(
            hidden.device,
            options.operand,
            trial_width(weight.shape[1], hidden.device),
            weight.dtype,
            None if bias is None else bias.dtype,
            options.temperature is not None,
            options.softcap is not None,
            options.kept is not None,
            **more,
        )

    def head(self, *, exact: bool) -> Head:
        """Some tokens, one in seven left out, one of them UNLIKELY."""
        generator = self.generator()

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

        vocabulary = OF_KEPT if self.kept else VOCABULARY
        hidden, weight = normal(TOKENS, self.width), normal(vocabulary, self.width) / max(1, self.width) ** 0.5
        hidden[UNLIKELY] *= SPREAD
        target = torch.randint(vocabulary, (TOKENS,), generator=generator, device="cpu")
        target[UNLIKELY] = (weight @ hidden[UNLIKELY]).argmin()
        target[::7] = LEFT_OUT
        temperature = torch.arange(4, 4 + TOKENS, dtype=torch.float32, device="cpu") / 16 if self.temperature else None
        bias = None if self.bias is None else self._rounded(normal(vocabulary), self.bias, exact)
        kept = _kept(target, vocabulary, generator) if self.kept else None
        return Head(
            self._rounded(hidden, self.operand, exact),
            self._rounded(weight.to(self.stored).to(self.operand), self.stored, exact),
            bias,
            target.to(self.device),
            HeadOptions(
                temperature=None if temperature is None else temperature.to(self.device),
                softcap=5.0 if self.softcap else None,
                operand=EXACT if exact else self.operand,
                shard=VocabShard.whole(vocabulary),
                kept=None if kept is None else Kept(*(values.to(self.device) for values in kept)),
            ),
        )

    def _rounded(self, values: Tensor, dtype: torch.dtype, exact: bool) -> Tensor:
        rounded = values.to(dtype)
        return (rounded.to(EXACT) if exact else rounded).to(self.device)

    @property
    def needed(self) -> Needed:
        """All gradients that there are."""
        return Needed(True, True, self.bias is not None)


@dataclass(frozen=True)
class LogProbTrial(HeadTrial):
    """Of the forward, and of backwards with and without an entropy's gradient."""

    operation: ClassVar[str] = "linear_log_prob"

    def outcomes(self, backend: Backend, *, exact: bool = False) -> Outcomes:
        """See `Trial`."""
        head = self.head(exact=exact)
        result, saved = walks.log_prob_forward(head, backend)
        found = result._asdict()
        upstream = torch.linspace(-1, 1, TOKENS, dtype=result.log_prob.dtype, device=self.device)
        upstream[UNLIKELY] /= SPREAD
        for entropy, label in ((None, ""), (upstream.flip(0), " with entropy")):
            gradients = walks.log_prob_backward(head, saved, upstream, entropy, self.needed, backend)
            found |= _named_gradients(gradients._asdict(), label)
        return found


@dataclass(frozen=True)
class PolicyLossTrial(HeadTrial):
    """Of the loss, and of the gradients that are formed with it."""

    operation: ClassVar[str] = "linear_policy_loss"
    entropy: bool = False
    replayed: bool = False
    clip: bool = True
    beta: bool = True

    @classmethod
    def of_loss(cls, head: Head, terms: PolicyTerms) -> Self:
        """Of calls such as one on this head with these terms."""
        clip, beta = terms.surrogate
        return cls.of(
            head,
            entropy=bool(terms.entropy_coef),
            replayed=terms.tokens.replayed is not None,
            clip=clip is not None,
            beta=beta is not None,
        )

    def outcomes(self, backend: Backend, *, exact: bool = False) -> Outcomes:
        """See `Trial`."""
        known, _ = walks.log_prob_forward(self.head(exact=True), torch_chunks)
        surrogate = Surrogate(CLIP if self.clip else None, BETA if self.beta else None)
        tokens = _policy_tokens(known.log_prob, self.replayed, self.generator())
        terms = PolicyTerms(tokens, surrogate, ENTROPY_COEF if self.entropy else 0.0, None)
        head = self.head(exact=exact)
        loss, per_token, gradients = walks.policy_loss_forward(head, terms, self.needed, backend)
        return _named_tokens(per_token) | {"loss": loss} | _named_gradients(gradients._asdict())


@dataclass(frozen=True)
class TokenTrial(Trial):
    """Of the loss of tokens whose log-probabilities are known."""

    operation: ClassVar[str] = "policy_loss"
    entropy: bool
    mask: bool
    replayed: bool
    clip: bool
    beta: bool

    @classmethod
    def of(cls, scored: ScoredTokens, surrogate: Surrogate) -> Self:
        """Of calls such as one on these tokens."""
        return cls(
            scored.log_prob.device,
            scored.log_prob.dtype,
            scored.entropy is not None,
            scored.mask is not None,
            scored.policy.replayed is not None,
            surrogate.clip is not None,
            surrogate.beta is not None,
        )

    def outcomes(self, backend: Backend, *, exact: bool = False) -> Outcomes:
        """See `Trial`."""
        generator = self.generator()
        entropy, less = 3 * torch.rand(2, TOKENS, generator=generator, dtype=torch.float32, device="cpu")
        log_prob = -less
        scored = ScoredTokens(
            log_prob.to(self.device, EXACT if exact else self.operand),
            entropy.to(self.device) if self.entropy else None,
            _policy_tokens(log_prob.to(self.device), self.replayed, generator),
            (torch.arange(TOKENS, device=self.device) % 7 != 0) if self.mask else None,
        )
        surrogate = Surrogate(CLIP if self.clip else None, BETA if self.beta else None)
        sums, per_token, coefficient = backend.token_objective(scored, surrogate)
        return _named_tokens(per_token) | {"sums": sums, "coefficient": coefficient}


@dataclass(frozen=True)
class AdvantageTrial(Trial):
    """Of the advantages of responses in groups, one of which has a single member."""

    operation: ClassVar[str] = "group_advantage"
    scale_by_std: bool

    def outcomes(self, backend: Backend, *, exact: bool = False) -> Outcomes:
        """See `Trial`."""
        generator = self.generator()
        reward = torch.randint(5, (TOKENS,), generator=generator, device="cpu").to(self.operand)
        group = torch.randint(6, (TOKENS,), generator=generator, device="cpu")
        group[3] = 6
        reward = reward.to(self.device, EXACT if exact else self.operand)
        return {"advantage": backend.centre_groups(reward, group.to(self.device), self.scale_by_std)}


@dataclass(frozen=True)
class SegmentTrial(Trial):
    """Of the mean entropies of packed sequences, one of them without a token."""

    operation: ClassVar[str] = "sequence_entropy"

    def outcomes(self, backend: Backend, *, exact: bool = False) -> Outcomes:
        """See `Trial`."""
        values = torch.rand(TOKENS, generator=self.generator(), dtype=self.operand, device="cpu").to(self.device)
        counted = torch.arange(TOKENS, device=self.device) % 7 != 0
        offsets = torch.tensor([0, 9, 9, 30, TOKENS], device=self.device)
        return {"mean": backend.segment_mean(values.to(EXACT) if exact else values, counted, offsets)}


@dataclass(frozen=True)
class ScaleTrial(Trial):
    """Of gradients times that of the loss, by 1 and by another number."""

    operation: ClassVar[str] = "the backward of linear_policy_loss"

    def outcomes(self, backend: Backend, *, exact: bool = False) -> Outcomes:
        """See `Trial`."""
        values = torch.randn(TOKENS, VOCABULARY, generator=self.generator(), dtype=torch.float32, device="cpu")
        found = {}
        for number in (1.0, 0.3125):
            scaled = values.to(self.device, self.operand).to(EXACT if exact else self.operand)
            backend.scale(scaled, scaled.new_full((), number, dtype=EXACT if exact else compute_dtype(self.operand)))
            found[f"{GRADIENT}the weight times {number}"] = scaled
        return found


def trial_width(width: int, device: torch.device) -> int:
    """The width of the trial of a head."""
    return CPU_COLUMNS + width % 128 if device.type == "cpu" and width > CPU_COLUMNS else width


def head_trials(device: torch.device, dtype: torch.dtype, width: int) -> tuple[HeadTrial, ...]:
    """Those of a training whose head has weights of a dtype and no bias, cap or temperature."""
    shape = device, dtype, trial_width(width, device), dtype
    return LogProbTrial(*shape), PolicyLossTrial(*shape)


def _kept(target: Tensor, vocabulary: int, generator: torch.Generator) -> Kept:
    """Sets of SET_SIZES words, the targets among them."""
    sizes = torch.tensor(SET_SIZES, device="cpu").repeat(TOKENS)[:TOKENS]
    drawn = torch.rand(TOKENS, vocabulary, generator=generator, dtype=torch.float32, device="cpu")
    order = drawn.scatter(1, target.clamp(min=0).unsqueeze(1), -1).argsort(1)  # the targets first
    words = order[torch.arange(vocabulary, device="cpu") < sizes.unsqueeze(1)]
    return Kept(words.int(), torch.cat((sizes.new_zeros(1), sizes.cumsum(0))))


def _policy_tokens(log_prob: Tensor, replayed: bool, generator: torch.Generator) -> PolicyTokens:
    """Old log-probs at LOG_RATIOS from these, one of the present policy; advantages of both signs, some 0."""
    device = log_prob.device
    ratios = torch.tensor(LOG_RATIOS, dtype=log_prob.dtype, device=device).repeat(TOKENS)[:TOKENS]
    old = (log_prob - ratios).float()
    old[5] = PRESENT
    advantage = torch.randn(TOKENS, generator=generator, dtype=torch.float32, device="cpu")
    advantage[::5] = 0
    advantage[UNLIKELY] /= SPREAD
    flags = torch.rand(TOKENS, generator=generator, dtype=torch.float32, device="cpu") < 0.4
    return PolicyTokens(old, advantage.to(device), flags.to(device) if replayed else None)


def _named_tokens(per_token: Tensor) -> dict[str, Tensor]:
    return dict(zip(("log_prob", "entropy", "ratio", "clipped"), per_token, strict=True))


def _named_gradients(gradients: Mapping[str, Tensor | None], label: str = "") -> dict[str, Tensor]:
    return {f"{GRADIENT}{name}{label}": value for name, value in gradients.items() if value is not None}
