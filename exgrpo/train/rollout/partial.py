"""Partial rollouts: a step trains as soon as enough groups are whole; the other answers go on in the next step.

More groups are under way than a step needs. All ranks know them and take turns in them; each rank ends once its share
of the groups that the step needs is whole, so that a run repeats. An answer goes on after its prompt and its tokens so
far, by the newer policy. Each token keeps the log-prob of the policy that wrote it, and the step of that.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from exgrpo.train.common.distributed import fail_together
from exgrpo.train.common.errors import RolloutError
from exgrpo.train.common.records import Rollout
from exgrpo.train.common.seeds import derive_seed
from exgrpo.train.common.step_batch import Ints, StepBatch
from exgrpo.train.config.rollout import RolloutConfig
from exgrpo.train.data.questions import Question
from exgrpo.train.replay import PlannedGroup
from exgrpo.train.replay.table import packed, unpacked
from exgrpo.train.rollout.answers import RolloutWorker
from exgrpo.train.rollout.engine import Sampling, generate, is_whole

PREFIX = "underway."
"""Beginning of the names of arrays in checkpoints."""
NONE = np.empty(0, np.int64)
EMPTY = Rollout(np.empty(0, np.int32), False, np.empty(0, np.float32))


@dataclass(eq=False)
class Underway:
    """A group whose answers are being written.

    Attributes:
        group: its question, K fresh answers, and how many stored ones will join.
        seed: of its answers.
        answers: [K] what is written of each; None: nothing.
        steps: [K] the step in which each token was written.
    """

    group: PlannedGroup
    seed: int
    answers: list[Rollout | None]
    steps: list[Ints]

    def missing(self, longest: int) -> int:
        """Return the number of answers that are not whole."""
        return sum(answer is None or not is_whole(answer, longest) for answer in self.answers)


class PartialRollouts:
    """The groups that are under way.

    Args:
        options: `oversample` and `max_staleness`.
        questions: returns a question by its index.
        sampling: of all answers, with log-probs.

    Attributes:
        underway: the groups, in the order in which they began.
    """

    def __init__(
        self, options: RolloutConfig, worker: RolloutWorker, questions: Callable[[int], Question], sampling: Sampling
    ) -> None:
        self.options, self.worker, self.questions, self.sampling = options, worker, questions, sampling
        self.underway: list[Underway] = []

    def advance(
        self,
        planned: Sequence[PlannedGroup],
        more: Callable[[int, Sequence[int]], Sequence[PlannedGroup]],
        step: int,
        seed: int,
    ) -> list[Underway]:
        """Generate until as many groups are whole as are planned, and take them out; a collective call.

        Groups that were whole before come first, then in the order in which they began. Of a planned group's stored
        answers, those that it names by row do not join: they may have left when it is whole.

        Args:
            planned: groups of the step with fresh answers.
            more: plans at most so many further groups, to other questions than the given ones.
            seed: of the step's answers.

        Raises:
            RolloutError: on every rank, if the engine of one failed.
        """
        needed, longest = len(planned), self.sampling.max_tokens
        self._forget(step - self.options.max_staleness, seed)
        further = math.ceil(self.options.oversample * needed) - needed - len(self.underway)
        asked = [group.question for group in (*planned, *(one.group for one in self.underway))]
        for group in [*planned, *(more(further, asked) if further > 0 else [])]:
            empty: list[Rollout | None] = [None] * group.fresh
            of_group = derive_seed(seed, "question", group.question)
            self.underway.append(Underway(replace(group, rows=()), of_group, empty, [NONE] * group.fresh))
        waited = {id(one) for one in self.underway if not one.missing(longest)}
        written, problem = self._write(needed)
        fail_together(self.worker.world, problem)
        for number, sample, answer in (one for of_rank in self.worker.world.gather(written) for one in of_rank):
            begun, steps = self.underway[number], self.underway[number].steps[sample]
            begun.answers[sample] = answer
            begun.steps[sample] = np.append(steps, np.full(len(answer.response) - len(steps), step))
        whole = [one for one in self.underway if not one.missing(longest)]
        whole = sorted(whole, key=lambda one: id(one) not in waited)[:needed]
        self.underway = [one for one in self.underway if one not in whole]
        return whole

    def _forget(self, before: int, seed: int) -> None:
        """Let answers that began before a step begin anew, with numbers that they were not drawn with."""
        for one in self.underway:
            for sample, steps in enumerate(one.steps):
                if len(steps) and steps[0] < before:
                    one.answers[sample], one.steps[sample] = None, NONE
                    one.seed = derive_seed(seed, "anew", one.group.question)

    def _write(self, needed: int) -> tuple[list[tuple[int, int, Rollout]], RolloutError | None]:
        """Return longer answers of this rank's share, each with the numbers of its group and sample; or the error."""
        world, engine, longest = self.worker.world, self.worker.engine, self.sampling.max_tokens
        share = world.split(self.underway, engine.ranks)
        wanted = len(world.split(range(needed), engine.ranks))
        missing = [one.missing(longest) for _, one in share]
        requests = [
            replace(
                self.worker.request(self.questions(one.group.question), len(one.answers), self.sampling, one.seed),
                begun=tuple(one.answers) if any(one.answers) else (),
            )
            for _, one in share
        ]
        written: list[tuple[int, int, Rollout]] = []
        generated = generate(engine, requests, enough=lambda: missing.count(0) >= wanted)
        try:
            for answer in self.worker.awake(generated):
                number, one = share[answer.request]
                if len(answer.rollout.response) > len(one.steps[answer.sample]):
                    written.append((number, answer.sample, answer.rollout))
                    missing[answer.request] -= is_whole(answer.rollout, longest)
        except RolloutError as error:
            return [], error
        return (written if world.rank % engine.ranks == 0 else []), None

    def metrics(self, batch: StepBatch) -> dict[str, float]:
        """Return how old the fresh tokens of a step are, and how many groups wait."""
        fresh = batch.take(batch.fresh)
        earlier, tokens = fresh.staleness > 0, max(1, len(fresh.staleness))
        return {
            "staleness": float(fresh.staleness.sum() / tokens),
            "earlier_tokens": float(earlier.sum() / tokens),
            "continued_answers": int((fresh.sums(earlier) > 0).sum()),
            "groups_underway": len(self.underway),
        }

    def state(self) -> tuple[list[list[int]], dict[str, npt.NDArray]]:
        """Return the groups as plain numbers, and the tokens of their answers as arrays."""
        numbers = [[one.group.question, one.group.fresh, one.group.choose, one.seed] for one in self.underway]
        answers = [answer or EMPTY for one in self.underway for answer in one.answers]
        batch = StepBatch.from_rollouts([0] * len(answers), [1] * len(answers), answers)
        batch.fill(old_log_prob=batch.engine_log_prob)
        steps = np.concatenate([NONE, *(steps for one in self.underway for steps in one.steps)])
        arrays = {**packed(batch), "entropy": batch.engine_entropy, "step": steps}
        return numbers, {f"{PREFIX}{name}": values for name, values in arrays.items()}

    def restore(self, numbers: Sequence[Sequence[int]], arrays: Mapping[str, npt.NDArray]) -> None:
        """Continue from `state`, whose arrays may be among others."""
        found = {name.removeprefix(PREFIX): one for name, one in arrays.items() if name.startswith(PREFIX)}
        batch, entropy = unpacked(found), found["entropy"]
        has_entropy, cut = not np.isnan(entropy).all(), self.sampling.allowed_tokens
        rows = iter(range(len(batch)))
        self.underway = []
        for question, fresh, choose, seed in numbers:
            places = [(row, batch.at(row)) for row in (next(rows) for _ in range(fresh))]
            answers = [
                Rollout(
                    batch.token[at],
                    bool(batch.finished[row]),
                    batch.old_log_prob[at],
                    entropy[at] if has_entropy else None,
                    allowed_tokens=batch.allowed_tokens[at] if cut else None,
                )
                if at.start < at.stop
                else None
                for row, at in places
            ]
            steps = [found["step"][at] for _, at in places]
            self.underway.append(Underway(PlannedGroup(question, fresh, choose), seed, answers, steps))
