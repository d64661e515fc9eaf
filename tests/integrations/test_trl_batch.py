"""The batch that is trained on, from the one that TRL generated, on written tensors; without TRL."""

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.integrations.trl_batch import Batch, TrainedRow, deal, rebuild
from exgrpo.train.experience.weighing import Weighed
from exgrpo.train.records import Trajectory

PAD = 0


def answer(*ids: int) -> Trajectory:
    log_prob = -np.array(ids, np.float32) / 100
    return Trajectory(0, np.array(ids, np.int32), log_prob, True, 1.0, 0)


def collate(rows: Sequence[Trajectory]) -> Batch:
    """A prompt of three tokens for every answer."""
    width = max(len(row.response) for row in rows)
    completions = [[*row.response.tolist(), *([PAD] * (width - len(row.response)))] for row in rows]
    prompts = torch.tensor([[7, 8, 9]] * len(rows))
    ids = torch.tensor(completions)
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": ids,
        "completion_mask": (ids != PAD).long(),
    }


def generated() -> Batch:
    """Three answers of 2, 1 and 2 tokens to prompts of 2, 1 and 1 tokens, at places 3, 4 and 5."""
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
    stored = answer(21, 22, 23)
    weighed = Weighed(np.array([-0.5, np.inf, -0.25], np.float32), np.array([1, 0, 2], np.float32))
    mine = [TrainedRow(answer(14, 15), -0.25, place=5), TrainedRow(stored, 0.75, weighed)]
    batch = rebuild(generated(), mine, 4, 3, collate)
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
    batch = rebuild(output, [TrainedRow(answer(21, 22, 23), 1.0, Weighed(np.zeros(3, np.float32)))], 1, 3, collate)
    assert batch["importance_sampling_ratio"].tolist() == [[1.0]]
    assert batch["advantages"].tolist() == [1.0]


def test_a_batch_that_stays_as_it_is() -> None:
    rows = [answer(11, 12), answer(13), answer(14, 15)]
    advantages = [0.5, -0.5, 0.0]
    mine = [TrainedRow(row, a, place=3 + i) for i, (row, a) in enumerate(zip(rows, advantages, strict=True))]
    batch, output = rebuild(generated(), mine, 3, 3, collate), generated()
    for name, tensor in output.items():
        assert torch.equal(batch[name], tensor)
    assert not batch["replayed"].any()


@given(st.lists(st.integers(0, 11), unique=True), st.integers(0, 20), st.sampled_from([1, 2, 3, 4]))
def test_rows_stay_where_they_are_and_others_go_where_there_is_room(
    places: list[int], added: int, processes: int
) -> None:
    kept = [TrainedRow(answer(1), 0.0, place=place) for place in places]
    rows = [*kept, *(TrainedRow(answer(2), 0.0) for _ in range(added))]
    per_process = 12 // processes
    dealt = deal(rows, per_process, processes)
    own = [sorted(place for place in places if place // per_process == process) for process in range(processes)]
    for of_process, expected in zip(dealt, own, strict=True):
        assert [row.place for row in of_process[: len(expected)]] == expected
        assert all(row.place is None for row in of_process[len(expected) :])
    assert sum(map(len, dealt)) == len(rows)
    # No process is longer than the fairest share, unless it was so from the start.
    assert max(map(len, dealt)) <= max(*map(len, own), -(-len(rows) // processes), 0)
