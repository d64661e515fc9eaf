"""The terms of replayed tokens: gradients against autograd of each paper's formula in float64."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from exgrpo.kernels import policy_loss
from exgrpo.train.common.functions import Needs
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.config.objective import MethodOptions, ObjectiveConfig
from exgrpo.train.config.replay import KINDS
from exgrpo.train.replay import rules
from exgrpo.train.replay.contract import PRESENT, Weighed
from exgrpo.train.replay.rules import ImportanceWeighting
from tests.train.batches import Row, make_batch, rows_of
from tests.train.configs import configured
from tests.train.fakes import fake_score
from tests.train.trainers import half, make, updated

CLIP, BETA = (0.2, 0.28), 0.1
OPTIONS = MethodOptions(objective=ObjectiveConfig(second_moment=0.04, trigger=0.1, coefficient=0.3))
NAMES = KINDS["weigh"].names


@dataclass
class Answer:
    """A replayed answer: its log-probs under the policy that wrote it and under the one before the update."""

    log_prob: np.ndarray
    present: np.ndarray
    advantage: float

    @property
    def reward(self) -> float:
        return float(self.advantage > 0)


def answer(log_prob, present, advantage: float) -> Answer:
    return Answer(np.asarray(log_prob, np.float32), np.asarray(present, np.float32), advantage)


def batch_of(answers: list[Answer]) -> StepBatch:
    """The answers as a function gets them."""
    rows = [Row(one.reward, [1] * len(one.log_prob), one.log_prob, replayed=True) for one in answers]
    return make_batch(
        [(0, rows)],
        advantage=[one.advantage for one in answers],
        log_prob=np.concatenate([np.empty(0, np.float32), *(one.present for one in answers)]),
    )


def weighed(name: str, of: list[Answer], options: MethodOptions = OPTIONS) -> list[Weighed]:
    """The terms of each answer; without a factor, of ones."""
    batch = batch_of(of)
    terms = rules.find("weigh", name)(batch, options)
    factor = np.ones(len(batch.token), np.float32) if terms.factor is None else terms.factor
    advantage = batch.advantage if terms.advantage is None else terms.advantage
    return [
        Weighed(terms.reference[at], factor[at], advantage[i]) for i, at in enumerate(map(batch.at, range(len(of))))
    ]


def answers(drift: float, seed: int = 0) -> list[Answer]:
    """Nine answers of both signs, whose policies are `drift` nats away."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(9):
        past = -rng.exponential(1.5, rng.integers(1, 12))
        made.append(
            answer(past, np.minimum(past + drift * rng.normal(size=len(past)), -1e-4), (0.6, -0.4, 0.0)[number % 3])
        )
    return made


def our_gradients(name: str, of: list[Answer], current: list[np.ndarray]) -> list[np.ndarray]:
    """By which the loss ascends, for each answer, where the policy gives `current` log-probs."""
    term = Needs.of(rules.find("weigh", name)).term
    found = []
    for terms, log_prob in zip(weighed(name, of), current, strict=True):
        theta = torch.tensor(log_prob, dtype=torch.float64, requires_grad=True)
        result = policy_loss(
            theta,
            torch.from_numpy(terms.reference).double(),
            torch.from_numpy(terms.advantage * terms.factor.astype(np.float64)),
            replayed=None if term == "clipped" else torch.ones(len(log_prob), dtype=torch.bool),
            clip=CLIP,
            beta=BETA if term == "shaped" else None,
            normalizer=1,
        )
        found.append(-torch.autograd.grad(result.loss, theta)[0].numpy())
    return found


def clipped(ratio, advantage):
    return torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP[0], 1 + CLIP[1]) * advantage)


def second_moment_masks(of: list[Answer], bound: float) -> list[np.ndarray]:
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


def veto_mask(one: Answer) -> list[float]:
    """Of a failure nothing behind the first token whose ratio is below the trigger."""
    mask, left = [], False
    for log_ratio in (one.present - one.log_prob).tolist():
        mask.append(0.0 if left else 1.0)
        left = left or (one.advantage < 0 and math.exp(log_ratio) < OPTIONS.objective.trigger)
    return mask


def divergence(log_u):
    """f(u) = u log u - (u + 1) log((u + 1) / 2)."""
    u = log_u.exp()
    return u * log_u - (u + 1) * ((u + 1) / 2).log()


def paper_terms(name: str, one: Answer, theta: torch.Tensor, mask: np.ndarray | None) -> torch.Tensor:
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
        "truncated": lambda: (present - past).exp().clamp(max=2) * clipped(r, a),
        "likelihood": lambda: OPTIONS.objective.coefficient * theta if one.reward >= 1 else 0 * theta,
        "jensen_shannon": lambda: -OPTIONS.objective.coefficient * divergence(theta - past),
        "second_moment": lambda: torch.from_numpy(mask) * w * a,
        "veto": lambda: torch.tensor(veto_mask(one)).double() * clipped(w, a),
    }
    return terms[name]()


