"""The recipes of methods: each goes with every task, names what the page says, and drives the loop."""

from pathlib import Path

import pytest

from exgrpo.train.common import functions
from exgrpo.train.common.step_batch import LOG_PROB_SOURCES, StepBatch
from exgrpo.train.config.recipe import parse_args
from exgrpo.train.run.startup_checks import check_method
from tests.train.batches import Row, each
from tests.train.trainers import make

FOLDER = Path(__file__).parents[3] / "recipes" / "replay"
METHODS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
TRACED = {"rlep", "luffy"}
"""Methods that replay what they were given at the start."""
PREFIXED = {"prefix_rl", "prefix_sampling"}
WITHOUT_ANSWERS = {"on_policy", "dynamic_sampling", "prompt_replay", "recommended", *PREFIXED}
"""Methods that replay no answer."""


def of_method(name: str, task: str = "arithmetic", *options: str):
    recipes = ("--recipe", f"builtin:{task}", "--recipe", str(FOLDER / f"{name}.yaml"))
    return parse_args([*recipes, *options])


@pytest.mark.parametrize("task", functions.model_names())
@pytest.mark.parametrize("name", METHODS)
def test_every_method_goes_with_every_task(name, task):
    config = of_method(name, task)
    assert config.data.train == (f"builtin:{task}",)
    check_method(config)


@pytest.mark.parametrize("name", METHODS)
def test_the_page_has_every_method(name):
    assert f"| {name} |" in (FOLDER / "README.md").read_text()


def test_exgrpo_is_the_default_written_out():
    assert of_method("exgrpo") == parse_args(["--recipe", "builtin:arithmetic"])


def traces(questions: int) -> StepBatch:
    """A right answer to every second question."""
    unknown = LOG_PROB_SOURCES.index("unknown")
    rows = (
        Row(1.0, (7 + q, 8 + q, 9 + q), 0.0, step=0, old_log_probs_from=unknown, question=q)
        for q in range(0, questions, 2)
    )
    return each([*rows])


@pytest.mark.parametrize("name", METHODS)
def test_every_method_drives_the_loop(name):
    """Its decisions on scripted answers, with the sizes made small and lags and cool-downs short."""
    config = of_method(name, "arithmetic", "--experience.cooldown", "1", "--experience.lag", "2")
    trainer = make(
        {q: q % 5 / 4 for q in range(20)},
        questions=6,
        rollout={"samples": 4, "max_tokens": 8, "refills": config.rollout.refills},
        optimizer={"minibatches": 2, "passes": config.optimizer.passes},
        experience={**config.experience.model_dump(), "start_pass_rate": 0.0},
        objective=config.objective.model_dump(),
    )
    memory = trainer.replay.memory
    if name in TRACED:
        memory.fill(traces(20), dict.fromkeys(range(0, 20, 2), 1))
    results = [trainer.step(step) for step in range(1, 7)]
    replayed = sum(result.metrics["replayed"] for result in results)
    assert (replayed > 0) == (name not in WITHOUT_ANSWERS)
    assert trainer.policy.updates
    if name in TRACED:
        assert {step for result in results for step in result.batch.step[result.batch.replayed]} == {0}
        assert len(memory.table) == 10
    if name == "dynamic_sampling":
        assert all(result.metrics["idle_group_fraction"] == 0 for result in results)
    if name in PREFIXED:
        assert sum(result.metrics.get("prefixed_groups", 0) for result in results) > 0
    if name == "prompt_replay":
        assert memory.times.max() > 1
