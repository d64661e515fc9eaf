"""Runs that train adapters: begun with saved ones, and beside base weights in 4 bits, against peft's own models."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import ConfigError, ModelError
from exgrpo.train.config.objective import ObjectiveConfig
from exgrpo.train.config.policy import LoraConfig, with_saved
from exgrpo.train.config.recipe import parse_args
from exgrpo.train.policy.adapters import adapted_model, check_adapters
from exgrpo.train.policy.model import same_in_inference
from exgrpo.train.policy.policy import Policy, WholeWeights
from exgrpo.train.policy.scores import make_reference
from exgrpo.train.policy.source import find_model
from exgrpo.train.rollout.transformers.engine import TransformersEngine
from tests.train import tiny
from tests.train.policy.test_policy import plain_loss, save_adapters, with_peft

peft = pytest.importorskip("peft", reason="peft is not installed")
from safetensors.torch import load_file, save_file  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
OBJECTIVE = ObjectiveConfig(entropy_coef=0.01)
TOKENS = torch.arange(3, 20)[None]
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "base"
    tiny.save_model(folder, tied=False)
    return folder


def base(folder, quantised="none"):
    """By transformers; in 4 bits on every processor with bitsandbytes' plain layout, for the fast one rounds."""
    if quantised == "none":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantised,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=settings)
    same_in_inference(model)
    return model


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    return save_adapters(folder, tmp_path_factory.mktemp("adapters"))


def options_of(adapters, **stated):
    return with_saved(LoraConfig(path=str(adapters), **stated))


def make(folder, adapters, objective=OBJECTIVE, **stated):
    config = tiny.config(folder, objective, lora=options_of(adapters, **stated).model_dump())
    source = find_model(str(folder))
    check_adapters(config.lora, source)
    return config, source, Policy(config, source, ALONE)


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.mark.parametrize("quantised", ["none", "nf4"])
def test_a_run_begins_as_pefts_own_model(folder, adapters, quantised):
    plain = base(folder, quantised)
    without = logits(plain)
    config, _, policy = make(folder, adapters, quantised=quantised)
    assert (config.lora.rank, config.lora.alpha, config.lora.head) == (3, 12, True)
    assert config.lora.targets == ("down_proj", "q_proj")
    expected = logits(peft.PeftModel.from_pretrained(plain, adapters))
    assert (expected - without).abs().max() > 0.1
    torch.testing.assert_close(logits(policy.model), expected, rtol=0, atol=1e-4)


def test_what_a_run_saves_is_what_another_begins_with(folder, adapters, tmp_path):
    _, _, first = make(folder, adapters)
    first.update(tiny.minibatches(OBJECTIVE)[0], clip=True)
    first.save(tmp_path / "model")
    config, _, second = make(folder, tmp_path / "model")
    assert config.lora.model_dump() == {**options_of(adapters).model_dump(), "path": str(tmp_path / "model")}
    for (name, ours), (_, theirs) in zip(second.weights(), first.weights(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_divergence_refers_to_the_adapters_of_the_start(folder, adapters):
    objective = ObjectiveConfig(kl_coef=0.1)
    config, source, policy = make(folder, adapters, objective)
    batch = tiny.step_batch()
    start = policy.score(batch, policy.temperature)
    reference = make_reference(config, source, policy)
    policy.update(tiny.minibatches(objective, reference)[0], clip=True)
    moved = policy.score(batch, policy.temperature)
    assert (start.log_prob == reference.score(batch).log_prob).all()
    for row in range(len(batch)):
        assert (start.log_prob != moved.log_prob)[batch.at(row)].any()


def test_an_engine_takes_the_model_with_the_adapters_added(folder, adapters):
    source, options = find_model(str(folder)), options_of(adapters)
    engine = TransformersEngine(tiny.engine_settings(folder), ALONE)
    engine.push_weights(WholeWeights(adapted_model(source, options, torch.float32, "sdpa")))
    expected = logits(peft.PeftModel.from_pretrained(base(folder), adapters))
    torch.testing.assert_close(logits(engine.model), expected, rtol=0, atol=1e-4)


def test_a_command_line_takes_rank_alpha_and_layers_from_the_folder(folder, adapters, tmp_path):
    copied = shutil.copytree(adapters, tmp_path / "adapters")
    given = [f"--lora.path={copied}", f"--policy.path={folder}", "--data.train=builtin:arithmetic"]
    config = parse_args(given)
    assert config.lora == options_of(copied)
    shutil.rmtree(copied)
    assert parse_args(["--steps=7"], config).lora == config.lora  # of a run that goes on
    with pytest.raises(ConfigError, match=r"lora\.path: .* is no folder with an adapter_config\.json"):
        parse_args(given)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"rank": 4}, r"lora\.rank is 4, and that of the adapters in lora\.path .* is 3: leave lora\.rank out"),
        ({"alpha": 6}, r"lora\.alpha is 6, and that of the adapters in lora\.path .* is 12"),
        ({"targets": ("q_proj",)}, r"lora\.targets is \('q_proj',\), and that of .* is \('down_proj', 'q_proj'\)"),
    ],
)
def test_options_that_say_something_else_are_named(adapters, stated, message):
    with pytest.raises(ConfigError, match=message):
        options_of(adapters, **stated)