def objectives(name: str, of: list[Answer], thetas: list[torch.Tensor]) -> torch.Tensor:
    """The sum of each paper's terms, to be maximised."""
    masks = second_moment_masks(of, OPTIONS.objective.second_moment) if name == "second_moment" else [None] * len(of)
    terms = [paper_terms(name, *of_one).sum() for of_one in zip(of, thetas, masks, strict=True)]
    return torch.stack(terms).sum()


# The divergence's gradient is that of the policy before the update, see below: its objective only moves with it.
MOVED = [(name, moved) for name in NAMES for moved in (0.0, 0.15) if not (name == "jensen_shannon" and moved)]


@pytest.mark.parametrize("drift", [0.0, 0.3, 1.0, 4.0])
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
    (one,) = weighed("jensen_shannon", [answer(np.zeros(5), np.log(u), 1.0)])
    np.testing.assert_allclose(one.factor[:4], [0, 0.232, 0, -0.575], atol=1e-3)
    assert np.isfinite(one.factor).all()
    assert one.advantage == OPTIONS.objective.coefficient


def test_far_ratios_of_the_past_stay_finite():
    for name in ("decoupled", "jensen_shannon"):
        (one,) = weighed(name, [answer([-90.0, -1.0], [-1.0, -90.0], 1.0)])
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
    trainer.policy.scored.clear()
    trainer.policy.updates.clear()
    trainer.policy.terms.clear()
    version = trainer.policy.version
    batch = trainer.step(2).batch
    declared = Needs.of(rules.find("weigh", name))
    present = declared.present
    passes = [of for of, _ in trainer.policy.scored if of.replayed.any()]
    needed = present == "values" or (present == "reference" and minibatches > 1)
    assert [len(of) for of in passes] == ([3] if needed else [])
    assert set(trainer.policy.terms) == {declared.term}
    rows = [row for row in updated(trainer) if row.replayed]
    replayed = [row for row in rows_of(batch) if row.replayed]
    assert {row.token.tobytes() for row in rows} == {row.token.tobytes() for row in replayed}
    for row in rows:
        writer, itself = row.old_log_prob, np.full_like(row.old_log_prob, PRESENT)
        before = fake_score(row.token, version).log_prob
        now = before if minibatches > 1 else itself
        references = dict.fromkeys(("as_fresh", "uncorrected"), now) | dict.fromkeys(("decoupled", "truncated"), before)
        reference = {**references, "likelihood": itself, "jensen_shannon": itself}.get(name, writer)
        np.testing.assert_array_equal(row.ratio_log_prob, reference)


def importance_weighting(folder, body: str, **log_probs) -> ImportanceWeighting:
    """Of one's own function; `score` are the log-probs of tokens."""
    path = folder / "mine.py"
    path.write_text("import numpy as np\nfrom exgrpo.train.replay import Weighed, needs\n\n" + body)
    return ImportanceWeighting.from_config(
        configured({"objective.weigh": f"{path}:weigh"}), lambda batch: log_probs["score"][batch.token]
    )


TERMS = """
@needs(present="values")
def weigh(batch, options):
    assert batch.token.tolist() == [5, 5, 2, 2, 3]
    number = batch.by_token(np.arange(3.0))
    return Weighed(batch.log_prob - number, number + 1, np.arange(3.0))
"""


def test_the_replayed_rows_that_are_trained_on_take_their_terms_in_order(tmp_path):
    batch = make_batch(
        [
            (0, [Row(response=(1,)), Row(response=(2, 2), replayed=True), Row(response=(3,), replayed=True)]),
            (1, [Row(response=(4, 4)), Row(response=(6,), replayed=True)]),
            (2, [Row(response=(5, 5), replayed=True)]),
        ],
        advantage=np.array([9.0, 8.0, 7.0, 6.0, 5.0, 4.0]),
    )
    batch.fill(trained=np.array([2, 0]))
    batch.put(np.array([0, 3]), ratio_log_prob=np.array([-0.5, -0.5, -0.5]), log_prob=np.array([-1.0, -1.0, -1.0]))
    importance_weighting(tmp_path, TERMS, score=-np.arange(7) / 8)(batch)
    # Tokens 1 22 3 44 6 55, of which 55, 22 and 3 have got terms.
    np.testing.assert_array_equal(
        batch.ratio_log_prob, np.array([-0.5, -1.25, -1.25, -2.375, -0.5, -0.5, np.nan, -0.625, -0.625], np.float32)
    )
    assert batch.factor.tolist() == [1, 2, 2, 3, 1, 1, 1, 1, 1]
    assert batch.advantage.tolist() == [9, 1, 2, 6, 5, 0]


def test_without_replayed_rows_nobody_is_asked(tmp_path):
    batch = make_batch([(0, [Row(), Row(1.0)]), (1, [Row(replayed=True)])])
    batch.fill(trained=np.array([0]))
    importance_weighting(tmp_path, "def weigh(batch, options):\n    raise AssertionError\n")(batch)
    assert not batch.has("ratio_log_prob")
