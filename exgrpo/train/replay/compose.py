"""Composition of a batch: functions `(planner) -> planned groups`; see `exgrpo.train.replay.planner`.

Some have a second one, `settle(batch, planner)`, which selects what is trained on from the graded batch: numbers of its
groups, and planned groups of stored answers.
"""

import dataclasses

import numpy as np

from exgrpo.train.common.functions import needs
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.replay.contract import PlannedGroup
from exgrpo.train.replay.planner import BatchPlanner, draw_groups, groups_at, with_stored


@needs(in_place=True, keeps_groups=True)
def mixed(planner: BatchPlanner) -> list[PlannedGroup]:
    """n = min(floor(rho B), |E|) groups of K - R fresh and R replayed answers, and B - n of K fresh ones.

    R is the option `replayed`, or less where a question has fewer stored answers; at least one answer is fresh. A
    question is in the batch once at most. Where too few are left unretired, the batch is smaller. ExGRPO, arXiv
    2510.02245.
    """
    drawn = planner.draw("buffered", planner.share(planner.batch))
    most = min(planner.options.experience.replayed, planner.samples - 1)
    replayed = [min(most, held) for held in planner.memory.table.held[drawn].tolist()]
    groups = [
        PlannedGroup(question, planner.samples - several, several)
        for question, several in zip(drawn.tolist(), replayed, strict=True)
    ]
    return [*planner.fresh(planner.batch - len(drawn), without=drawn), *groups]


@needs(in_place=True, keeps_groups=True)
def traced(planner: BatchPlanner) -> list[PlannedGroup]:
    """B groups of K answers, of which the first floor(rho B) have R stored ones, as far as there are.

    The choice of questions does not depend on stored answers, as it does in `mixed`. At least one answer is fresh.
    LUFFY, arXiv 2504.14945.
    """
    most = min(planner.options.experience.replayed, planner.samples - 1)
    groups = with_stored(planner, planner.fresh(planner.batch), most)
    return [dataclasses.replace(group, fresh=group.fresh - group.choose) for group in groups]


def appended(planner: BatchPlanner) -> list[PlannedGroup]:
    """B groups of K fresh answers; the first floor(rho B) have R stored ones more, as far as there are.

    RLEP, arXiv 2507.07451; RePO, arXiv 2506.09340.
    """
    return with_stored(planner, planner.fresh(planner.batch), planner.options.experience.replayed)


def _settle_in_place(batch: StepBatch, planner: BatchPlanner) -> list[int | PlannedGroup]:
    """Replace at most floor(rho B) groups whose rewards are all alike by stored groups of earlier steps."""
    alive, dead = np.flatnonzero(batch.has_signal).tolist(), np.flatnonzero(~batch.has_signal).tolist()
    stored = draw_groups(planner, min(len(dead), planner.share(planner.batch)))
    return [*alive, *dead[len(stored) :], *stored]


@needs(settle=_settle_in_place, fills=True)
def in_place(planner: BatchPlanner) -> list[PlannedGroup]:
    """B groups of K fresh answers, and stored groups in place of those without a gradient (POPO, arXiv 2606.01281)."""
    return planner.fresh(planner.batch)


def _settle_beside(batch: StepBatch, planner: BatchPlanner) -> list[int | PlannedGroup]:
    """Select the groups whose rewards differ, F answers, and floor(rho F) stored answers of earlier steps.

    Each stored answer is a group by itself, and so has no advantage in it: `advantage` has to be stored. If all groups
    are alike, they stay.
    """
    with_signal = np.flatnonzero(batch.has_signal).tolist() or list(range(batch.groups))
    candidates, rows = planner.earlier()
    fresh = int(np.count_nonzero(batch.fresh[batch.rows_of(with_signal)]))
    drawn = planner.draw_from(candidates, planner.share(fresh), rows)
    return [*with_signal, *planner.alone(drawn)]


@needs(settle=_settle_beside, alone=True)
def beside(planner: BatchPlanner) -> list[PlannedGroup]:
    """B groups of K fresh answers, and single stored answers beside them.

    Rollout-level replay, arXiv 2606.04560; FreshPER, arXiv 2604.16918.
    """
    return planner.fresh(planner.batch)


