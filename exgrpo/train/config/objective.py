"""The options of the loss, and what follows from them for a reward."""

from typing import Annotated, Literal

from pydantic import Field

from exgrpo.train.common.functions import Functions
from exgrpo.train.common.limits import LONGEST
from exgrpo.train.config.replay import KINDS
from exgrpo.train.config.section import Section

Band = Literal["all", "easy", "medium", "hard"]
SURROGATES = Functions("exgrpo.train.policy.surrogate", "objective.surrogate")


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
    baseline: Literal["mean", "leave_one_out"] = Field(
        "mean",
        description="An answer's reward is compared with the mean of its group, or of the others in it (RLOO).",
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
    normalize: Literal["constant", "token", "sequence"] = Field(
        "constant",
        description="constant: sequences * max_tokens (Dr.GRPO); token: all tokens; sequence: mean of means.",
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


def overlong_penalty(length: int, longest: int, options: ObjectiveConfig) -> float:
    """What the length of an answer takes from its reward (soft overlong punishment, DAPO, arXiv 2503.14476).

    It grows evenly from 0 to `overlong_penalty` over the last `overlong_tokens` tokens of the longest answer.
    """
    if options.overlong_tokens == 0:
        return 0.0
    over = length - (longest - options.overlong_tokens)
    return options.overlong_penalty * min(max(over / options.overlong_tokens, 0.0), 1.0)
