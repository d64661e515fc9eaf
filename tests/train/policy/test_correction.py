"""Corrections of the mismatch of engine and trainer, against verl's and TRL's own code on the same numbers."""

import __future__

import ast
import dataclasses
import math
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional, get_args

import numpy as np
import pytest
import torch

from exgrpo.train.common.step_batch import ENGINE, StepBatch
from exgrpo.train.config.objective import BOUNDS, CorrectionConfig, CorrectionName
from exgrpo.train.policy.correction import METHODS, correct, corrected
from tests.train.batches import Row, make_batch

LENGTHS = (5, 1, 9, 3, 40, 2)
SPREAD = 0.25
"""Nats, of the difference between trainer and engine; answers of 40 tokens then have products far from 1."""
ADVANTAGE = (0.5, -0.5, -0.25, 0.25, -1.0, 0.0)
NARROW = {name: (0.0 if name.endswith("tis") else 0.8, 1.25) for name in METHODS}
"""Bounds that some ratios are beyond; verl truncates above alone."""
WIDE = NARROW["token_mask"]


def compared(seed: int = 0) -> StepBatch:
    """Answers that the engine has sampled, the third one with tokens of an environment, and a replayed one."""
    rng = np.random.default_rng(seed)
    rows = [Row(1.0, range(n), rng.normal(-2, 1, n), old_log_probs_from=ENGINE) for n in LENGTHS]
    rows[2] = dataclasses.replace(rows[2], response_mask=np.arange(LENGTHS[2]) % 3 > 0)
    batch = make_batch([(0, [*rows, Row(1.0, range(4), -3.0, replayed=True, old_log_probs_from=ENGINE)])])
    moved = rng.normal(np.repeat([0, 0.1, -0.1, 0, 0.05, 0, 0], [*LENGTHS, 4]), SPREAD)
    batch.fill(log_prob=batch.old_log_prob + moved, advantage=[*ADVANTAGE, 1.0])
    return batch


def fresh(batch: StepBatch) -> StepBatch:
    return batch.take(np.flatnonzero(batch.fresh))


def padded(batch: StepBatch, values: np.ndarray) -> torch.Tensor:
    """[N, L] float64 of [T] values, 0 at pads."""
    rows = [torch.from_numpy(values[batch.at(i)].astype(np.float64)) for i in range(len(batch))]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def flat(batch: StepBatch, values: torch.Tensor) -> np.ndarray:
    """[T] of [N, L]."""
    return np.concatenate([values[i, :length].numpy() for i, length in enumerate(batch.length)])


def options(name: CorrectionName, **more: Any) -> CorrectionConfig:
    return CorrectionConfig(behaviour="engine", correction=name, **more)


def code_of(path: Path, *functions: str, **names: Any) -> SimpleNamespace:
    """What a file defines, or some functions of it, its imports left out, so that what these need is not."""
    tree = ast.parse(path.read_text())
    tree.body = [one for one in tree.body if isinstance(one, ast.FunctionDef | ast.Assign | ast.AnnAssign)]
    if functions:
        tree.body = [one for one in tree.body if getattr(one, "name", "") in functions]
    defined = {"torch": torch, "math": math, "Any": Any, "Optional": Optional, **names}
    exec(compile(tree, path, "exec", __future__.annotations.compiler_flag), defined)
    return SimpleNamespace(**defined)


@pytest.fixture(scope="module")
def verl() -> SimpleNamespace:
    if find_spec("verl") is None:
        pytest.skip("verl is not installed")
    folder = Path(find_spec("verl").submodule_search_locations[0])
    means = code_of(folder / "utils/torch_functional.py", "masked_sum", "masked_mean")
    return code_of(folder / "trainer/ppo/rollout_corr_helper.py", verl_F=means)


def test_every_name_has_bounds_and_a_method():
    assert set(BOUNDS) == set(METHODS) == set(get_args(CorrectionName))


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_a_correction_is_that_of_verl(verl, name, narrow):
    batch = fresh(compared())
    given = options(name, correction_bounds=NARROW[name] if narrow else None)
    found = corrected(batch, given)
    log_ratio, mask = padded(batch, batch.log_prob - batch.old_log_prob), padded(batch, batch.response_mask)
    low, high = given.bounds
    if name == "geometric_mask":  # verl bounds engine / trainer
        kept, _ = verl.compute_rollout_rejection_mask(log_ratio, mask, "seq_mean_k1", f"{1 / high}_{1 / low}")
        expected = flat(batch, kept)
    else:
        level = "sequence" if name.startswith("sequence") else "token"
        bound = high if name.endswith("tis") else f"{max(low, 1e-9)}_{high}"
        weights, numbers = verl.compute_rollout_correction_weights(log_ratio, mask, level, bound)
        expected = flat(batch, weights)
        metrics = correct(batch, np.arange(len(batch)), given)
        assert metrics["correction/ess"] == pytest.approx(numbers["rollout_is_eff_sample_size"], rel=1e-5)
    np.testing.assert_allclose(found.factor[batch.response_mask], expected[batch.response_mask], rtol=2e-5)
    if narrow:
        assert 0 < found.outside[batch.response_mask].mean() < 1


