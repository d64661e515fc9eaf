"""Training that goes on with another number of processes, against training that was not interrupted."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import get_scheduler

from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import CheckpointError
from exgrpo.train.config.policy import OptimizerConfig
from exgrpo.train.policy.engine import WholeEngine, rate_factor
from exgrpo.train.policy.policy import Policy
from exgrpo.train.policy.states import WholeStates, load_states, save_states, save_training
from tests.train import tiny
from tests.train.configs import configured
from tests.train.launch import ROOT, completed
from tests.train.policy.states_worker import CASES

WORKER = ROOT / "tests" / "train" / "policy" / "states_worker.py"

BITS = {"bf16": (torch.bfloat16, 8), "fp16": (torch.float16, 11)}


LONG = ("persistent", "fp16")
names = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in CASES]
)


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Folders of states after three steps: at once by one process, and one step by 3, by 2 and by 1."""
    folder = tmp_path_factory.mktemp("states")
    tiny.save_model(folder / "model", tied=False)
    cases = [name for name in CASES if name not in LONG or request.config.getoption("--long")]
    for ranks, jobs in (
        (1, [(0, 3, "-", "straight")]),
        (3, [(0, 1, "-", "changed 0")]),
        # What one process has left, loaded by two and saved again, and that by one.
        (2, [(1, 2, "changed 0", "changed 1"), (3, 3, "straight", "two")]),
        (1, [(2, 3, "changed 1", "changed 2"), (3, 3, "two", "back")]),
    ):
        completed(WORKER, str(folder), json.dumps(jobs), *cases, ranks=ranks)
    return folder


def states_in(place):
    """Those that one process has left, and what all processes have in common."""
    states = {}
    for path in place.glob("*.safetensors"):
        states.update(load_file(path))
    return states, json.loads((place / "training.json").read_text())


@names
def test_the_number_of_processes_may_change(runs, name):
    (ours, training), (expected, of_expected) = (states_in(runs / one / name) for one in ("changed 2", "straight"))
    assert training == of_expected
    weights = [key for key in expected if key.startswith("weight/")]
    if name not in BITS:
        # As between one rank and a plain loop: the order of sums differs, and AdamW makes that a visible part of
        # lr = 1e-3 where a gradient is near zero.
        assert all((ours[key] - expected[key]).abs().max() < 3e-5 for key in weights)
        return
    dtype, bits = BITS[name]
    # In bf16 each gradient is off by about 2^-8 of the size of its matrix's gradients. Moments are sums of gradients.
    # A weight with a smaller gradient moves either way, by lr in each step: one in some hundred.
    for key in weights:
        moment = key.replace("weight/", "exp_avg/")
        assert (ours[moment] - expected[moment]).norm() < 2 ** (4 - bits) * expected[moment].norm(), key
    model = load_file(runs / "model" / "model.safetensors")
    start = {key: model[key.removeprefix("weight/model.")].to(dtype).float().flatten() for key in weights}
    moved = torch.cat([expected[key] - start[key] for key in weights])
    apart = torch.cat([ours[key] - expected[key] for key in weights])
    assert apart.norm() < 2 ** (4 - bits) * moved.norm()


@names
def test_what_goes_on_is_what_was_saved_to_the_last_bit(runs, name):
    (before, training), (after, of_back) = (states_in(runs / folder / name) for folder in ("straight", "back"))
    assert len(list((runs / "straight" / name).glob("*.safetensors"))) > 1
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert training == of_back
    assert training["steps"] == 3


def whole(width=5, frozen=False):
    """States, and the module that they are of."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1))
    module[2].bias.requires_grad_(not frozen)
    return WholeStates(WholeEngine(module, configured())), module


def saved(folder, states, skipped=0):
    save_states(states, folder, 0)
    save_training(states, states.engine.lr_scheduler, skipped, folder)


def test_states_before_the_first_step_have_no_moments(tmp_path):
    states, module = whole()
    saved(tmp_path, states, 2)
    other, others = whole()
    nn.init.zeros_(others[0].weight)
    assert load_states(other, tmp_path)["skipped"] == 2
    assert torch.equal(others[0].weight, module[0].weight)
    assert other.steps == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("shape", r"states of other parameters .*, 0\.bias among them"),
        ("missing", r"states of other parameters .*, 2\.bias among them"),
        ("file", r"lacks a part of weight/0\.weight"),
    ],
)
def test_states_of_another_model_and_parts_that_are_missing_are_named(tmp_path, damage, message):
    saved(tmp_path, whole(frozen=damage == "missing")[0])
    if damage == "file":
        (tmp_path / "rank_00000_00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=message):
        load_states(whole(7 if damage == "shape" else 5)[0], tmp_path)


@pytest.mark.parametrize(
    ("options", "name", "more"),
    [
        ({}, "constant_with_warmup", {}),
        ({"schedule": "linear"}, "linear", {}),
        ({"schedule": "linear", "min_lr": 2e-5}, "polynomial", {"lr_end": 2e-5, "power": 1.0}),
        ({"schedule": "cosine"}, "cosine", {}),
        ({"schedule": "cosine", "min_lr": 2e-5}, "cosine_with_min_lr", {"min_lr": 2e-5}),
    ],
)
@pytest.mark.parametrize("warmup", [0, 3])
def test_the_rates_are_those_of_transformers(options, name, more, warmup):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    theirs = get_scheduler(name, optimizer, warmup, 10, more).lr_lambdas[0]
    own = OptimizerConfig(lr=1e-3, warmup_steps=warmup, **options)
    assert [rate_factor(step, own, 10) for step in range(11)] == pytest.approx(list(map(theirs, range(11))), rel=1e-12)


def test_a_run_of_more_steps_goes_on_at_its_own_rate(tmp_path):
    def policy(steps):
        made = object.__new__(Policy)
        options = {"lr": 1e-3, "schedule": "linear"}
        made.engine = WholeEngine(nn.Linear(2, 1), configured(steps=steps, optimizer=options))
        made.states, made.world = WholeStates(made.engine), ALONE
        return made

    first = policy(4)
    for _ in range(3 * first.engine.lr_scheduler.lr_lambdas[0].keywords["last"] // 4):
        first.engine.optimizer.step()
        first.engine.lr_scheduler.step()
    first.save_checkpoint(tmp_path)
    for steps, rate in ((4, first.learning_rate), (6, 0.5e-3)):
        other = policy(steps)
        other.load_checkpoint(tmp_path)
        assert other.learning_rate == (rate if steps == 4 else pytest.approx(rate))
