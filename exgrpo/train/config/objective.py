"""The options of the loss and of its corrections, and what follows from them for a reward."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from exgrpo.train.common.functions import Functions
from exgrpo.train.common.limits import LONGEST
from exgrpo.train.config.replay import KINDS, Baseline
from exgrpo.train.config.section import Section

Band = Literal["all", "easy", "medium", "hard"]
SURROGATES = Functions("exgrpo.train.policy.surrogate", "objective.surrogate")
Bound = Annotated[float, Field(ge=0, le=1e6)]
Bounds = tuple[Bound, Bound]
CorrectionName = Literal["tis", "token_mask", "sequence_tis", "sequence_mask", "geometric_mask"]
BOUNDS: dict[CorrectionName, Bounds] = {
    "tis": (0.0, 2.0),
    "token_mask": (0.5, 5.0),
    "sequence_tis": (0.0, 2.0),
    "sequence_mask": (0.0, 3.0),
    "geometric_mask": (0.999, 1.001),
}
"""Of a correction's ratio, where none are given: those of verl's presets, and for sequence_mask those of TRL."""


class ObjectiveConfig(Section):
    """The loss (arXiv 2510.02245, section 3.3)."""

    surrogate: Annotated[str, SURROGATES.checked] = Field(
        "clipped", description=f"How the ratios of fresh tokens enter the loss: {SURROGATES.choices}"
    )
    clip: tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=0, le=1000)]] | None = Field(
        (0.2, 0.2),
        description="eps_low eps_high for fresh tokens, whose ratios stay in [1 - eps_low, 1 + eps_high]; "
        "None = no clipping.",
    )
    clip_with_replay: bool = Field(False, description="Clip in steps that replay, too (the paper does not).")
    dual_clip: float = Field(
        3.0, gt=1, le=1000, description="dual_clip: ratio beyond which a failure pushes a token no further away."
    )
    weigh: Annotated[str, KINDS["weigh"].checked] = Field(
        "shaped", description=f"How replayed tokens enter the loss: {KINDS['weigh'].choices}"
    )
    beta: float = Field(
        0.1,
        ge=1e-6,
        le=1e6,
        description="shaped: f(w) = w/(w+beta) on replayed tokens. Below 1e-6 or above 1e6, f is 1 or 0.",
    )
    second_moment: float = Field(
        0.04, gt=0, le=1e6, description="second_moment: largest mean square of the log-ratios that count."
    )
    trigger: float = Field(
        1e-4, gt=0, le=1, description="veto: ratio of a failure's token, below which nothing behind it is learnt."
    )
    coefficient: float = Field(
        0.1, ge=0, le=1e6, description="likelihood, jensen_shannon: what stands in the place of an advantage."
    )
    baseline: Baseline = Field(
        "mean",
        description="An answer's reward is compared with the mean of its group, or of the others in it (RLOO); "
        "log_mean_exp: with beta1 log mean exp(reward / beta1) over its group, the value of regressions.",
    )
    beta1: float = Field(
        1.0, gt=0, le=1e6, description="log_mean_exp: near 0 the best reward of the group, at 1e6 the mean."
    )
    beta2: float = Field(
        1e-3,
        gt=0,
        le=1e6,
        description="oapl, coupled: so many times its log-ratio is an answer's reward; an answer rests where its "
        "log-ratio is advantage / beta2.",
    )
    anchor: Literal["writer", "start"] = Field(
        "writer",
        description="oapl, coupled: what log-ratios refer to: the policy that wrote the answer (of fresh ones, "
        "that before the step's update), or the model that the run starts from, which is then kept as a reference.",
    )
    scale_by_std: bool = Field(False, description="Divide advantages by the group's standard deviation.")
    overlong_tokens: int = Field(
        0,
        ge=0,
        le=LONGEST,
        description="Over the last so many tokens before rollout.max_tokens, overlong_penalty is taken from the reward "
        "bit by bit (DAPO); successes stay what they are. 0: nothing is.",
    )
    overlong_penalty: float = Field(1.0, gt=0, le=1e6, description="overlong_tokens: what the longest answers lose.")
    overlong_filter: bool = Field(
        False, description="Learn nothing from answers that were cut (DAPO); their rewards count in their groups."
    )
    normalize: Literal["constant", "token", "sequence", "answer"] = Field(
        "constant",
        description="constant: sequences * max_tokens (Dr.GRPO); token: all tokens; sequence: mean of means; answer: "
        "mean over the answers of the sums of their tokens.",
    )
    entropy_coef: float = Field(
        0.001, ge=0, le=100, description="Weight of the mean token entropy bonus; at 100 nothing else counts."
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Weight of the mean KL divergence of fresh tokens to the model that the run starts from; 0: none, "
        "and no reference is kept.",
    )
    kl: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="Estimate of the divergence, with d = log reference - log policy: k1 -d; k2 d^2/2; k3 e^d - 1 - d.",
    )
    kl_corrected: bool = Field(
        True, description="Multiply each estimate by its token's importance ratio, for the gradients of k1 and k3."
    )
    train_on: Band = Field(
        "all",
        description="Learn only from groups with a success rate in [75,100) / (25,75] / (0,25] %; others are masked.",
    )

    @property
    def compared(self) -> bool:
        """Whether answers are compared with the model that the run starts from."""
        return self.kl_coef > 0 or self.anchor == "start"

    @model_validator(mode="after")
    def _in_units_of_rewards(self) -> Self:
        if self.baseline == "log_mean_exp" and self.scale_by_std:
            raise ValueError(
                "baseline log_mean_exp and scale_by_std exclude each other: beta1 and beta2 hold for rewards as they "
                "are: leave one out"
            )
        return self


class CorrectionConfig(Section):
    """Who computes the log-probs of fresh answers, and what corrects them where that is the engine."""

    behaviour: Literal["trainer", "engine"] = Field(
        "trainer",
        description="Whose log-probs are stored as the behaviour policy's; engine: with the correction below.",
    )
    correction: CorrectionName = Field(
        "tis",
        description="behaviour engine: what a fresh token weighs, by its ratio r = trainer / engine, or that of its "
        "answer (sequence_: the product; geometric_: the mean). _tis: r, truncated at the bounds; _mask: r within the "
        "bounds, else 0 (token_mask: IcePop); geometric_mask: 1 within the bounds, else 0.",
    )
    correction_bounds: Bounds | None = Field(
        None,
        description="Bounds of that ratio, low high; None: "
        + ", ".join(f"{low:g} {high:g} for {name}" for name, (low, high) in BOUNDS.items())
        + ".",
    )
    correction_veto: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="behaviour engine: nothing is learnt from a fresh answer with a token whose ratio is below this "
        "(1e-4 elsewhere); None: no veto.",
    )
    opsm: float | None = Field(
        None,
        ge=0,
        le=1000,
        description="behaviour engine: nothing is learnt from a fresh answer of negative advantage whose tokens the "
        "trainer finds less likely than the engine by more than so many nats on average (off-policy sequence masking "
        "of DeepSeek-V3.2); None: no mask.",
    )

    @model_validator(mode="after")
    def _correctable(self) -> Self:
        low, high = self.bounds
        if low > high or high == 0:
            raise ValueError(f"correction_bounds are low and high, the latter above 0, and not {low:g} and {high:g}")
        given = [name for name in CorrectionConfig.model_fields if getattr(self, name) != DEFAULTS[name]]
        if given and self.behaviour == "trainer":
            raise ValueError(
                f"{', '.join(given)}: without the engine's log-probs there is nothing to correct: set behaviour to "
                "engine, or leave it out"
            )
        return self

    @property
    def bounds(self) -> Bounds:
        """Of the correction's ratio."""
        return self.correction_bounds or BOUNDS[self.correction]


DEFAULTS = {name: field.default for name, field in CorrectionConfig.model_fields.items()}


def overlong_penalty(length: int, longest: int, options: ObjectiveConfig) -> float:
    """What the length of an answer takes from its reward (soft overlong punishment, DAPO, arXiv 2503.14476).

    It grows evenly from 0 to `overlong_penalty` over the last `overlong_tokens` tokens of the longest answer.
    """
    if options.overlong_tokens == 0:
        return 0.0
    over = length - (longest - options.overlong_tokens)
    return options.overlong_penalty * min(max(over / options.overlong_tokens, 0.0), 1.0)
