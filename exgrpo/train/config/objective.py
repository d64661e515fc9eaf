"""The options of the loss and of its corrections, and the view of options that the functions of a method read."""

from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from exgrpo.train.common.functions import Functions
from exgrpo.train.common.limits import LONGEST
from exgrpo.train.config.replay import KINDS, Baseline, ExperienceConfig
from exgrpo.train.config.section import Section

Band = Literal["all", "easy", "medium", "hard"]
SURROGATES = Functions(
    "exgrpo.train.policy.surrogate", "objective.surrogate", ("fused", "bounds_weights", "all_rows", "coupled")
)
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
"""Default bounds of a correction's ratio: those of verl's presets, and for sequence_mask those of TRL."""


class ObjectiveConfig(Section):
    """The loss (arXiv 2510.02245, section 3.3)."""

    surrogate: Annotated[str, SURROGATES.checked] = Field(
        "clipped", description=f"Surrogate loss of fresh tokens: {SURROGATES.choices}"
    )
    clip: tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=0, le=1000)]] | None = Field(
        (0.2, 0.2),
        description="eps_low eps_high for fresh tokens, whose ratios stay in [1 - eps_low, 1 + eps_high]; "
        "None: no clipping.",
    )
    clip_with_replay: bool = Field(False, description="Also clip in steps that replay (the paper does not).")
    dual_clip: float = Field(
        3.0, gt=1, le=1000, description="dual_clip: for negative advantages, ratio above which a token has no gradient."
    )
    weigh: Annotated[str, KINDS["weigh"].checked] = Field(
        "shaped", description=f"Loss of replayed tokens: {KINDS['weigh'].choices}"
    )
    beta: float = Field(
        0.1,
        ge=1e-6,
        le=1e6,
        description="shaped: f(w) = w/(w+beta) on replayed tokens. Below 1e-6 or above 1e6, f is 1 or 0.",
    )
    second_moment: float = Field(
        0.04, gt=0, le=1e6, description="second_moment: largest mean square of the log-ratios that are trained on."
    )
    trigger: float = Field(
        1e-4, gt=0, le=1, description="veto: for negative advantages, mask all tokens after the first ratio below this."
    )
    coefficient: float = Field(
        0.1, ge=0, le=1e6, description="likelihood, jensen_shannon: coefficient in place of the advantage."
    )
    baseline: Baseline = Field(
        "mean",
        description="Baseline of an answer's reward: mean of its group, or of the others in it (leave_one_out, RLOO); "
        "log_mean_exp: beta1 log mean exp(reward / beta1) over its group, the value of regressions.",
    )
    beta1: float = Field(
        1.0, gt=0, le=1e6, description="log_mean_exp: near 0 the highest reward of the group, at 1e6 the mean."
    )
    beta2: float = Field(
        1e-3,
        gt=0,
        le=1e6,
        description="oapl, coupled: implicit reward per nat of log-ratio; the optimal log-ratio is advantage / beta2.",
    )
    anchor: Literal["writer", "start"] = Field(
        "writer",
        description="oapl, coupled: denominator of log-ratios: the policy that wrote the answer (for fresh ones, that "
        "before the step's update), or the model that the run starts from, which is then kept as a reference.",
    )
    scale_by_std: bool = Field(False, description="Divide advantages by the group's standard deviation.")
    overlong_tokens: int = Field(
        0,
        ge=0,
        le=LONGEST,
        description="Length penalty, growing linearly to overlong_penalty over the last so many tokens before "
        "rollout.max_tokens (DAPO); it does not change which answers are successes. 0: none.",
    )
    overlong_penalty: float = Field(1.0, gt=0, le=1e6, description="overlong_tokens: penalty of the longest answers.")
    overlong_filter: bool = Field(
        False, description="Mask truncated answers in the loss (DAPO); their rewards count in their groups."
    )
    normalize: Literal["constant", "token", "sequence", "answer"] = Field(
        "constant",
        description="Normalisation of the loss. constant: by sequences * max_tokens (Dr.GRPO); token: mean over all "
        "tokens; sequence: mean of the answers' means; answer: mean of the answers' sums.",
    )
    entropy_coef: float = Field(
        0.001, ge=0, le=100, description="Weight of the mean token entropy bonus; at 100 it outweighs all else."
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Weight of the mean KL divergence of fresh tokens from the model that the run starts from; 0: "
        "none, and no reference is kept.",
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
        description="Train only on groups with a success rate in [75,100) / (25,75] / (0,25] %; others are masked.",
    )

    @property
    def compared(self) -> bool:
        """True if answers are compared with the model that the run starts from."""
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
    """Source of the log-probs of fresh answers, and the correction if that is the engine."""

    behaviour: Literal["trainer", "engine"] = Field(
        "trainer",
        description="Source of the log-probs stored as the behaviour policy's; engine: with the correction below.",
    )
    correction: CorrectionName = Field(
        "tis",
        description="behaviour engine: weight of a fresh token, from its ratio r = trainer / engine, or that of its "
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
        description="behaviour engine: mask fresh answers with a token whose ratio is below this (1e-4 in other "
        "projects); None: no veto.",
    )
    opsm: float | None = Field(
        None,
        ge=0,
        le=1000,
        description="behaviour engine: mask fresh answers of negative advantage whose log-prob by the trainer is lower "
        "than by the engine by more than so many nats per token (off-policy sequence masking of DeepSeek-V3.2); None: "
        "no mask.",
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
        """Bounds of the correction's ratio."""
        return self.correction_bounds or BOUNDS[self.correction]


@dataclass(frozen=True)
class MethodOptions:
    """Options that the functions of a method and the loss read.

    Attributes:
        experience: of replay.
        samples: K, answers per question.
        success: a reward of at least this is a success.
        objective: of the loss.
        temperature: of sampling; all log-probs of an update are at this temperature.
    """

    experience: ExperienceConfig = field(default_factory=ExperienceConfig)
    samples: int = 8
    success: float = 1.0
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    temperature: float = 1.0


DEFAULTS = {name: field.default for name, field in CorrectionConfig.model_fields.items()}


def overlong_penalty(length: int, longest: int, options: ObjectiveConfig) -> float:
    """Return the length penalty of an answer's reward (soft overlong punishment, DAPO, arXiv 2503.14476).

    It grows linearly from 0 to `overlong_penalty` over the last `overlong_tokens` tokens of the longest answer.
    """
    if options.overlong_tokens == 0:
        return 0.0
    over = length - (longest - options.overlong_tokens)
    return options.overlong_penalty * min(max(over / options.overlong_tokens, 0.0), 1.0)