@pytest.mark.parametrize("delta", [0.0, 0.06, 0.2])
def test_the_mask_of_failures_is_that_of_trl(delta):
    trl = pytest.importorskip("trl", reason="trl is not installed", exc_type=ImportError)
    batch = fresh(compared())
    keep = trl.GRPOTrainer.get_off_policy_mask(
        torch.tensor(ADVANTAGE)[:, None],
        *(padded(batch, values) for values in (batch.log_prob, batch.old_log_prob, batch.response_mask)),
        delta,
    )
    plain, masked = (corrected(batch, options("tis", opsm=given)).factor for given in (None, delta))
    np.testing.assert_array_equal(masked, plain * batch.by_token(keep.numpy()[:, 0]))


def test_a_veto_drops_whole_answers():
    batch = fresh(compared())
    log_ratio = batch.log_prob - batch.old_log_prob
    least = np.array([log_ratio[batch.at(i)][batch.response_mask[batch.at(i)]].min() for i in range(len(batch))])
    veto = float(np.exp(np.sort(least)[2] + 1e-4))  # above the least ratios of three answers
    factor = corrected(batch, options("tis", correction_veto=veto)).factor
    plain = corrected(batch, options("tis")).factor
    np.testing.assert_array_equal(factor, np.where(batch.by_token(least < np.log(veto)), 0, plain))
    assert (factor == 0).any()


def test_the_step_gets_weights_of_fresh_answers_and_numbers_of_its_own_tokens():
    batch = compared()
    given = options("token_mask", correction_bounds=WIDE, correction_veto=0.5)
    metrics = correct(batch, np.array([0, 1, 2, 6, 2]), given)
    np.testing.assert_array_equal(batch.factor[batch.places(np.array([3, 4, 5, 6]))], 1)
    part = batch.take(np.array([0, 1, 2]))
    own, ratio = part.response_mask, np.exp((part.log_prob - part.old_log_prob).astype(np.float64))
    vetoed = np.array([(ratio[part.at(i)][own[part.at(i)]] < 0.5).any() for i in range(3)])
    expected = np.where((ratio >= WIDE[0]) & (ratio <= WIDE[1]) & ~part.by_token(vetoed), ratio, 0)
    np.testing.assert_allclose(part.factor[own], expected[own], rtol=1e-6)
    outside = [(expected[part.at(i)][own[part.at(i)]] == 0) for i in range(3)]
    assert metrics == {
        "correction/outside_tokens": pytest.approx(np.concatenate(outside).mean()),
        "correction/outside_answers": pytest.approx(np.mean([one.all() for one in outside])),
        "correction/ratio": pytest.approx(ratio[own].mean()),
        "correction/ess": pytest.approx(expected[own].sum() ** 2 / (own.sum() * (expected[own] ** 2).sum())),
    }
    batch.fill(old_log_probs_from=np.zeros(len(batch)))
    assert correct(batch, np.arange(len(batch)), given) == {}


def test_tis_of_long_answers_is_finite():
    batch = make_batch([(0, [Row(1.0, range(3000), -1.0, old_log_probs_from=ENGINE)])])
    for move in (0.5, -0.5):
        batch.fill(log_prob=batch.old_log_prob + move, advantage=[1.0])
        for name in METHODS:
            metrics = correct(batch, np.array([0]), options(name))
            assert np.isfinite(batch.factor).all()
            assert np.isfinite(list(metrics.values())).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"opsm": 0.1}, "opsm: without the engine's log-probs there is nothing to correct"),
        ({"correction": "token_mask", "correction_veto": 1e-4}, "correction, correction_veto: without the engine's"),
        ({"behaviour": "engine", "correction_bounds": (2, 1)}, "correction_bounds are low and high"),
        ({"behaviour": "engine", "correction": "icepop"}, "'tis', 'token_mask'"),
    ],
)
def test_a_correction_that_cannot_be_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        CorrectionConfig(**given)
