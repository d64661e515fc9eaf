"""What a run remembers and decides, without a model."""

import numpy as np
import pytest

from exgrpo.train.common.step_batch import ENGINE
from exgrpo.train.config.options import ExperienceConfig
from exgrpo.train.replay import MethodOptions, PlannedGroup, Replay
from tests.train.batches import Row, make_batch
from tests.train.replay.test_memory import group


def test_what_is_replayed_is_as_it_was_stored():
    replay = Replay(
        MethodOptions(ExperienceConfig(start_pass_rate=0.0, trajectory="random", advantage="stored"), 2), 3, seed=0
    )
    row = Row(
        1.0,
        (5, 6, 7),
        (-0.1, 0.0, -0.3),
        response_mask=(True, False, True),
        key=8,
        step=4,
        penalty=0.25,
        old_log_probs_from=ENGINE,
    )
    replay.store(make_batch([(2, [row, Row(0.0)])]), 4)
    for times in (1, 2):
        selected = replay.select([PlannedGroup(1, 2), PlannedGroup(2, 1, 1)], lambda _: pytest.fail("no rule asks"))
        assert (selected.question.tolist(), selected.group.tolist()) == ([1, 2], [1])
        assert selected.token.tolist() == [5, 6, 7]
        assert selected.response_mask.tolist() == [True, False, True]
        np.testing.assert_array_equal(selected.old_log_prob, np.array([-0.1, 0.0, -0.3], np.float32))
        names = ("reward", "penalty", "key", "step", "old_log_probs_from", "finished", "replays", "stored_advantage")
        assert [getattr(selected, name).item() for name in names] == [1.0, 0.25, 8, 4, ENGINE, True, times, 0.375]


def test_the_groups_that_are_settled_on_are_numbers_of_the_whole_batch():
    """Some groups may be trained on; stored answers come behind all of them."""
    options = ExperienceConfig(start_pass_rate=0.0, compose="in_place", admit="all", expire=(), ratio=1.0)
    replay = Replay(MethodOptions(options, 2), 9, seed=0)
    replay.store(make_batch([group(8, [1.0, 0.0], step=1)]), 1)
    batch = make_batch([group(q, [1.0, q % 2], step=2) for q in range(5)])
    replay.store(batch, 2)
    settled = replay.settle(batch, 5, 2, among=np.array([1, 4, 3, 2]))
    assert settled.question.tolist() == [0, 1, 2, 3, 4, 8]
    assert settled.trained.tolist() == [4, 2, 3, 5]
    assert settled.token[: len(batch.token)].tolist() == batch.token.tolist()


@pytest.mark.parametrize(("multiple", "expected"), [(1, 2), (3, 3), (5, 5), (7, 0)])
def test_refills_ask_as_many_questions_as_groups_lack_a_gradient(multiple, expected):
    """Up to a multiple, and down where only 5 questions are left."""
    replay = Replay(MethodOptions(ExperienceConfig(), 2), 9, seed=0)
    batch = make_batch([group(q, [1.0, q % 2], step=1) for q in range(4)])
    more = replay.refill(batch, 4, 1, multiple)
    assert len({one.question for one in more} - set(range(4))) == len(more) == expected
    assert replay.refill(batch, 2, 1) == []
    for refilled, trained in ((True, [0, 2]), (False, [0, 1, 2, 3])):
        assert replay.settle(batch, 4, 1, refilled=refilled).trained.tolist() == trained
