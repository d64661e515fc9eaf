"""What a run in TRL needs besides :mod:`exgrpo.train.experience`: batches of one size, and the state in a checkpoint.

It needs no TRL.
"""

import json
from pathlib import Path

import numpy as np

from exgrpo.train.checkpoint.store import ExperienceStore, read_checked, write_checked
from exgrpo.train.experience import Replay, ReplayState, StepPlan

STATE = "state.json"


def plan_generation(replay: Replay, batch: int) -> StepPlan:
    """The questions of the next generation, exactly `batch` of them.

    Where too few are unsolved, retired ones fill up: they teach little, and the batch keeps its shape.
    """
    plan = replay.plan(batch)
    missing = batch - len(plan.questions)
    if missing == 0:
        return plan
    solved = replay.rng.choice(np.flatnonzero(replay.memory.retired), missing, replace=False)
    return StepPlan(np.concatenate([plan.fresh, solved]), plan.replayed)


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
            "give it as the model and leave resume_from_checkpoint out"
        )
    saved = json.loads((folder / STATE).read_text(encoding="utf-8"))
    arrays = read_checked(folder, saved["arrays"])
    questions = len(replay.memory.count)
    if len(arrays["count"]) != questions:
        raise ValueError(
            f"{folder} is the experience of {len(arrays['count'])} questions and train_dataset has {questions}: "
            "resume with the data set of the run"
        )
    values = {
        "replay_open": saved["open"],
        "rewards_seen": saved["rewards_seen"],
        "pool_position": saved["pool_position"],
        "generators": {"pool": saved["pool"], "replay": saved["replay"]},
    }
    trajectories = ExperienceStore(folder).load(arrays)
    # Earlier versions did not count replays, on which no decision depends.
    uncounted = {"replays": np.zeros(len(trajectories), np.int64)}
    replay.restore(ReplayState(values, {**uncounted, **arrays}, trajectories))
    return int(saved["generation"])
