"""What a run in TRL needs besides the experience, without TRL."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.integrations.trl_batch import deal
from exgrpo.integrations.trl_replay import STATE, load_replay, placed, plan_generation, save_replay
from exgrpo.train.common.durable import read_checked, write_checked
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.config.options import ExperienceConfig
from exgrpo.train.replay import MethodOptions, PlannedGroup, Replay
from exgrpo.train.replay.table import LENGTH
from tests.train.batches import Row, make_batch


def graded(groups: dict[int, list[float]], *, generation: int = 0) -> StepBatch:
    """Fresh answers with these rewards, by question."""
    return make_batch(
        [
            (question, [Row(reward, (question, i), 0.0, step=generation) for i, reward in enumerate(rewards)])
            for question, rewards in groups.items()
        ]
    )


def test_a_generation_keeps_its_size_when_few_questions_are_left() -> None:
    replay = Replay(MethodOptions(ExperienceConfig(start_pass_rate=0.0), 2), 6, seed=0)
    replay.store(graded({question: [1.0, 1.0] for question in range(4)}), 0)
    replay.store(graded({4: [1.0, 0.0]}), 1)
    plan = plan_generation(replay, 4, 2)
    assert plan.groups[-1] == PlannedGroup(4, 1, choose=1)
    assert plan.groups[0] == PlannedGroup(5, 2)
    assert [group.question for group in plan.groups[1:3]] == list(plan.fillers)
    assert plan.fillers < {0, 1, 2, 3}
    assert len(plan.fillers) == 2
    assert not replay.finished


@pytest.mark.parametrize("compose", ["buffer", "bapo"])
@pytest.mark.parametrize("retired", [0, 3])
def test_every_process_has_as_many_rows(compose: str, retired: int) -> None:
    options = ExperienceConfig(start_pass_rate=0.0, compose=compose, prioritise="random", ratio=0.75)
    replay = Replay(MethodOptions(options, 3), 12, seed=0)
    replay.store(graded({question: [float(question < retired)] * 3 for question in range(12)}), 0)
    plan = plan_generation(replay, 4, 2, multiple=4)  # 12 rows are a multiple of 4 processes, 9 or 3 are not
    asked = [one.question for one in plan.groups]
    assert len(asked) == len(set(asked)) == {"buffer": 4, "bapo": 8}[compose]
    assert len(plan.fillers) == {"buffer": 3, "bapo": 1}[compose]
    assert plan.fillers <= set(asked)


@pytest.mark.parametrize("planned", [PlannedGroup(7, 0, choose=3), PlannedGroup(7, 4), PlannedGroup(7, 1, choose=1)])
def test_groups_that_tensors_cannot_hold_are_refused(planned: PlannedGroup) -> None:
    with pytest.raises(ValueError, match="compose: question 7 has .* 1 to 3 fresh ones"):
        placed([planned], make_batch([(7, [Row(replayed=True)] * planned.choose)]), 3)


@pytest.mark.parametrize("lacking", [("asked", "shown"), (LENGTH,)])  # the latter in files of formats 5 and 6
def test_a_state_that_lacks_what_is_known_now_is_refused(tmp_path: Path, lacking: tuple[str, ...]) -> None:
    replay = Replay(MethodOptions(ExperienceConfig(), 4), 20, seed=0)
    save_replay(tmp_path, replay, 3, {})
    state = json.loads((tmp_path / STATE).read_text(encoding="utf-8"))
    arrays = read_checked(tmp_path, state["arrays"])
    state["arrays"] = write_checked(tmp_path, {name: arrays[name] for name in arrays if name not in lacking})
    (tmp_path / STATE).write_text(json.dumps(state), encoding="utf-8")
    with pytest.raises(ValueError, match=f"earlier version, without {', '.join(lacking)}: .* give it as the model"):
        load_replay(tmp_path, replay)


def test_prompts_of_questions_with_stored_answers_come_back(tmp_path: Path) -> None:
    options = MethodOptions(ExperienceConfig(start_pass_rate=0.0), 2)
    replay = Replay(options, 6, seed=0)
    replay.store(graded({question: [1.0, 0.0] for question in (1, 4)}), 0)
    for prompts in ({4: [7, 8, 9], 2: [1], 1: [3]}, {1: np.array([3], np.int32)}, {}):
        save_replay(tmp_path, replay, 3, prompts)
        generation, found = load_replay(tmp_path, Replay(options, 6, seed=1))
        assert generation == 3
        assert {question: ids.tolist() for question, ids in found.items()} == {
            question: list(ids) for question, ids in prompts.items() if question != 2
        }


def test_experience_of_other_questions_is_refused(tmp_path: Path) -> None:
    save_replay(tmp_path, Replay(MethodOptions(ExperienceConfig(), 4), 20, seed=0), 0, {})
    with pytest.raises(ValueError, match="of 20 questions and train_dataset has 21"):
        load_replay(tmp_path, Replay(MethodOptions(ExperienceConfig(), 4), 21, seed=0))


@given(st.lists(st.integers(0, 11), unique=True), st.integers(0, 20), st.sampled_from([1, 2, 3, 4]))
def test_rows_stay_where_they_are_and_others_go_where_there_is_room(
    kept: list[int], added: int, processes: int
) -> None:
    place = np.array([*kept, *([-1] * added)], np.int64)
    per_process = 12 // processes
    dealt = deal(np.arange(len(place)), place, per_process, processes)
    own = [sorted(one for one in kept if one // per_process == process) for process in range(processes)]
    for of_process, expected in zip(dealt, own, strict=True):
        assert place[of_process].tolist() == [*expected, *([-1] * (len(of_process) - len(expected)))]
    assert sorted(np.concatenate(dealt)) == list(range(len(place)))
    # No process is longer than the fairest share, unless it was so from the start.
    assert max(map(len, dealt)) <= max(*map(len, own), -(-len(place) // processes), 0)
