"""While training: steps in a row whose rewards fail, or whose updates are skipped, are told and end the run."""

from exgrpo.train.reward.outcome import Failure
from exgrpo.train.steps import StepResult

FAILING_STEPS = 3
SKIPPED_TOLD, SKIPPED_MOST = 3, 10


class Soundness:
    """Counts steps in a row that teach nothing.

    Args:
        max_failed: fraction of a step's answers whose grading may fail or take too long.
    """

    def __init__(self, max_failed: float) -> None:
        self.max_failed = max_failed
        self.failing = 0
        """Training steps in a row with more such answers."""
        self.skipped = 0
        """Optimiser steps in a row that were not taken."""

    def observe(self, result: StepResult) -> str | None:
        """Take in a training step; returns a sentence for a person, if there is one."""
        self.failing = self.failing + 1 if result.answers.failed_fraction > self.max_failed else 0
        told = False
        for applied in result.applied:
            self.skipped = 0 if applied else self.skipped + 1
            told |= self.skipped == SKIPPED_TOLD
        if not told:
            return None
        return (
            f"{SKIPPED_TOLD} optimiser steps in a row were skipped, because their gradient is not finite: they teach "
            f"nothing. After {SKIPPED_MOST} the run stops"
        )

    def problem(self, result: StepResult) -> str | None:
        """Why the run has to stop after the step that was observed, and the remedy; None: it has not."""
        if self.failing >= FAILING_STEPS:
            first = max(result.answers.failures, key=lambda one: one.count)
            return (
                f"in each of the last {self.failing} steps more than {self.max_failed:.0%} of the answers could not be "
                f"graded, {result.answers.failed_fraction:.0%} in the last one: reward {first.reward!r}: "
                f"{first.cause}. {remedy(first)}, or bear more by --reward.max_failed"
            )
        if self.skipped >= SKIPPED_MOST:
            return (
                f"the last {self.skipped} optimiser steps were skipped, because their gradient is not finite: the run "
                "learns nothing. Look for NaN in functions of your own, as objective.surrogate, or lower optimizer.lr"
            )
        return None


def remedy(failure: Failure) -> str:
    """What a person can do about a reward that fails."""
    if "reward.time_limit" in failure.cause:
        return "Make the function faster, or raise --reward.time_limit"
    return "Mend the function"