def test_options_that_say_the_same_are_taken(adapters):
    stated = {"rank": 3, "alpha": 12, "targets": ("q_proj", "down_proj"), "head": True}
    assert options_of(adapters, **stated) == options_of(adapters)


CHANGES = {
    "another model": ({"base_model_name_or_path": "Qwen/other"}, r"are for 'Qwen/other', and policy\.path is .*base: "),
    "another scale": ({"use_rslora": True}, r"have use_rslora=True: these are not trained here"),
    "another kind of layer": ({"use_dora": True}, r"have use_dora=True: these"),
    "another start": ({"init_lora_weights": "pissa"}, r"have init_lora_weights='pissa': these"),
    "a feature of the future": ({"quantum": 3}, r"have quantum=3: these"),
    "another rank": ({"r": 5}, r"weights of another shape: base_model\S+ \[3, 32\] instead of \[5, 32\]"),
    "another layer": ({"target_modules": ["q_proj"]}, r"weights that the model has no place for: .* and \d+ more"),
    "one layer more": ({"target_modules": ["q_proj", "k_proj", "down_proj", "lm_head"]}, r"missing weights: .*k_proj"),
    "a layer that is not there": ({"target_modules": ["q_porj"]}, r"lora\.targets: Target modules .*q_porj"),
    "a pattern": ({"target_modules": ".*q_proj"}, r"target_modules: Input should be a valid .*\(got '\.\*q_proj'\)"),
    "another method": ({"peft_type": "IA3"}, r"peft_type: Input should be 'LORA' \(got 'IA3'\)"),
    "no rank": ({"r": None}, r"adapter_config\.json: r: Input should be"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_adapters_that_do_not_fit_are_refused_before_anything_is_loaded(folder, adapters, tmp_path, name):
    changes, message = CHANGES[name]
    changed = shutil.copytree(adapters, tmp_path / "changed")
    file = changed / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises((ConfigError, ModelError), match=message):
        check_adapters(options_of(changed), find_model(str(folder)))


def test_weights_that_are_damaged_or_not_there_are_refused(folder, adapters, tmp_path):
    source, options = find_model(str(folder)), {}
    for name in ("nan", "cut", "none"):
        options[name] = options_of(shutil.copytree(adapters, tmp_path / name))
    weights = load_file(adapters / WEIGHTS)
    first = next(name for name in weights if "lora" in name)
    save_file({**weights, first: weights[first] * float("nan")}, tmp_path / "nan" / WEIGHTS)
    # Beside adapters of the head, peft also saves the head itself.
    head = "base_model.model.lm_head.base_layer.weight"
    other = options_of(shutil.copytree(adapters, tmp_path / "other"))
    save_file({**weights, head: weights[head] + 1}, tmp_path / "other" / WEIGHTS)
    (tmp_path / "cut" / WEIGHTS).write_bytes((adapters / WEIGHTS).read_bytes()[:300])
    (tmp_path / "none" / WEIGHTS).unlink()
    for name, message in (
        ("nan", "do not fit the model: NaN or infinity in: base_model"),
        ("cut", "the weights in .* cannot be read"),
        ("none", "holds no weights, neither adapter_model.safetensors nor adapter_model.bin"),
    ):
        with pytest.raises(ModelError, match=message):
            check_adapters(options[name], source)
    check_adapters(other, source)
    with pytest.raises(ModelError, match=r"has another lm_head\.weight than the model"):
        Policy(tiny.config(folder, OBJECTIVE, lora=other.model_dump()), source, ALONE)


IN_4_BITS = {"rank": 4, "alpha": 8, "quantised": "nf4"}


def in_4_bits(folder, **lora):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    return Policy(tiny.config(folder, OBJECTIVE, lora={**IN_4_BITS, **lora}), find_model(str(folder)), ALONE)


@pytest.fixture(scope="module")
def trained(folder):
    policy = in_4_bits(folder)
    losses = [policy.update(minibatch, clip=True).loss for minibatch in tiny.minibatches(OBJECTIVE)]
    return SimpleNamespace(policy=policy, losses=losses)


@pytest.fixture(scope="module")
def plain(folder):
    """The same three steps by a plain loop."""
    model = with_peft(base(folder, "nf4"), rank=4, alpha=8)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=tiny.LEARNING_RATE, weight_decay=0.01)
    losses = []
    for minibatch in tiny.minibatches(OBJECTIVE):
        loss = plain_loss(model, minibatch, OBJECTIVE, True, "shaped", 1.0, None)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return SimpleNamespace(model=model, losses=losses)


def test_training_in_4_bits_is_the_plain_loop_and_engines_get_what_they_stand_for(trained, plain):
    assert trained.losses == pytest.approx(plain.losses, abs=2e-6)
    functional = pytest.importorskip("bitsandbytes.functional")
    layers = {name: module for name, module in plain.model.named_modules() if hasattr(module, "lora_A")}
    assert layers
    pushed = dict(trained.policy.weights())
    for name, layer in layers.items():
        base = layer.base_layer.weight
        expected = functional.dequantize_4bit(base.data, base.quant_state)
        expected = expected + layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        # As in the tests of whole weights: three steps of lr = 1e-3.
        torch.testing.assert_close(
            pushed[f"{name.removeprefix('base_model.model.')}.weight"], expected, rtol=0, atol=3e-5
        )
    own = dict(AutoModelForCausalLM.from_pretrained(trained.policy.model.config._name_or_path).named_parameters())
    assert {name: weight.shape for name, weight in pushed.items()} == {name: one.shape for name, one in own.items()}


def test_what_is_saved_is_the_model_that_was_trained(folder, trained, tmp_path):
    """Adapters for peft; and, where the run says so, a model that is not quantised."""
    trained.policy.save(tmp_path / "adapters")
    adapted = peft.PeftModel.from_pretrained(base(folder, "nf4"), tmp_path / "adapters")
    merged = in_4_bits(folder, result="merged")
    trained.policy.save_checkpoint(tmp_path / "states")
    merged.load_checkpoint(tmp_path / "states")
    merged.save(tmp_path / "merged")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(whole.config, "quantization_config")
    torch.testing.assert_close(logits(whole), logits(adapted), rtol=1e-4, atol=1e-4)


def test_what_zero_3_would_have_to_cut_is_refused_and_weights_in_4_bits_alone_are(folder):
    config = tiny.config(folder, OBJECTIVE, lora=IN_4_BITS)
    two = dataclasses.replace(ALONE, size=2)
    with pytest.raises(ConfigError, match=r"lora\.quantised nf4: ZeRO-3 does not cut weights in 4 bits"):
        Policy(config, find_model(str(folder)), two)
    with pytest.raises(ValueError, match=r"quantised weights cannot be trained"):
        tiny.config(folder, OBJECTIVE, lora={"quantised": "nf4"})
