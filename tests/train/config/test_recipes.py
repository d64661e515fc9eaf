"""The shipped recipes: all are valid, the paper's has the paper's values, and the others differ from it as they say."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from exgrpo.tools.evaluate.options import defaults
from exgrpo.train.config.recipe import load_recipe, to_yaml
from exgrpo.train.reward.names import DEFAULT, resolve_reward

FOLDER = Path(__file__).parents[3] / "recipes"
EVALUATION = sorted((FOLDER / "evaluation").glob("*.yaml"))
PARTS = {path for name in ("replay", "objectives", "environments") for path in (FOLDER / name).glob("*.yaml")}
"""They go with the recipe of a task, and have tests of their own."""
RECIPES = sorted(str(path.relative_to(FOLDER)) for path in set(FOLDER.rglob("*.yaml")) - set(EVALUATION) - PARTS)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    items: dict[str, Any] = {}
    for key, value in values.items():
        section = isinstance(value, dict) and key != "overrides"
        items.update(flat(value, f"{prefix}{key}.") if section else {prefix + key: value})
    return items


PAPER = flat(
    yaml.safe_load("""
steps: 700
questions: 128
policy: {path: Qwen/Qwen2.5-Math-7B, dtype: bf16, gradient_checkpointing: true,
         overrides: {max_position_embeddings: 16384, rope_theta: 40000}}
data: {max_prompt_tokens: 1024, train_limit: null, chat: true, system_prompt: null, keep_system: true}
data.prompt_format: "{question}"
data.answer_prefix: "<think>\\n"
reward.function: math
rollout: {samples: 8, temperature: 1.0, max_tokens: 8192}
experience: {ratio: 0.5, start_pass_rate: 0.35, admit: successes, prioritise: gaussian, mu: 0.5, sigma: 1.0}
experience.compose: mixed
experience.trajectory: lowest_entropy
experience.expire: [retirement]
objective: {clip: [0.2, 0.2], clip_with_replay: false, weigh: shaped, beta: 0.1, scale_by_std: false}
objective.normalize: constant
objective.entropy_coef: 0.001
optimizer: {lr: 1.0e-6, betas: [0.9, 0.999], weight_decay: 0.01, grad_clip: 1.0, schedule: constant, warmup_steps: 0}
optimizer.minibatches: 2
optimizer.micro_batch_tokens: 32768
evaluation: {temperature: 0.6, top_p: 1.0}
""")
)
OFF = {"count_replayed": False, "replayed": 1, "advantage": "group", "bucket_by": "success_count"}
OFF |= {"max_per_question": None, "max_age": None}
"""Options of replay that the paper lacks."""
ON_POLICY = {"experience.ratio": 0.0}
PLAIN: dict[str, Any] = {"policy.overrides": {}}
"""Only Qwen2.5-Math is stretched."""
RANDOM = {name: {f"experience.{name}": "random"} for name in ("prioritise", "trajectory")}
ASKED = "Question: {question}\nReason step by step and put the answer into \\boxed{{}}.\nAnswer:"
WEAK = {
    "steps": 500,
    "policy.path": "meta-llama/Llama-3.1-8B",
    **PLAIN,
    "reward.function": "math_no_think",
    "data.chat": False,
    "data.keep_system": False,
    "data.answer_prefix": "",
    "data.prompt_format": ASKED,
    "rollout.stop": ["\nQuestion:"],
    "experience.start_pass_rate": 0.0,
}
AS_SCRIPT = {"experience.count_replayed": True, "optimizer.grad_clip": 1 / 64, "objective.entropy_coef": 5e-5}
VALUES = (("ratio", 0.25), ("ratio", 0.75), ("sigma", 0.5), ("sigma", 1.5), ("mu", 0.25))
CHANGES: dict[str, dict[str, Any]] = {
    "paper/qwen2.5_math_7b.yaml": {},
    "paper/qwen2.5_math_1.5b.yaml": {"steps": 500, "policy.path": "Qwen/Qwen2.5-Math-1.5B"},
    "paper/qwen2.5_7b_instruct.yaml": {"steps": 500, "policy.path": "Qwen/Qwen2.5-7B-Instruct", **PLAIN},
    "paper/llama3.1_8b.yaml": WEAK,
    "paper/llama3.1_8b_instruct.yaml": {"steps": 500, "policy.path": "meta-llama/Llama-3.1-8B-Instruct", **PLAIN},
    "paper/reference_script.yaml": AS_SCRIPT,
    "paper/luffy_7b.yaml": {"steps": 500, "policy.path": "models/LUFFY-Qwen-Math-7B-Zero", **PLAIN},
    "ablations/on_policy.yaml": ON_POLICY,
    "ablations/no_question_selection.yaml": RANDOM["prioritise"],
    "ablations/no_trajectory_selection.yaml": RANDOM["trajectory"],
    "ablations/no_selection.yaml": RANDOM["prioritise"] | RANDOM["trajectory"],
    "ablations/no_shaping.yaml": {"objective.weigh": "ratio"},
    "ablations/no_importance_correction.yaml": {"objective.weigh": "uncorrected"},
    "ablations/no_retirement.yaml": {"experience.expire": []},
    "ablations/no_delayed_start.yaml": {"experience.start_pass_rate": 0.0},
    **{f"ablations/{of}.yaml": {"experience.trajectory": of} for of in ("highest_entropy", "lowest_nll", "shortest")},
    **{f"ablations/{name}_{value}.yaml": {f"experience.{name}": value} for name, value in VALUES},
    **{f"preliminary/{of}.yaml": {**ON_POLICY, "objective.train_on": of} for of in ("easy", "medium", "hard")},
}
"""What each recipe changes in the paper's."""


