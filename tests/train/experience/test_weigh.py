"""The terms of replayed tokens: gradients against autograd of each paper's formula in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.kernels import policy_loss
from exgrpo.train.errors import ConfigError
from exgrpo.train.experience import rules
from exgrpo.train.experience.weighing import PRESENT, ReplayedAnswer, Weighed, WeighOptions
from exgrpo.train.policy.batch import build_rows
from exgrpo.train.records import Group, Trajectory
from exgrpo.train.replayed import Weigher
from tests.train.configs import configured
from tests.train.fakes import fake_score
from tests.train.trainers import half, make

CLIP, BETA = (0.2, 0.28), 0.1
OPTIONS = WeighOptions(success=1.0, second_moment=0.04, trigger=1e-3, coefficient=0.3)
NAMES = rules.names("weigh")


def answer(log_prob, present, advantage: float, reward: float | None = None) -> ReplayedAnswer:
    return ReplayedAnswer(
        np.asarray(log_prob, np.float32),
        advantage,
        float(advantage > 0) if reward is None else reward,
        np.asarray(present, np.float32),
    )


def answers(drift: float, seed: int = 0) -> list[ReplayedAnswer]:
    """Nine answers of both signs, whose policies are `drift` nats away."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(9):
        past = -rng.exponential(1.5, rng.integers(1, 12))
        made.append(
            answer(past, np.minimum(past + drift * rng.normal(size=len(past)), -1e-4), (0.6, -0.4, 0.0)[number % 3])
        )
    return made


def our_gradients(name: str, of: list[ReplayedAnswer], current: list[np.ndarray]) -> list[np.ndarray]:
    """By which the loss ascends, for each answer, where the policy gives `current` log-probs."""
    function = rules.find("weigh", name)
    found = []
    for one, weighed, log_prob in zip(of, function(of, OPTIONS), current, strict=True):
        theta = torch.tensor(log_prob, dtype=torch.float64, requires_grad=True)
        advantage = one.advantage if weighed.advantage is None else weighed.advantage
        factor = np.ones(len(log_prob)) if weighed.factor is None else weighed.factor
        result = policy_loss(
            theta,
            torch.from_numpy(weighed.reference).double(),
            torch.from_numpy(advantage * factor.astype(np.float64)),
            replayed=None if function.term == "clipped" else torch.ones(len(log_prob), dtype=torch.bool),
            clip=CLIP,
            beta=BETA if function.term == "shaped" else None,
            normalizer=1,
        )
        found.append(-torch.autograd.grad(result.loss, theta)[0].numpy())
    return found


def clipped(ratio, advantage):
    return torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP[0], 1 + CLIP[1]) * advantage)


def second_moment_masks(of: list[ReplayedAnswer], bound: float) -> list[np.ndarray]:
    """Algorithm 1 of arXiv 2510.01161, dropping the largest until the mean is within the bound."""
    squares = {}
    for i, one in enumerate(of):
        for t, log_ratio in enumerate((one.present - one.log_prob).tolist()):
            if (one.advantage > 0 and log_ratio > 0) or (one.advantage < 0 and log_ratio < 0):
                squares[i, t] = log_ratio**2
    masks = [np.ones(len(one.log_prob)) for one in of]
    while squares and sum(squares.values()) / len(squares) > bound:
        (i, t) = largest = max(squares, key=squares.__getitem__)
        masks[i][t] = 0
        del squares[largest]
    return masks


def veto_mask(one: ReplayedAnswer) -> list[float]:
    """Of a failure nothing behind the first token whose ratio is below the trigger."""
    mask, left = [], False
    for log_ratio in (one.present - one.log_prob).tolist():
        mask.append(0.0 if left else 1.0)
        left = left or (one.advantage < 0 and math.exp(log_ratio) < OPTIONS.trigger)
    return mask


def divergence(log_u):
    """f(u) = u log u - (u + 1) log((u + 1) / 2)."""
    u = log_u.exp()
    return u * log_u - (u + 1) * ((u + 1) / 2).log()


def paper_terms(name: str, one: ReplayedAnswer, theta: torch.Tensor, mask: np.ndarray | None) -> torch.Tensor:
    """The paper's term of each token, to be maximised."""
    past, present = torch.from_numpy(one.log_prob).double(), torch.from_numpy(one.present).double()
    w, r, a = (theta - past).exp(), (theta - present).exp(), one.advantage
    terms = {
        "shaped": lambda: w / (w + BETA) * a,
        "ratio": lambda: w * a,
        "clipped": lambda: clipped(w, a),
        "as_fresh": lambda: clipped(r, a),
        "uncorrected": lambda: r / (r + BETA) * a,
        "decoupled": lambda: (present - past).exp() * clipped(r, a),
        "likelihood": lambda: OPTIONS.coefficient * theta if one.reward >= 1 else 0 * theta,
        "jensen_shannon": lambda: -OPTIONS.coefficient * divergence(theta - past),
        "second_moment": lambda: torch.from_numpy(mask) * w * a,
        "veto": lambda: torch.tensor(veto_mask(one)).double() * clipped(w, a),
    }
    return terms[name]()


