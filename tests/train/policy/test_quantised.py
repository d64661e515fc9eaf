"""Adapters beside base weights in 4 bits, against peft's own wrapper of a quantised model and full logits."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from exgrpo.train.distributed import ALONE
from exgrpo.train.errors import ConfigError
from exgrpo.train.objective.settings import ObjectiveConfig
from exgrpo.train.policy.quantised import same_in_inference
from exgrpo.train.policy.zero3 import Policy
from exgrpo.train.pretrained.source import find_model
from tests.train import tiny
from tests.train.policy.test_policy import plain_loss, with_peft

peft = pytest.importorskip("peft", reason="peft is not installed: exgrpo[lora]")
functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed: exgrpo[lora]")

pytestmark = pytest.mark.usefixtures("one_thread")
OBJECTIVE = ObjectiveConfig(entropy_coef=0.01)
LORA = {"rank": 4, "alpha": 8, "quantised": "nf4"}
SETTINGS = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.float32,
    bnb_4bit_use_double_quant=True,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.save_model(folder, tied=False)
    return folder


def quantised(folder):
    """By transformers; on every processor with bitsandbytes' plain layout, for the fast one rounds."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=SETTINGS)
    same_in_inference(model)
    return model


def make(folder, **lora):
    return Policy(tiny.config(folder, OBJECTIVE, lora={**LORA, **lora}), find_model(str(folder)), ALONE)


@pytest.fixture(scope="module")
def trained(folder):
    policy = make(folder)
    losses = [policy.update(minibatch, OBJECTIVE, clip=True).loss for minibatch in tiny.minibatches(OBJECTIVE)]
    return SimpleNamespace(policy=policy, losses=losses)


@pytest.fixture(scope="module")
def plain(folder):
    """The same three steps by a plain loop."""
    model = with_peft(quantised(folder), rank=4, alpha=8)
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


def test_training_equals_the_plain_loop(trained, plain):
    assert trained.losses == pytest.approx(plain.losses, abs=2e-6)


def test_engines_get_what_4_bits_stand_for_and_the_adapters_added(trained, plain):
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
    adapted = peft.PeftModel.from_pretrained(quantised(folder), tmp_path / "adapters")
    merged = make(folder, result="merged")
    trained.policy.save_checkpoint(tmp_path / "states")
    merged.load_checkpoint(tmp_path / "states")
    merged.save(tmp_path / "merged")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(whole.config, "quantization_config")
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(whole(tokens).logits, adapted(tokens).logits, rtol=1e-4, atol=1e-4)


def test_what_zero_3_would_have_to_cut_is_refused(folder):
    config = tiny.config(folder, OBJECTIVE, lora=LORA)
    offloaded = config.distributed.model_copy(update={"offload_optimizer": True})
    with pytest.raises(ConfigError, match=r"lora\.quantised nf4: ZeRO-3 does not cut weights in 4 bits"):
        Policy(config.model_copy(update={"distributed": offloaded}), find_model(str(folder)), ALONE)


def test_quantised_weights_need_adapters(folder):
    with pytest.raises(ValueError, match=r"quantised weights cannot be trained"):
        tiny.config(folder, OBJECTIVE, lora={"quantised": "nf4"})
