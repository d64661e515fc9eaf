"""What a run in TRL needs besides :mod:`exgrpo.train.replay`: plans of generations, and the state in a checkpoint.

It needs no TRL.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from exgrpo.integrations.trl_batch import places
from exgrpo.train.checkpoint.store import ExperienceStore, read_checked, write_checked
from exgrpo.train.common.step_batch import Ints, StepBatch
from exgrpo.train.replay import PlannedGroup, Replay, ReplayState

STATE = "state.json"


class Plan(NamedTuple):
    """The questions of a generation.

    Attributes:
        groups: one for each, in the order of their rows; those that stored answers join come last.
        fillers: questions that are asked only to fill up.
    """

    groups: list[PlannedGroup]
    fillers: frozenset[int]


def plan_generation(replay: Replay, batch: int, step: int, multiple: int = 1) -> Plan:
    """The groups of the next generation, a multiple of `multiple`.

    Where too few questions are unsolved for `batch` groups, retired ones fill up: they teach little, and the batch
    keeps its shape. What a method settles after grading has its shape from `settle`, and is not filled so.

    Args:
        replay: decides.
        batch: B, questions of a generation.
        step: number of the generation.
        multiple: what the number of groups has to be a multiple of, for every process to have as many rows; B is one.
    """
    planned = replay.plan(batch, step)
    asked = [group.question for group in planned]
    left = ~replay.memory.retired
    left[asked] = False
    fillers: list[int] = []
    if len(planned) < batch and not left.any() and not replay.settles:
        fillers = _retired(replay, batch - len(planned))
    if missing := -(len(planned) + len(fillers)) % multiple:
        fillers += [group.question for group in replay.more(missing, step, [*asked, *fillers])]
        missing = -(len(planned) + len(fillers)) % multiple
        retired = int(np.count_nonzero(replay.memory.retired))
        if missing <= retired:
            fillers += _retired(replay, missing)
        else:  # of more than B groups, some are not asked
            planned = planned[: (len(planned) + len(fillers)) // multiple * multiple - len(fillers)]
    groups = [*planned, *(PlannedGroup(question, replay.memory.samples) for question in fillers)]
    # The order does not matter to what is settled before an answer joins.
    return Plan(sorted(groups, key=lambda group: group.choose > 0), frozenset(fillers))


def _retired(replay: Replay, wanted: int) -> list[int]:
    """Questions that have left for good."""
    if not wanted:
        return []
    return replay.rng.choice(np.flatnonzero(replay.memory.retired), wanted, replace=False).tolist()


def placed(groups: Sequence[PlannedGroup], stored: StepBatch, samples: int) -> Ints:
    """[S] the places of stored answers, which are the last of the K of their group; see `trl_batch.places`.

    Raises:
        ValueError: a group has no fresh answer, more than K, or too few answers for its places.
    """
    fresh = np.array([group.fresh for group in groups], np.int64)
    joined = np.bincount(stored.group, minlength=len(groups))
    wrong = (fresh < 1) | (fresh > samples) | (fresh + joined < samples)
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(
            f"compose: question {groups[i].question} has {fresh[i]} fresh and {joined[i]} stored answers; in TRL a "
            f"group is planned with 1 to {samples} fresh ones, and with stored ones in all places that are left of "
            f"{samples}; groups of stored answers alone come from its function settle"
        )
    return places(stored, len(groups), samples, fresh[stored.group])


def save_replay(folder: Path, replay: Replay, generation: int) -> None:
    """Write the state of a replay, and the number of generations so far, to a folder, which is made."""
    state = replay.state()
    index = ExperienceStore(folder).save(state.trajectories)
    saved = {
        "arrays": write_checked(folder, {**index, **state.arrays}),
        "open": state.values["replay_open"],
        "generation": generation,
        "rewards_seen": state.values["rewards_seen"],
        "pool_position": state.values["pool_position"],
        **state.values["generators"],
    }
    (folder / STATE).write_text(json.dumps(saved), encoding="utf-8")


def load_replay(folder: Path, replay: Replay) -> int:
    """Let a replay go on from a saved state.

    Returns:
        the number of generations that are in it.

    Raises:
        ValueError: there is none, it belongs to another number of questions, or a file is damaged.
    """
    if not (folder / STATE).is_file():
        raise ValueError(
            f"{folder} holds no experience: that checkpoint is not from ExGRPOTrainer; to start from its weights, "
            "give it as the model and do not resume"
        )
    saved = json.loads((folder / STATE).read_text(encoding="utf-8"))
    arrays = read_checked(folder, saved["arrays"])
    questions = len(replay.memory.count)
    if len(arrays["count"]) != questions:
        raise ValueError(
            f"{folder} is the experience of {len(arrays['count'])} questions and train_dataset has {questions}: "
            "resume with the data set of the run"
        )
    if lacking := set(replay.memory.arrays()) - set(arrays):
        raise ValueError(
            f"{folder} is of an earlier version, which did not keep {', '.join(sorted(lacking))}: to start from the "
            "weights of that checkpoint, give it as the model and do not resume"
        )
    values = {
        "replay_open": saved["open"],
        "rewards_seen": saved["rewards_seen"],
        "pool_position": saved["pool_position"],
        "generators": {"pool": saved["pool"], "replay": saved["replay"]},
    }
    trajectories = ExperienceStore(folder).load(arrays)
    replay.restore(ReplayState(values, arrays, trajectories))
    return int(saved["generation"])
