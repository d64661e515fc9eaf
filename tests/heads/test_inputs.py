"""Adapted, frozen and quantised heads."""

import pytest
import torch

from exgrpo.heads.inputs import head_inputs, vocab_shard
from exgrpo.kernels import linear_log_prob

pytestmark = pytest.mark.usefixtures("one_thread")


def peft_model(**options):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.integrations import tiny

    assert transformers
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 12, "init_lora_weights": False, **options})
    return peft.get_peft_model(tiny.model("phi").double(), config).eval(), tiny.batch()


def compare_with_own_logits(model, batch):
    """The patched model against its own logits, gradients of what is trained included; unpatched at the end."""
    from exgrpo.integrations.transformers import patch_lm_head, unpatch_lm_head

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    own = model(batch["input_ids"]).logits.log_softmax(-1)
    target = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    log_prob = own.gather(-1, target.clamp(min=0)[..., None]).squeeze(-1) * (target != -100)
    entropy = -(own.exp() * own).sum(-1) * (target != -100)
    exact = torch.autograd.grad((log_prob * 3 + entropy).sum(), trained.values(), allow_unused=True)
    found = patch_lm_head(model)(**batch)
    assert "logits" not in found
    torch.testing.assert_close([found.log_prob, found.entropy], [log_prob, entropy])
    ours = torch.autograd.grad((found.log_prob * 3 + found.entropy).sum(), trained.values(), allow_unused=True)
    torch.testing.assert_close(dict(zip(trained, ours, strict=True)), dict(zip(trained, exact, strict=True)))
    unpatch_lm_head(model)
    return {name for name, gradient in zip(trained, ours, strict=True) if gradient is not None}


@pytest.mark.parametrize("options", [{}, {"lora_bias": True}, {"use_rslora": True}])
def test_lora_on_the_head(options):
    model, batch = peft_model(target_modules=["lm_head", "q_proj"], **options)
    reached = compare_with_own_logits(model, batch)
    assert any("lm_head.lora_A" in name for name in reached)
    assert any("lm_head.lora_B" in name for name in reached)
    with model.disable_adapter():
        inputs = head_inputs(model.get_output_embeddings(), torch.zeros(3, 32).double())
        assert inputs.weight is model.get_output_embeddings().base_layer.weight
    model.add_adapter("second", model.peft_config["default"])
    model.base_model.set_adapter(["default", "second"])
    compare_with_own_logits(model, batch)
    model.merge_adapter()
    assert head_inputs(model.get_output_embeddings(), torch.zeros(3, 32).double()).hidden.shape == (3, 32)


def test_dropout_of_lora_is_drawn_as_by_the_layer():
    model, _ = peft_model(target_modules=["lm_head"], lora_dropout=0.5)
    layer, hidden = model.get_output_embeddings().train(), torch.randn(6, 32).double()
    torch.manual_seed(7)
    own = layer(hidden)
    torch.manual_seed(7)
    inputs = head_inputs(layer, hidden)
    torch.testing.assert_close(torch.nn.functional.linear(*inputs), own)


def test_a_small_update_of_lora_survives_bfloat16():
    model, _ = peft_model(target_modules=["lm_head"])
    layer, hidden = model.get_output_embeddings(), torch.randn(64, 32).bfloat16()
    with torch.no_grad():
        layer.lora_B["default"].weight.mul_(1e-3)
        layer.base_layer.weight.copy_(layer.base_layer.weight.bfloat16())
        layer.base_layer.bias.copy_(layer.base_layer.bias.bfloat16())
    low = layer.lora_A["default"](hidden.double())
    update = low @ layer.lora_B["default"].weight.T * layer.scaling["default"]
    layer.base_layer.bfloat16()
    inputs = head_inputs(layer, hidden)
    assert inputs.weight.dtype == inputs.hidden.dtype == torch.bfloat16
    found = torch.nn.functional.linear(*(x.double() for x in inputs))
    found = found - torch.nn.functional.linear(hidden.double(), layer.base_layer.weight.double(), inputs.bias.double())
    assert (found - update).norm() < 2**-7 * update.norm()


def test_modules_to_save():
    model, batch = peft_model(target_modules=["q_proj"], modules_to_save=["lm_head"])
    reached = compare_with_own_logits(model, batch)
    assert any("lm_head.modules_to_save.default.weight" in name for name in reached)
    with model.disable_adapter():
        wrapper = model.get_output_embeddings()
        assert head_inputs(wrapper, torch.zeros(3, 32).double()).weight is wrapper.original_module.weight


def test_other_adapters_are_refused():
    model, _ = peft_model(target_modules=["lm_head"], use_dora=True)
    with pytest.raises(ValueError, match="Dora.*no plain LoRA; leave lm_head out"):
        head_inputs(model.get_output_embeddings(), torch.zeros(3, 32).double())
    peft = pytest.importorskip("peft")
    from tests.integrations import tiny

    other = peft.get_peft_model(tiny.model("llama"), peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]))
    with pytest.raises(ValueError, match="no plain LoRA"):
        head_inputs(other.get_output_embeddings(), torch.zeros(3, 32))


def test_adapters_added_after_the_patch_are_noticed():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from exgrpo.integrations.transformers import patch_lm_head
    from tests.integrations import tiny

    model = peft.get_peft_model(patch_lm_head(tiny.model("llama")), peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(RuntimeError, match="head was replaced after patch_lm_head"):
        model(**tiny.batch())


class Quantised(torch.nn.Module):
    """A layer as quantisation libraries make them: packed integers under a name of their own, or as the weight."""

    def __init__(self, weight=None):
        super().__init__()
        if weight is not None:
            self.weight = weight
        self.register_buffer("qweight", torch.zeros(4, 8, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_a_quantised_head_is_refused(dtype):
    weight = torch.nn.Parameter(torch.zeros(32, 8).to(dtype), requires_grad=False)
    with pytest.raises(TypeError, match=rf"Quantised.weight: .*{dtype} is quantised; .*modules_to_not_convert"):
        head_inputs(Quantised(weight), torch.zeros(3, 8))
    with pytest.raises(TypeError, match=r"Quantised has no weight \[V, D\]; .*leave the head out of quantisation"):
        head_inputs(Quantised(), torch.zeros(3, 8))


def test_plain_tensors_are_no_shards():
    with pytest.raises(TypeError, match="weight: expected a DTensor, got Tensor"):
        vocab_shard(torch.zeros(4, 2))


def test_the_example_of_the_documentation_runs():
    import doctest

    from exgrpo.heads import inputs

    failed, run = doctest.testmod(inputs, extraglobs={"torch": torch, "linear_log_prob": linear_log_prob})
    assert not failed
    assert run
