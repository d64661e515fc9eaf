"""Statistics over seeds: interquartile means, bootstrap intervals, and savings of an arm.

Tasks are strata: intervals come from resampling the seeds of each task, as in Agarwal et al., "Deep Reinforcement
Learning at the Edge of the Statistical Precipice" (arXiv 2108.13264). With few seeds such an interval is somewhat too
narrow: with five, by a factor of about 0.8 for a mean of normal values.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from studies.results import Result

FloatArray = npt.NDArray[np.float64]
LEVEL = 0.95
FEWEST_SEEDS = 5
"""Minimum for an interval: with fewer it is far too narrow. With two seeds, every second one misses the truth."""
RESAMPLES = 2000
TOKENS = ("generated_tokens", "gradient_tokens")
"""Token counts that determine a run's time."""
SEED = 0


@dataclass(frozen=True)
class Interval:
    """A value and the ends of its interval at `LEVEL`, which are NaN for fewer than `FEWEST_SEEDS` seeds."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return self.text(".3f")

    def text(self, form: str) -> str:
        """Format the value and its interval, if any; "never" if infinite."""
        value, low, high = ("never" if math.isinf(x) else f"{x:{form}}" for x in (self.value, self.low, self.high))
        return value if math.isnan(self.low) else f"{value} ({low} to {high})"

    def excludes(self, value: float) -> bool:
        """True if a value lies outside the interval; False if there is none."""
        return value < self.low or value > self.high


def height(result: Result | None) -> float | None:
    """Return the score for searches: the mean of Pass@1 and Pass@k over the evaluations in the second half of a run.

    By Pass@1 alone, a search would choose learning rates at which a policy loses its variety.
    """
    if result is None:
        return None
    late = result.curves["step"] >= result.curves["step"][-1] / 2
    return float(np.mean([result.curves[name][late] for name in ("pass_at_1", "pass_at_k")]))


def area(result: Result, name: str) -> float:
    """Return the area under a curve against the steps, divided by its width; for one point, its height."""
    x, y = result.curves["step"], result.curves[name]
    return float(np.trapezoid(y, x) / (x[-1] - x[0])) if len(x) > 1 and x[-1] > x[0] else float(y[-1])


def final(result: Result, name: str) -> float:
    """Return a curve's last value."""
    return float(result.curves[name][-1])


def best(result: Result, name: str) -> float:
    """Return a curve's highest value."""
    return float(np.nanmax(result.curves[name]))


def interquartile_mean(*strata: FloatArray, axis: int = -1) -> FloatArray:
    """Return the mean of the middle half of the values [..., seeds] of all tasks together."""
    return stats.trim_mean(np.concatenate(strata, axis=axis), 0.25, axis=axis)


def interval_of(strata: Sequence[FloatArray]) -> Interval:
    """Return the interquartile mean over tasks and seeds, from a value per seed of each task."""
    return _bootstrap(strata, interquartile_mean)


def difference(strata: Sequence[FloatArray], others: Sequence[FloatArray]) -> Interval:
    """Return the mean over tasks of the difference of two arms' means over seeds."""
    count = len(strata)

    def statistic(*samples: FloatArray, axis: int = -1) -> FloatArray:
        ours, theirs = (np.stack([of.mean(axis=axis) for of in part]) for part in (samples[:count], samples[count:]))
        return (ours - theirs).mean(axis=0)

    return _bootstrap([*strata, *others], statistic)


def welch(strata: Sequence[FloatArray], others: Sequence[FloatArray], level: float) -> Interval:
    """Return the same difference with Welch's interval for normal values, which is not too narrow with few seeds."""
    gap = float(np.mean([ours.mean() - theirs.mean() for ours, theirs in zip(strata, others, strict=True)]))
    samples = [*strata, *others]
    if min(map(len, samples)) < FEWEST_SEEDS:
        return Interval(gap, math.nan, math.nan)
    parts = np.array([of.var(ddof=1) / len(of) for of in samples]) / len(strata) ** 2
    if parts.sum() == 0:
        return Interval(gap, gap, gap)
    freedom = parts.sum() ** 2 / sum(part**2 / (len(of) - 1) for part, of in zip(parts, samples, strict=True))
    reach = float(stats.t.ppf((1 + level) / 2, freedom) * math.sqrt(parts.sum()))
    return Interval(gap, gap - reach, gap + reach)


def improvement(strata: Sequence[FloatArray], others: Sequence[FloatArray]) -> Interval:
    """Return the probability that a run of an arm beats another arm's: mean over tasks, ties count half."""
    count = len(strata)

    def statistic(*samples: FloatArray, axis: int = -1) -> FloatArray:
        chances = []
        for ours, theirs in zip(samples[:count], samples[count:], strict=True):
            gap = np.moveaxis(ours, axis, -1)[..., :, None] - np.moveaxis(theirs, axis, -1)[..., None, :]
            chances.append(((gap > 0) + 0.5 * (gap == 0)).mean(axis=(-2, -1)))
        return np.mean(chances, axis=0)

    return _bootstrap([*strata, *others], statistic)