def _settle_buffer(batch: StepBatch, planner: BatchPlanner) -> list[int | PlannedGroup]:
    """Draw B K stored answers, as far as there are; fresh answers are trained on only if they are drawn."""
    if not planner.ratio:  # replay has not begun, and nothing is stored
        return list(range(batch.groups))
    return [*planner.alone(planner.draw("stored", planner.batch * planner.samples))]


@needs(settle=_settle_buffer, alone=True, fills=True)
def buffer(planner: BatchPlanner) -> list[PlannedGroup]:
    """B - floor(rho B) groups of K fresh answers, which enter the buffer; the whole batch is drawn from that.

    Arnal et al., arXiv 2604.08706.
    """
    # So on average an answer is trained on 1 / (1 - rho) times.
    return planner.fresh(max(1, planner.batch - planner.share(planner.batch)))


def _settle_stale(batch: StepBatch, planner: BatchPlanner) -> list[int | PlannedGroup]:
    """Select the groups that were written `lag` steps ago, if there are any."""
    if not planner.ratio:  # replay has not begun, and nothing is stored
        return list(range(batch.groups))
    step = planner.memory.table.column("step")
    return [*groups_at(planner.memory.table, np.flatnonzero(step == planner.step - planner.options.experience.lag))]


@needs(settle=_settle_stale, fills=True)
def stale(planner: BatchPlanner) -> list[PlannedGroup]:
    """B groups of K fresh answers, which wait before they are trained on.

    The delay line with which M2PO, arXiv 2510.01161, studies stale data.
    """
    return planner.fresh(planner.batch)


def _settle_bapo(batch: StepBatch, planner: BatchPlanner) -> list[int | PlannedGroup]:
    """Select the first B of: fresh groups that count, hard prompts that improved, and stored groups.

    A fresh group counts with a pass rate in [1/K, (K-1)/K]. Stored groups are those that `admit` has kept, to other
    questions. If no fresh group counts, all of them stay.
    """
    now, before = (counts[batch.question] for counts in (planner.memory.shown, planner.memory.earlier))
    first = np.arange(batch.groups) < planner.batch
    fresh, with_signal = np.flatnonzero(first), np.flatnonzero(first & (now >= 1) & (now <= planner.samples - 1))
    improved = np.flatnonzero(~first & (now > before))
    kept = np.concatenate([with_signal if len(with_signal) else fresh, improved])[: planner.batch]
    return [*kept.tolist(), *draw_groups(planner, planner.batch - len(kept), batch.question[kept])]


@needs(settle=_settle_bapo, fills=True)
def bapo(planner: BatchPlanner) -> list[PlannedGroup]:
    """B groups of K fresh answers; in every second step floor(rho B) hard prompts are answered again beside them.

    A prompt is hard if its latest pass rate is at most `hard`. Fresh groups without a success or a failure give way to
    hard prompts and stored groups. BAPO, arXiv 2602.20722.
    """
    fresh = planner.fresh(planner.batch)
    if planner.step % 2:
        return fresh
    candidates = planner.candidates("prompts")
    limit = planner.options.experience.hard * planner.samples
    places = np.flatnonzero(
        (candidates.count <= limit) & ~np.isin(candidates.question, [group.question for group in fresh])
    )
    names = candidates.question[places]
    drawn = planner.draw_from(candidates.take(places), planner.share(planner.batch), names)
    return [*fresh, *(PlannedGroup(question, planner.samples) for question in drawn.tolist())]


def _settle_rehearsal(batch: StepBatch, planner: BatchPlanner) -> list[int | PlannedGroup]:
    """Select the fresh groups, and all stored answers, also of this step, to at most floor(rho B) questions."""
    table = planner.memory.table
    drawn = planner.draw("buffered", planner.share(planner.batch)).tolist()
    stored = (PlannedGroup(question, 0, rows=tuple(table.rows_of_question(question))) for question in drawn)
    return [*range(batch.groups), *stored]


@needs(settle=_settle_rehearsal)
def rehearsal(planner: BatchPlanner) -> list[PlannedGroup]:
    """B groups of K fresh answers, and all stored answers to some questions (Re:Max and Re:Dr, package remax-rl)."""
    return planner.fresh(planner.batch)
