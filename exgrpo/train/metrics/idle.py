"""Steps from which nothing can be learnt, because all answers to each question have the same reward."""

from collections.abc import Sequence

from exgrpo.train.records import Group

FIRST_SAID = 4


class IdleSteps:
    """Counts training steps in a row of which no mini-batch had an advantage, and says why."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def observe(self, idle: bool, groups: Sequence[Group]) -> str | None:
        """Take in a step; after 4, 8, 16, ... idle ones in a row, the sentence that tells a person of them."""
        self.in_a_row = self.in_a_row + 1 if idle else 0
        if self.in_a_row < FIRST_SAID or self.in_a_row & (self.in_a_row - 1):
            return None
        rewards = [{row.net_reward for row in group.rows} for group in groups]
        differing = sum(len(of_group) > 1 for of_group in rewards)
        if differing:
            why = (
                f"{differing} of {len(groups)} groups have rewards that differ, and objective.train_on leaves them out"
            )
        else:
            values = sorted({value for of_group in rewards for value in of_group})
            span = f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"
            why = (
                f"in each of the {len(groups)} groups all answers have the same reward ({span}): the questions are all "
                "too hard or all too easy, or the reward does not recognise the answers (see samples.jsonl)"
            )
        return f"the last {self.in_a_row} steps changed nothing, for no answer has an advantage: {why}"
