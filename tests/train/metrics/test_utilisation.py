"""What steps need and how fast they are, against counts made by hand."""

import math

import numpy as np
import pytest
import torch

from exgrpo.train.common.records import SHARED, Rollout
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.metrics.utilisation import FROZEN_BACKWARD, Utilisation, matrix_rate
from exgrpo.train.policy.flops import Reading, together
from tests.train.batches import rows_of
from tests.train.fakes import LoneWorld
from tests.train.shapes import SMALL
from tests.train.trainers import half, make

PHASES = ("select", "generate", "score", "update")


def test_a_prompt_is_needed_once_by_all_its_answers():
    shapes = ((1, 5, 3), (2, 5, 4), (1, 5, 1), (3, 10, 2))
    prompts = [np.full(length, question, np.int32) for question, length, _ in shapes]
    batch = StepBatch.from_answers(prompts, [Rollout(np.zeros(length, np.int32), True) for *_, length in shapes])
    answer = Rollout(np.zeros(3, np.int32), True)
    assert together(batch) == [Reading(5, (3, 1)), Reading(5, (4,)), Reading(10, (2,))]
    assert together(batch, np.array([3, 2])) == [Reading(10, (2,)), Reading(5, (1,))]
    begun = StepBatch.from_answers([np.append(np.zeros(SHARED, np.int32), 1 + i) for i in (0, 0, 1)], [answer] * 3)
    assert together(begun) == [Reading(SHARED + 1, (3, 3)), Reading(SHARED + 1, (3,), SHARED)]


def test_flops_are_those_of_every_token_that_is_read_and_predicted():
    """Token by token: a token goes through the matrices and attends to those before it and half to itself."""
    reading = Reading(5, (3, 1, 4))
    before = [*range(5), *(5 + i for response in (3, 1, 4) for i in range(response - 1))]
    predicted = 1 + 2 + 0 + 3
    attention = sum(4 * SMALL.heads * SMALL.head_width * SMALL.layers * (n + 0.5) for n in before)
    expected = 2 * SMALL.linear * len(before) + attention + 2 * SMALL.vocabulary * SMALL.width * predicted
    assert reading.flops(SMALL) == expected
    assert (reading.written, reading.read) == (8, 7 + 5 + 8)
    of_three = sum(4 * SMALL.heads * SMALL.head_width * SMALL.layers * (n + 0.5) for n in range(3))
    assert Reading(5, (3, 1, 4), 3).flops(SMALL) == expected - 2 * SMALL.linear * 3 - of_three


@pytest.mark.parametrize("passes", [1, 2])
def test_throughput_of_a_step_counts_what_its_phases_are_about(passes):
    trainer = make(half(20), optimizer={"passes": passes})
    trainer.step(1)
    trainer.policy.scored.clear()
    trainer.policy.updates.clear()
    result = trainer.step(2)
    *compared, (scored, _) = trainer.policy.scored
    read = {
        "select": [batch for batch, _ in compared],
        "score": [scored],
        "update": [minibatch.batch for minibatch, _ in trainer.policy.updates],
    }
    tokens = {
        phase: sum(len(row.prompt) + len(row.token) - 1 for batch in batches for row in rows_of(batch))
        for phase, batches in read.items()
    }
    tokens["generate"] = result.batch.length[result.batch.fresh].sum()
    assert all(tokens[phase] for phase in PHASES)
    for phase in PHASES:
        per_second = tokens[phase] / result.metrics[f"seconds/{phase}"]
        assert result.metrics[f"tokens_per_second/{phase}"] == pytest.approx(per_second)
    assert result.work["update"] == [reading for batch in read["update"] for reading in together(batch)]
    assert len(result.work["generate"]) == result.batch.groups


def test_phases_without_work_have_no_throughput_and_no_utilisation():
    result = make(dict.fromkeys(range(20), 1.0)).step(1)  # nothing to replay, nothing to learn
    numbers = result.metrics | Utilisation(SMALL, 1e9).metrics(result.work, result.metrics)
    for phase in PHASES:
        idle = phase in ("select", "update")
        assert math.isnan(numbers[f"tokens_per_second/{phase}"]) == math.isnan(numbers[f"mfu/{phase}"]) == idle


def test_utilisation_is_needed_flops_over_seconds_and_rate():
    work = {"select": (), "generate": [Reading(5, (3, 4))], "score": [Reading(5, (3, 4))], "update": [Reading(5, (3,))]}
    seconds = {"seconds": 10.0, "seconds/select": 0.5, "seconds/generate": 4.0, "seconds/score": 1.0}
    seconds["seconds/update"] = 2.0
    forward, row = (reading.flops(SMALL) for reading in (work["score"][0], work["update"][0]))
    numbers = Utilisation(SMALL, 1e6).metrics(work, seconds)
    assert numbers["matrix_flops_per_second"] == 1e6
    assert numbers["mfu/generate"] == pytest.approx(forward / 4e6)
    assert numbers["mfu/score"] == pytest.approx(forward / 1e6)
    assert numbers["mfu/update"] == pytest.approx(3 * row / 2e6)
    assert numbers["mfu"] == pytest.approx((2 * forward + 3 * row) / 10e6)
    frozen = Utilisation(SMALL, 1e6, backward=FROZEN_BACKWARD).metrics(work, seconds)
    assert frozen["mfu/update"] == pytest.approx(numbers["mfu/update"] * 2 / 3)
    assert frozen["mfu/score"] == numbers["mfu/score"]
    elsewhere = Utilisation(SMALL, 1e6, elsewhere=("generate",))
    assert elsewhere.at_least(9e5) == elsewhere, "the better one of two measurements is kept"
    assert elsewhere.at_least(3e6) == Utilisation(SMALL, 3e6, elsewhere=("generate",))
    elsewhere = elsewhere.metrics(work, seconds)
    assert math.isnan(elsewhere["mfu/generate"])
    assert elsewhere["mfu"] == pytest.approx((forward + 3 * row) / 10e6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_matrix_rate_is_that_of_all_ranks_and_touches_no_random_state(dtype, monkeypatch):
    world, gathered = LoneWorld(), []
    monkeypatch.setattr(world, "gather", lambda value: gathered.append(value) or [value, value], raising=False)
    before = torch.get_rng_state()
    rate = matrix_rate(world, dtype)
    assert rate == 2 * gathered[-1] > 0
    assert torch.equal(torch.get_rng_state(), before)