def objectives(name: str, of: list[ReplayedAnswer], thetas: list[torch.Tensor]) -> torch.Tensor:
    """The sum of each paper's terms, to be maximised."""
    masks = second_moment_masks(of, OPTIONS.second_moment) if name == "second_moment" else [None] * len(of)
    terms = [paper_terms(name, *of_one).sum() for of_one in zip(of, thetas, masks, strict=True)]
    return torch.stack(terms).sum()


# The divergence's gradient is that of the policy before the update, see below: its objective only moves with it.
MOVED = [(name, moved) for name in NAMES for moved in (0.0, 0.15) if not (name == "jensen_shannon" and moved)]


@pytest.mark.parametrize("drift", [0.0, 0.3, 4.0])
@pytest.mark.parametrize(("name", "moved"), MOVED)
def test_gradients_are_those_of_the_papers_objective(name, moved, drift):
    """`moved`: how far later mini-batches see another policy than the one before the update."""
    of = answers(drift)
    rng = np.random.default_rng(1)
    current = [
        np.minimum(one.present + moved * rng.normal(size=len(one.present)), -1e-4).astype(np.float64) for one in of
    ]
    thetas = [torch.tensor(one, requires_grad=True) for one in current]
    exact = torch.autograd.grad(objectives(name, of, thetas), thetas)
    found = our_gradients(name, of, current)
    assert any(np.abs(one).max() > 0 for one in found) or (name == "jensen_shannon" and drift == 0)
    for ours, paper in zip(found, exact, strict=True):
        np.testing.assert_allclose(ours, paper.numpy(), rtol=2e-5, atol=1e-8)


def test_the_pull_of_a_divergence_stays_that_of_the_policy_before_the_update():
    of = answers(1.0)
    before = our_gradients("jensen_shannon", of, [one.present.astype(np.float64) for one in of])
    later = our_gradients("jensen_shannon", of, [one.present - 0.2 for one in of])
    for first, second in zip(before, later, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-12)


def test_the_extremes_of_the_divergences_pull():
    """u log(2u / (1 + u)): -0.232 at u = 0.302, 0 at 0 and at 1, +0.575 at 2; bounded where exp would overflow."""
    u = np.array([1e-30, 0.302, 1.0, 2.0, 1e30])
    (one,) = rules.find("weigh", "jensen_shannon")([answer(np.zeros(5), np.log(u), 1.0)], OPTIONS)
    np.testing.assert_allclose(one.factor[:4], [0, 0.232, 0, -0.575], atol=1e-3)
    assert np.isfinite(one.factor).all()
    assert one.advantage == OPTIONS.coefficient


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from([-2.0, -0.5, -0.25, 0.0, 0.25, 0.5, 2.0]), min_size=1, max_size=6),
            st.sampled_from([-1.0, 0.0, 0.5]),
        ),
        max_size=5,
    ),
    st.sampled_from([0.01, 0.0625, 0.25, 1.0, 100.0]),
)
def test_the_largest_squares_are_left_out_until_the_mean_is_within_the_bound(rows, bound):
    """Ratios are often equal here: as many are left out as by the loop, though not always the same of equal ones."""
    of = [answer(np.full(len(ratios), -3.0), -3.0 + np.array(ratios), advantage) for ratios, advantage in rows]
    weighed = rules.find("weigh", "second_moment")(of, WeighOptions(second_moment=bound))
    masks = second_moment_masks(of, bound)
    assert len(weighed) == len(of)
    left, expected = [], []
    for one, found, mask in zip(of, weighed, masks, strict=True):
        assert set(found.factor.tolist()) <= {0.0, 1.0}
        squares = (one.log_ratio.astype(np.float64)) ** 2
        left += squares[found.factor == 0].tolist()
        expected += squares[mask == 0].tolist()
        inward = one.log_ratio * one.advantage <= 0
        assert found.factor[inward].all()
    assert sorted(left) == sorted(expected)


