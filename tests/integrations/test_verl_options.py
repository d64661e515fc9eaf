"""Options of replay in verl's trainer: those that follow from a method, and those that are refused."""

from typing import Any

import pytest

from exgrpo.integrations.verl_method import METHODS, configure, solution_keys
from exgrpo.train.common.errors import ConfigError
from tests.integrations.verl_runs import of_verl
from tests.programs import python

BEGIN_WITH_FILES = ("luffy", "rlep")
"""Recipes that wait for answers of `experience.start`."""
REFUSED = {"recommended", "prefix_rl", "prefix_sampling", "su01"}


def refusal(given: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        configure(of_verl(**changes), given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_defaults_are_the_papers() -> None:
    config = of_verl()
    options = configure(config, {})
    actor = config.actor_rollout_ref.actor
    assert (options.experience.compose, options.objective.weigh) == ("mixed", "shaped")
    assert (options.questions, options.rollout.samples, options.optimizer.minibatches) == (4, 8, 2)
    assert (actor.loss_agg_mode, actor.loss_scale_factor) == ("seq-mean-token-sum-norm", 100)
    assert actor.entropy_coeff == 0.001
    assert config.algorithm.norm_adv_by_std_in_grpo is False
    assert config.trainer.v1.trainer_mode == "sync"


@pytest.mark.parametrize("name", sorted({path.stem for path in METHODS.glob("*.yaml")} - REFUSED))
def test_a_recipe_of_a_method_sets_the_options_of_verl(name: str) -> None:
    given = {}
    if name in BEGIN_WITH_FILES:
        assert "waits for answers of experience.start" in refusal({"recipe": name})
        given = {"experience": {"start": "answers.jsonl"}}
    config = of_verl()
    options = configure(config, {"recipe": name, **given})
    assert options == configure(of_verl(), {"recipe": [str(METHODS / f"{name}.yaml")], **given})
    actor = config.actor_rollout_ref.actor
    assert config.algorithm.norm_adv_by_std_in_grpo == options.objective.scale_by_std
    assert actor.entropy_coeff == options.objective.entropy_coef


def test_options_beside_a_recipe_win() -> None:
    experience = {"admit": "successes", "ratio": 0.25}
    given = {"recipe": "rlep", "experience": experience, "reward": {"success": 0.5}, "seed": 3}
    options = configure(of_verl(), given)
    assert (options.experience.ratio, options.reward.success, options.seed) == (0.25, 0.5, 3)
    assert options.experience.compose == "appended"


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("reward", {"reward_model": {"enable": True}}, "rollout.refills"),
        ("algorithm__adv_estimator", "gae", "algorithm.adv_estimator=gae"),
        ("algorithm__filter_groups", {"enable": True}, "algorithm.filter_groups.enable"),
        ("algorithm__rollout_correction", {"bypass_mode": True}, "rollout_correction.bypass_mode"),
        ("actor_rollout_ref__actor__policy_loss", {"loss_mode": "gspo"}, "loss_mode=gspo"),
        ("actor_rollout_ref__rollout__top_p", 0.9, "top_p=0.9"),
        ("data__gen_batch_size", 1, "data.gen_batch_size=1"),
        ("distillation", {"enabled": True}, "distillation.enabled"),
        ("data__shuffle", False, "data.shuffle=False"),
        ("actor_rollout_ref__actor__megatron", {"router_replay": {"mode": "R2"}}, "megatron.router_replay.mode=R2"),
    ],
)
def test_an_option_of_verl_that_excludes_replay_is_refused_by_name(option: str, value: Any, named: str) -> None:
    assert named in refusal({"rollout": {"refills": 1}}, **{option: value})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"recipe": "recommended"}, "questions: set data.train_batch_size"),
        ({"optimizer": {"passes": 3}}, "ppo_epochs"),
        ({"experience": {"ratoi": 1}}, "did you mean 'experience.ratio'"),
        ({"experience": {"folder": "tokens"}}, "experience.folder"),
        ({"recipe": "prefix_rl"}, "experience.prefix: verl's engines begin every answer anew"),
        ({"objective": {"kl_coef": 0.1}}, "use_kl_loss"),
        ({"objective": {"surrogate": "coupled"}}, "objective.surrogate='coupled'"),
        ({"rollout": {"samples": 8}}, "rollout.samples"),
    ],
)
def test_an_option_of_replay_that_verl_cannot_have_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    assert named in refusal(given)


def test_keys_of_solutions_come_from_what_rewards_tell() -> None:
    keys = solution_keys([{"score": 1.0, "key": "x=2"}, {"key": " x=2"}, {"key": 2}, {"key": None}, {}], "solutions")
    assert keys[0] == keys[1] != keys[2]
    assert (keys[2] > 0, keys[3:]) == (True, [0, 0])
    assert solution_keys([{"acc": 1.0}], "successes") == [0]
    with pytest.raises(ConfigError, match="return a dict with score and 'key'"):
        solution_keys([{"acc": 1.0}], "solutions")


def test_it_does_without_the_packages_of_the_own_trainer() -> None:
    absent = "import sys; sys.modules.update(dict.fromkeys(['deepspeed', 'accelerate', 'verl'])); "
    python("-c", absent + "import exgrpo.integrations.verl_method")
