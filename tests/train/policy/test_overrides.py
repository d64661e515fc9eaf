"""A changed configuration is that of a copy of the model whose config.json was edited by hand."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, Qwen2Config

from exgrpo.tools.evaluate.evaluation import engine_settings, fitted
from exgrpo.tools.evaluate.options import parse_options
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.config.recipe import load_recipe, parse_args, to_yaml
from exgrpo.train.policy.check import check_weights
from exgrpo.train.policy.source import find_model
from exgrpo.train.policy.tokenizer import load_pretrained
from tests.train import tiny

STRETCHED = {"max_position_embeddings": 16384, "rope_theta": 40000}
TOKENS = torch.arange(3, 43)[None]


def save_as(folder, **places):
    """A tiny model whose config.json says where positions turn as it was usual at some time."""
    tiny.save_model(folder, tied=True)
    file = folder / "config.json"
    values = {key: value for key, value in json.loads(file.read_text()).items() if key != "rope_parameters"}
    file.write_text(json.dumps({**values, **places}))


FORMS = {
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "top level": {"rope_theta": 10000.0},
    "both": {"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "neither": {},
}


@pytest.fixture(params=FORMS)
def folder(request, tmp_path):
    save_as(tmp_path / "plain", **FORMS[request.param])
    return tmp_path / "plain"


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def edited(folder):
    """The copy by hand, in the way of transformers 5."""
    copy = folder.with_name("edited")
    shutil.copytree(folder, copy)
    values = json.loads((copy / "config.json").read_text())
    values |= {"max_position_embeddings": 16384, "rope_parameters": {"rope_type": "default", "rope_theta": 40000}}
    (copy / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k != "rope_theta"}))
    return copy


def test_the_turning_of_positions_and_the_logits_are_those_of_the_edited_copy(folder):
    model = find_model(str(folder), STRETCHED).load(torch.float32, "sdpa")
    width = model.config.head_dim
    closed = torch.tensor([40000.0 ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq.double(), closed, rtol=1e-6, atol=0)
    model.save_pretrained(folder.with_name("saved"))  # which needs no overrides
    by_hand, saved, plain = (
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        for place in (edited(folder), folder.with_name("saved"), folder)
    )
    assert saved.config.max_position_embeddings == model.config.max_position_embeddings == 16384
    assert torch.equal(logits(model), logits(by_hand))
    assert torch.equal(logits(saved), logits(by_hand))
    assert (logits(model) - logits(plain)).abs().max() > 1e-2


def test_what_is_derived_is_derived_anew(tmp_path):
    """Qwen's layer types follow from other values."""
    values = Qwen2Config(num_hidden_layers=4, sliding_window=8, max_window_layers=2).to_dict()
    del values["layer_types"]
    values["sliding_window"] = 8
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert set(find_model(str(tmp_path)).config.layer_types) == {"full_attention"}
    source = find_model(str(tmp_path), {"use_sliding_window": True})
    assert source.config.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2
    with pytest.raises(ValueError, match="sliding_window=9 has no effect on this configuration, which keeps None"):
        find_model(str(tmp_path), {"sliding_window": 9})
    assert source.changes["layer_types"] == source.config.layer_types


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_thetta": 4e4}, "a 'llama' model has no 'rope_thetta'; did you mean 'rope_theta'"),
        ({"max_positions": 9}, "has no 'max_positions'; did you mean 'max_position_embeddings'"),
        ({"max_position_embeddings": "many"}, "'max_position_embeddings' expected int, got str"),
        ({"num_attention_heads": 3}, r"hidden size \(32\) is not a multiple of the number of attention heads \(3\)"),
        ({"rope_type": "yarn"}, "factor"),
    ],
)
def test_what_the_configuration_does_not_have_is_named(tmp_path, overrides, message):
    tiny.save_model(tmp_path, tied=True)
    with pytest.raises(ValueError, match=f"^overrides: .*{message}"):
        find_model(str(tmp_path), overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 64}, r"weights of another shape: model.embed_tokens.weight \[97, 32\] instead of \[97, 64\]"),
        ({"num_hidden_layers": 3}, "missing weights: model.layers.2.input_layernorm.weight"),
        ({"tie_word_embeddings": False}, "missing weights: lm_head.weight"),
    ],
)
def test_what_changes_the_weights_is_named_with_them(tmp_path, overrides, message):
    tiny.save_model(tmp_path, tied=True)
    ((key, value),) = overrides.items()
    with pytest.raises(ValueError, match=f" with {key}={value} cannot be used: .*{message}"):
        check_weights(find_model(str(tmp_path), overrides))
    check_weights(find_model(str(tmp_path), STRETCHED))


def test_other_names_of_a_key_are_understood(tmp_path):
    GPT2Config(n_layer=1).save_pretrained(tmp_path)
    source = find_model(str(tmp_path), {"max_position_embeddings": 2048})
    assert (source.config.n_positions, source.positions) == (2048, 2048)


def test_one_value_for_layers_that_turn_differently_is_refused(tmp_path):
    Gemma3TextConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no 'rope_theta'"):
        find_model(str(tmp_path), {"rope_theta": 1})


OPTION = "--policy.overrides"


def test_recipes_and_the_command_line_give_them(tmp_path):
    base, recipe = tmp_path / "base.yaml", tmp_path / "recipe.yaml"
    base.write_text("data.train: q\npolicy: {path: m, overrides: {max_position_embeddings: 16384, rope_theta: 4e4}}")
    recipe.write_text("base: base.yaml\npolicy.overrides.rope_theta: 50000\npolicy.overrides.rope_type: yarn")
    assert load_recipe(base).policy.overrides == STRETCHED
    merged = {"max_position_embeddings": 16384, "rope_theta": 50000, "rope_type": "yarn"}
    assert load_recipe(recipe).policy.overrides == merged
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(load_recipe(recipe)))
    assert load_recipe(again).policy.overrides == merged
    given = parse_args([f"--recipe={recipe}", OPTION, "rope_theta=1e6", "use_cache=False", "hidden_act=gelu"])
    assert given.policy.overrides == {"rope_theta": 1e6, "use_cache": False, "hidden_act": "gelu"}
    assert parse_args([f"--recipe={recipe}"]).policy.overrides == merged
    assert parse_args([f"--recipe={recipe}", OPTION, "--steps=3"]).policy.overrides == {}
    recipe.write_text("base: base.yaml\npolicy.overrides: {}")
    assert load_recipe(recipe).policy.overrides == {}


def test_a_mistake_on_the_command_line_is_one_error():
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_args([OPTION, "rope_theta", "40000"])


def test_evaluation_takes_them():
    options = parse_options(["builtin:arithmetic", "--data.test=a.jsonl", "--policy.overrides", "rope_theta=40000"])
    pretrained = load_pretrained(options.model, options.policy.overrides)
    source = engine_settings(fitted(options, pretrained, []), pretrained, []).source
    assert source.config.rope_parameters["rope_theta"] == 40000