@given(st.lists(st.floats(-12, 2, width=32), min_size=1, max_size=8), st.sampled_from([-0.5, 0.0, 0.5]))
def test_a_veto_is_that_of_the_plain_loop(ratios, advantage):
    one = answer(np.full(len(ratios), -13.0), -13 + np.array(ratios, np.float32), advantage)
    (weighed,) = rules.find("weigh", "veto")([one], OPTIONS)
    factor = np.ones(len(ratios)) if weighed.factor is None else weighed.factor
    assert factor.tolist() == veto_mask(one)


@pytest.mark.parametrize("name", NAMES)
def test_no_answers_have_no_terms(name):
    assert rules.find("weigh", name)([], OPTIONS) == []


def test_far_ratios_of_the_past_stay_finite():
    for name in ("decoupled", "jensen_shannon"):
        (one,) = rules.find("weigh", name)([answer([-90.0, -1.0], [-1.0, -90.0], 1.0)], OPTIONS)
        assert np.isfinite(one.factor).all()
        assert one.factor.dtype == np.float32


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_pass_reads_the_replayed_answers_only_where_their_log_probs_are_needed(name, minibatches):
    """Rows of the update refer to the writer, to the policy before the update, or to the policy itself."""
    trainer = make(
        half(20), experience={"trajectory": "random"}, objective={"weigh": name}, optimizer={"minibatches": minibatches}
    )
    trainer.step(1)
    past = {id(row.response): row for row in trainer.replay.memory.all_trajectories()}
    trainer.policy.scored.clear()
    trainer.policy.updates.clear()
    trainer.policy.terms.clear()
    version = trainer.policy.version
    replayed = [row for rows in trainer.step(2).replayed for row in rows]
    function = rules.find("weigh", name)
    present = getattr(function, "present", None)
    passes = [of for of, _ in trainer.policy.scored if any(id(one.response) in past for one in of)]
    needed = present == "values" or (present == "reference" and minibatches > 1)
    assert [len(of) for of in passes] == ([3] if needed else [])
    assert set(trainer.policy.terms) == {function.term}
    rows = [row for minibatch, _ in trainer.policy.updates for row in minibatch.rows if row.replayed]
    assert {id(row.response) for row in rows} == {id(row.response) for row in replayed}
    for row in rows:
        writer = past[id(row.response)].log_prob
        now = fake_score(row.response, version).log_prob if minibatches > 1 else np.full_like(writer, PRESENT)
        itself = np.full_like(writer, PRESENT)
        before = fake_score(row.response, version).log_prob
        reference = {
            "as_fresh": now,
            "uncorrected": now,
            "decoupled": before,
            "likelihood": itself,
            "jensen_shannon": itself,
        }.get(name, writer)
        np.testing.assert_array_equal(row.old_log_prob, reference)


def test_the_replayed_rows_take_their_terms_in_order():
    def row(question: int, first: int) -> Trajectory:
        return Trajectory(question, np.array([first, 1], np.int32), np.full(2, -1.0, np.float32), True, 1.0, 0)

    groups = [
        Group(0, (row(0, 1),), (row(0, 2), row(0, 3))),
        Group(1, (row(1, 4),)),
        Group(2, (), (row(2, 5),), stored_advantage=(0.25,)),
    ]
    terms = [
        Weighed(np.array([-0.1, -0.2], np.float32), np.array([1, 0], np.float32), 0.75),
        Weighed(np.array([-0.3, -0.4], np.float32)),
        Weighed(np.array([-0.5, -0.6], np.float32), None, 0.0),
    ]
    rows = build_rows(groups, [[0.1, 0.2, 0.3], [0.4], [0.5]], lambda q: np.array([q], np.int32), replayed=terms)
    found = [(one.response[0], one.replayed, one.advantage) for of_group in rows for one in of_group]
    assert found == [(1, False, 0.1), (2, True, 0.75), (3, True, 0.3), (4, False, 0.4), (5, True, 0.0)]
    replayed = [one for of_group in rows for one in of_group if one.replayed]
    for one, term in zip(replayed, terms, strict=True):
        assert one.old_log_prob is term.reference
        assert one.weight is term.factor


def test_terms_that_are_too_few_are_one_clear_error(tmp_path):
    (tmp_path / "mine.py").write_text("def weigh(answers, options):\n    return []\n")
    config = configured({"objective.weigh": f"{tmp_path}/mine.py:weigh"})
    weigher = Weigher.of_run(config, lambda rows: [])
    assert weigher.term == "shaped"
    row = Trajectory(0, np.array([1], np.int32), np.zeros(1, np.float32), True, 1.0, 0)
    with pytest.raises(ConfigError, match="gave 0 terms for 1 replayed answers; it gives a list with one"):
        weigher([Group(0, (), (row,))], [[0.5]])
