"""The batch that is trained on, from the one that TRL generated, on written tensors; without TRL."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.integrations.trl_batch import Batch, deal, group_advantages, places, rebuild
from exgrpo.train.common.step_batch import StepBatch
from tests.train.batches import Row, make_batch

PAD = 0


def collate(batch: StepBatch) -> Batch:
    """A prompt of three tokens for every answer."""
    width = batch.length.max()
    answers = [batch.token[batch.at(row)].tolist() for row in range(len(batch))]
    prompts = torch.tensor([[7, 8, 9]] * len(batch))
    ids = torch.tensor([[*answer, *([PAD] * (width - len(answer)))] for answer in answers])
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": ids,
        "completion_mask": (ids != PAD).long(),
    }


def generated() -> Batch:
    """Three answers of 2, 1 and 2 tokens to prompts of 2, 1 and 1 tokens."""
    return {
        "prompt_ids": torch.tensor([[1, 2], [PAD, 3], [PAD, 4]]),
        "prompt_mask": torch.tensor([[1, 1], [0, 1], [0, 1]]),
        "completion_ids": torch.tensor([[11, 12], [13, PAD], [14, 15]]),
        "completion_mask": torch.tensor([[1, 1], [1, 0], [1, 1]]),
        "advantages": torch.tensor([0.5, -0.5, 0.0]),
        "num_items_in_batch": torch.tensor(99),
        "old_per_token_logps": torch.tensor([[-1.0, -2.0], [-3.0, 0.0], [-4.0, -5.0]]),
        "importance_sampling_ratio": torch.tensor([[0.5, 0.5], [0.6, 0.0], [0.7, 0.7]]),
    }


def test_rows_leave_and_join_and_fill_up() -> None:
    mine = make_batch(
        [(0, [Row(response=(14, 15)), Row(response=(21, 22, 23), replayed=True)])],
        advantage=[-0.25, 0.75],
        ratio_log_prob=[-4, -5, -0.5, np.inf, -0.25],
        factor=[1, 1, 1, 0, 2],
    )
    batch = rebuild(generated(), mine, np.array([2, -4]), 4, collate)
    assert batch["prompt_ids"][:2].tolist() == [[0, 0, 4], [7, 8, 9]]
    assert batch["prompt_mask"][:2].tolist() == [[0, 0, 1], [1, 1, 1]]
    assert batch["completion_ids"][:2].tolist() == [[14, 15, PAD], [21, 22, 23]]
    assert batch["completion_mask"].tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0]]
    assert batch["old_per_token_logps"][:2].tolist() == [[-4, -5, 0], [-0.5, np.inf, -0.25]]
    assert batch["advantages"].tolist() == [[-0.25] * 3, [0.75, 0, 1.5], [0] * 3, [0] * 3]
    assert batch["replayed"].tolist() == [False, True, False, False]
    torch.testing.assert_close(batch["importance_sampling_ratio"][:2], torch.tensor([[0.7, 0.7, 0.0], [1.0, 1.0, 1.0]]))
    assert batch["num_items_in_batch"] == 99
    # Attention needs something to look at in a row without a completion, too.
    assert (batch["prompt_mask"].sum(1) > 0).all()


def test_weights_of_whole_answers_stay_so() -> None:
    output = {**generated(), "importance_sampling_ratio": torch.tensor([[0.5], [0.6], [0.7]])}
    stored = Row(response=(21, 22, 23), replayed=True)
    mine = make_batch([(0, [stored])], advantage=[1.0], ratio_log_prob=np.zeros(3))
    batch = rebuild(output, mine, np.array([-1]), 1, collate)
    assert batch["importance_sampling_ratio"].tolist() == [[1.0]]
    assert batch["advantages"].tolist() == [1.0]


def test_a_batch_that_stays_as_it_is() -> None:
    rows = [Row(response=(11, 12)), Row(response=(13,)), Row(response=(14, 15))]
    mine = make_batch([(0, rows)], advantage=[0.5, -0.5, 0.0], ratio_log_prob=[-1.0, -2.0, -3.0, -4.0, -5.0])
    batch, output = rebuild(generated(), mine, np.arange(3), 3, collate), generated()
    for name, tensor in output.items():
        assert torch.equal(batch[name], tensor)
    assert not batch["replayed"].any()


def test_a_place_is_that_of_the_first_answers_of_a_group_that_was_planned() -> None:
    fresh, stored = Row(), Row(replayed=True)
    batch = make_batch([(0, [fresh, fresh]), (1, [fresh, stored, stored]), (2, []), (3, [fresh]), (4, [stored])])
    assert places(batch, 4, 2).tolist() == [0, 1, 2, 3, -1, 6, -1]


def test_advantages_of_trl_stay_where_the_group_is_as_trl_takes_it() -> None:
    won, lost = Row(1.0), Row(0.0)
    joined = Row(1.0, replayed=True, stored_advantage=0.75)
    groups = {
        "as it is": ([won, lost], [5.0, -5.0]),
        "with a replayed answer": ([won, Row(0.0, replayed=True)], [6.0, -6.0]),
        "with a stored advantage": ([won, joined], [0.0, 0.75]),
        "longer": ([won, lost, Row(1.0, replayed=True)], [1 / 3, -2 / 3, 1 / 3]),
        "of stored answers alone": ([Row(1.0, replayed=True), Row(0.0, replayed=True)], [0.5, -0.5]),
    }
    batch = make_batch([(0, rows) for rows, _ in groups.values()])
    given_by_trl = np.array([5, -5, 6, -6, 7, -7, 8, -8], np.float32)
    group_advantages(batch, places(batch, 4, 2), given_by_trl, 2, scale_by_std=False)
    expected = [advantage for _, of_group in groups.values() for advantage in of_group]
    np.testing.assert_allclose(batch.advantage, expected, atol=1e-6)


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