def cost_ratio(ours: Sequence[Result], theirs: Sequence[Result], cost: str = "generated_tokens") -> Interval:
    """Return an arm's cost to reach another's final mean Pass@1, relative to the other's total cost, or infinity."""
    return _at_their_end(ours, theirs, (cost,), lambda mine, other: mine[0] / other[0])


def break_even(ours: Sequence[Result], theirs: Sequence[Result]) -> Interval:
    """Return the cost ratio of a generated to a trained token from which an arm saves time.

    A run that generates G tokens and trains on T takes g G + t T seconds, in addition to a cost per step. Until its
    mean Pass@1 reaches the other's final one, the arm generates less and trains on more: it takes less time if g / t >
    (T - T') / (G' - G). 0: always; infinite: never, since it does not generate less, or does not get there.
    """

    def ratio(mine: FloatArray, other: FloatArray) -> float:
        saved, added = other[0] - mine[0], mine[1] - other[1]
        return max(0.0, float(added / saved)) if saved > 0 else math.inf

    return _at_their_end(ours, theirs, TOKENS, ratio)


def prices(runs: Sequence[Result]) -> FloatArray:
    """Seconds of a generated token, of a token trained on and of a step, by non-negative least squares over runs.

    Errors are relative, so that long runs do not count for more.
    """
    spent = np.array([[run.curves[cost][-1] for cost in (*TOKENS, "step", "seconds")] for run in runs])
    return optimize.nnls(spent[:, :-1] / spent[:, -1:], np.ones(len(runs)))[0]


def _at_their_end(
    ours: Sequence[Result],
    theirs: Sequence[Result],
    costs: Sequence[str],
    compare: Callable[[FloatArray, FloatArray], float],
) -> Interval:
    """Compare our costs until the mean Pass@1 reaches the others' final one with their total costs.

    Curves are means over seeds, made monotonic by their highest value so far, with linear interpolation. An unreached
    target costs infinity.
    """
    keys = (*costs, "pass_at_1")
    mine, others = (_aligned(runs, keys) for runs in (ours, theirs))

    def statistic(i: npt.NDArray[np.intp], j: npt.NDArray[np.intp]) -> float:
        (*spent, reached), (*spent_by_other, reached_by_other) = mine[i].mean(axis=0), others[j].mean(axis=0)
        rising = np.maximum.accumulate(reached)
        until = np.array([_first(cost, rising, reached_by_other[-1]) for cost in spent])
        return compare(until, np.array(spent_by_other)[:, -1])

    value = statistic(np.arange(len(mine)), np.arange(len(others)))
    if min(len(mine), len(others)) < FEWEST_SEEDS:
        return Interval(value, math.nan, math.nan)
    rng = np.random.default_rng(SEED)
    drawn = [
        statistic(rng.integers(len(mine), size=len(mine)), rng.integers(len(others), size=len(others)))
        for _ in range(RESAMPLES)
    ]
    # Interpolating between a finite and an infinite value gives NaN: take the higher one.
    low, high = np.quantile(drawn, ((1 - LEVEL) / 2, (1 + LEVEL) / 2), method="higher")
    return Interval(value, float(low), float(high))


def _aligned(runs: Sequence[Result], keys: Sequence[str]) -> FloatArray:
    """Return [runs, keys, evaluations] curves of an arm; an early-ended run stays at its last values."""
    steps = max((run.curves["step"] for run in runs), key=lambda of_run: float(of_run[-1]))
    return np.array([[np.interp(steps, run.curves["step"], run.curves[key]) for key in keys] for run in runs])


def _first(x: FloatArray, y: FloatArray, target: float) -> float:
    """Return where a rising line first reaches a height."""
    if y[-1] < target:
        return math.inf
    place = int(np.argmax(y >= target))
    if place == 0:
        return float(x[0])
    share = (target - y[place - 1]) / (y[place] - y[place - 1])
    return float(x[place - 1] + share * (x[place] - x[place - 1]))


def _bootstrap(samples: Sequence[FloatArray], statistic: Callable[..., FloatArray]) -> Interval:
    value = float(statistic(*samples))
    if min(len(of) for of in samples) < FEWEST_SEEDS:
        return Interval(value, math.nan, math.nan)
    drawn = stats.bootstrap(
        tuple(samples),
        statistic,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(SEED),
    )
    return Interval(value, float(drawn.confidence_interval.low), float(drawn.confidence_interval.high))