def resolved(recipe: str) -> dict[str, Any]:
    return flat(load_recipe(FOLDER / recipe).model_dump(mode="json"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_valid_and_repeatable(recipe, tmp_path):
    config = load_recipe(FOLDER / recipe)
    resolve_reward(config.reward.function or DEFAULT)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_recipe(tmp_path / "config.yaml") == config


def test_the_paper_recipe_has_the_papers_values_and_writes_them_out():
    """A default that changes must not change the paper's run. Options that the paper lacks are off by default."""
    off = {f"experience.{name}": value for name, value in OFF.items()} | {"objective.train_on": "all"}
    assert PAPER | off == {key: value for key, value in resolved("paper.yaml").items() if key in PAPER | off}
    assert set(PAPER) <= set(flat(yaml.safe_load((FOLDER / "paper.yaml").read_text())))


def test_every_recipe_that_builds_on_the_papers_is_in_the_table():
    own = {"paper.yaml", "smollm2_gsm8k.yaml", "lora_7b_24gb.yaml"}
    assert set(RECIPES) - own == set(CHANGES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_graded_behind_the_thinking_is_asked_to_think(recipe):
    values = resolved(recipe)
    assert values["reward.function"] != "math" or values["data.answer_prefix"].startswith("<think>")


@pytest.mark.parametrize("recipe", CHANGES)
def test_a_recipe_changes_what_it_says_and_nothing_else(recipe):
    paper, ours = resolved("paper.yaml"), resolved(recipe)
    assert {key: value for key, value in ours.items() if value != paper[key]} == CHANGES[recipe]
    assert len((FOLDER / recipe).read_text().splitlines()) <= 16


@pytest.mark.parametrize("recipe", EVALUATION, ids=lambda path: path.stem)
def test_an_evaluation_recipe_asks_as_its_training_recipe_does(recipe):
    options = defaults([recipe])
    training = load_recipe(FOLDER / ("paper.yaml" if recipe.stem == "paper" else f"paper/{recipe.name}"))
    asked = options.rollout
    assert (asked.temperature, asked.top_p, options.rollout.max_tokens, asked.samples) == (0.6, 1.0, 8192, 1)
    assert asked.avg == {"aime": 32, "aime25": 32, "amc": 32}
    assert options.reward == training.reward
    for name in ("chat", "system_prompt", "keep_system", "prompt_format", "answer_prefix", "max_prompt_tokens"):
        assert getattr(options.data, name) == getattr(training.data, name)
    assert options.rollout.stop == training.rollout.stop
