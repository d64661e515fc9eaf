"""Options of the experience."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from exgrpo.train.common.functions import Functions
from exgrpo.train.common.limits import MOST_ANSWERS, MOST_ROWS, MOST_SAMPLES, MOST_STEPS
from exgrpo.train.config.section import Folder, Section

TrajectoryRule = Literal["lowest_entropy", "highest_entropy", "lowest_nll", "shortest", "random"]
Prefix = Literal["none", "success", "steered"]
BucketBy = Literal["success_count", "reward_deviation"]
Baseline = Literal["mean", "leave_one_out", "log_mean_exp"]
MethodKind = Literal["admit", "prioritise", "compose", "weigh", "expire"]
PACKAGE = "exgrpo.train.replay"
KINDS: dict[MethodKind, Functions] = {
    "admit": Functions(f"{PACKAGE}.admit", "experience.admit", ("distinct", "scores")),
    "prioritise": Functions(f"{PACKAGE}.prioritise", "experience.prioritise", ("drift",)),
    "compose": Functions(
        f"{PACKAGE}.compose", "experience.compose", ("settle", "alone", "fills", "in_place", "keeps_groups")
    ),
    "weigh": Functions(f"{PACKAGE}.weigh", "objective.weigh", ("term", "present")),
    "expire": Functions(f"{PACKAGE}.expire", "experience.expire", ("drift",)),
}
"""Functions of a replay method by kind; `exgrpo.train.replay.rules` finds and checks them."""
LIMITS = {"age": "max_age", "uses": "max_uses", "capacity": "capacity"}
"""Functions of `expire` that need a limit, with its option."""


class ExperienceConfig(Section):
    """Storage and replay of answers (algorithm of arXiv 2510.02245, sections 3.2 and 3.3; others in recipes/replay)."""

    ratio: float = Field(
        0.5, ge=0, le=1, description="rho: replayed share of a batch (see compose); 0: on-policy GRPO."
    )
    repeat: float = Field(
        0,
        ge=0,
        le=1,
        description="Share of a step's fresh questions that are asked again, by prioritise, with band and cooldown.",
    )
    prefix: Prefix = Field(
        "none",
        description="Tokens that all answers to a repeated question begin with, without a gradient. success: a random "
        "share of a stored success; steered: of a success after failures, of a failure after successes, in the share "
        "that brings the pass rate towards 1/2. Such groups count in no pass rate, and are not stored.",
    )
    start_pass_rate: float = Field(
        0.35,
        ge=0,
        le=1,
        description="Replay starts after a step whose batch Pass@1 exceeds this; 0: at once.",
    )
    admit: Annotated[str, KINDS["admit"].checked] = Field(
        "successes", description=f"Answers to store: {KINDS['admit'].choices}"
    )
    prioritise: Annotated[str, KINDS["prioritise"].checked] = Field(
        "gaussian", description=f"Sampling weights of replayed questions or answers: {KINDS['prioritise'].choices}"
    )
    compose: Annotated[str, KINDS["compose"].checked] = Field(
        "mixed", description=f"Composition of a batch from fresh and replayed answers: {KINDS['compose'].choices}"
    )
    expire: tuple[Annotated[str, KINDS["expire"].checked], ...] = Field(
        ("retirement",),
        description=f"Removal of stored answers; any of {KINDS['expire'].choices} retirement: questions that all fresh "
        "answers of a step solve, at least two, leave for good. age, uses and capacity follow from their limits below.",
    )
    mu: float = Field(0.5, ge=0, le=1, description="gaussian: mean, as a fraction of K.")
    sigma: float = Field(
        1.0,
        ge=0.001,
        le=1e6,
        description="gaussian: standard deviation in counts: at 0.001 only the likeliest count, at 1e6 uniform.",
    )
    age_scale: float = Field(50.0, gt=0, le=MOST_STEPS, description="freshness: steps until a weight falls to 1/e.")
    drift: float = Field(1e-3, ge=0, le=1e3, description="headroom: largest mean square change of log-probs.")
    trajectory: TrajectoryRule = Field(
        "lowest_entropy", description="Selection of the replayed answer of a drawn question."
    )
    replayed: int = Field(
        1, ge=1, le=MOST_SAMPLES - 1, description="mixed, appended: replayed answers in a group, if so many are stored."
    )
    advantage: Literal["group", "stored"] = Field(
        "group",
        description="Advantage of a replayed answer: in the group that it joins, or stored: in its original one.",
    )
    count_replayed: bool = Field(
        False, description="Count replayed answers as successes when a mixed group's accuracy is estimated."
    )
    bucket_by: BucketBy = Field(
        "success_count",
        description="reward_deviation, for continuous rewards: the spread of a group's rewards replaces its success "
        "count, an answer above its group's mean is a success to store, the mean reward starts replay, and a question "
        "is solved if every answer that counts is a success.",
    )
    band: tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=0, le=1)]] = Field(
        (0.25, 0.75),
        description="repeat: range of pass rates of questions to ask again; admit in_band: of groups to store; expire "
        "above_band: no answers to questions above it stay.",
    )
    cooldown: int = Field(10, ge=1, le=MOST_STEPS, description="repeat: steps until a question may be asked again.")
    lag: int = Field(64, ge=1, le=MOST_STEPS, description="stale: steps between a group's generation and its update.")
    hard: float = Field(0.125, ge=0, le=1, description="bapo: largest pass rate of a hard prompt.")
    max_per_question: int | None = Field(
        None, ge=1, le=MOST_ANSWERS, description="Keep only the latest so many answers per question."
    )
    max_age: int | None = Field(None, ge=1, le=MOST_STEPS, description="Never replay answers older than so many steps.")
    max_uses: int | None = Field(
        None, ge=1, le=MOST_STEPS, description="Replay an answer, or repeat a prompt, at most so often."
    )
    capacity: int | None = Field(None, ge=1, le=MOST_ROWS, description="Keep only the latest so many answers in total.")

    folder: Folder | None = Field(
        None,
        description="Folder on a local disk for the tokens of stored answers, which then need no RAM. Each rank has "
        "files of its own there, which are deleted when it ends.",
    )
    start: Path | None = Field(
        None,
        description="Exported experience, or file of traces (parquet, JSONL, JSON), with which to fill the buffer "
        "before the first step.",
    )
    start_log_prob: Literal["recompute", "keep", "unknown"] = Field(
        "recompute",
        description="start: source of old log-probs. recompute: this run's policy, except if the file has those of a "
        "policy that began as this run's policy.path; keep: the file's, where it has them; unknown: 0, as if the "
        "writer had been certain.",
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.prefix != "none" and self.repeat == 0:
            raise ValueError(
                f"experience.prefix={self.prefix} begins answers to repeated questions: set experience.repeat to their "
                "share, or leave it out"
            )
        if self.start is not None and not self.stores:
            raise ValueError("experience.start fills a buffer that experience.ratio=0 never replays: leave one out")
        for name, limit in LIMITS.items():
            if name in self.expire and getattr(self, limit) is None:
                raise ValueError(f"experience.expire {name} needs its limit, experience.{limit}")
        if self.band[0] > self.band[1]:
            raise ValueError(f"experience.band is from low to high, and {self.band[0]} is above {self.band[1]}")
        return self

    @property
    def stores(self) -> bool:
        """True if answers are stored: plain GRPO stores nothing and retires nothing."""
        return self.ratio > 0 or self.prefix != "none"

    @property
    def forgets(self) -> tuple[str, ...]:
        """Functions of `expire`, including those implied by a limit."""
        implied = [name for name, limit in LIMITS.items() if getattr(self, limit) is not None]
        return (*self.expire, *(name for name in implied if name not in self.expire))
