"""OpenRLHF's own functions and its Actor on tiny models are the oracles, and full logits in float64."""

import importlib
import importlib.machinery
import inspect
import os
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

from exgrpo.integrations.openrlhf import log_probs_from_hidden, patch_actor
from tests.gloo import on_ranks

TEMPERATURE = 0.7


def import_openrlhf(monkeypatch):
    """Imports OpenRLHF's modules; flash-attn, which it imports and which builds on GPUs only, is stood in for.

    Of flash-attn it uses, on a CPU, what packs and unpacks sequences: transformers has the same functions.
    """
    for package in ("openrlhf", "peft", "pylatexenc", "deepspeed", "einops"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed; pip install --no-deps openrlhf==0.11.2 peft pylatexenc")
    import einops
    from transformers import modeling_flash_attention_utils as packing

    functions = {
        "unpad_input": packing._unpad_input,
        "pad_input": packing._pad_input,
        "index_first_axis": lambda tensor, indices: tensor[indices],
        "rearrange": einops.rearrange,
    }
    stand_ins = {"": {}, ".bert_padding": functions, ".utils": {}, ".utils.distributed": {"all_gather": None}}
    for name, contents in stand_ins.items():
        module = ModuleType(f"flash_attn{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(os.environ, "DS_ACCELERATOR", "cpu")
    yield importlib.import_module
    for name in [name for name in sys.modules if name.split(".")[0] == "openrlhf"]:
        del sys.modules[name]


openrlhf = pytest.fixture(import_openrlhf, name="openrlhf")


def case(dtype, tokens=(3, 11), width=16, vocabulary=101):
    hidden = torch.randn(*tokens, width).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width) / 2).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, tokens), torch.randn(tokens)


@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_from_hidden_are_those_of_the_full_logits(dtype, temperature):
    hidden, weight, labels, upstream = case(dtype)
    found = log_probs_from_hidden(hidden, weight, labels, temperature)
    logits = hidden.double() @ weight.double().T / temperature
    exact = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)  # of the same rounded inputs
    found, exact = (torch.autograd.grad((x * upstream).sum(), (hidden, weight)) for x in (found, exact))
    torch.testing.assert_close(found, exact, rtol=2 * torch.finfo(dtype).eps, atol=20 * torch.finfo(dtype).eps)


def make_actor(openrlhf, name="Qwen2", *, packing=False, **config):
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 211}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**sizes, **heads, **config)
    config._attn_implementation = "eager"
    actor = openrlhf("openrlhf.models").Actor(getattr(transformers, f"{name}ForCausalLM")(config))
    actor.temperature, actor.packing_samples = TEMPERATURE, packing
    return actor


def rollouts():
    """Prompts padded on the left, responses of 6 places padded on the right, as OpenRLHF makes them."""
    sequences = torch.randint(1, 211, (3, 13))
    attention_mask = torch.ones_like(sequences)
    attention_mask[0, :4] = attention_mask[2, :2] = 0
    attention_mask[1, 10:] = 0
    action_mask = attention_mask[:, -6:].bool()
    return sequences * attention_mask, attention_mask, action_mask


def learn(actor, sequences, attention_mask, action_mask, upstream):
    log_probs, output = actor(
        sequences, action_mask, attention_mask=attention_mask, return_output=True, return_entropy=True
    )
    entropy = output.entropy[:, -action_mask.shape[1] :] * action_mask
    gradients = torch.autograd.grad((log_probs, entropy), list(actor.parameters()), upstream)
    return log_probs.detach(), entropy.detach(), *gradients


@pytest.mark.parametrize(
    ("name", "packing", "config"),
    [
        ("Qwen2", False, {"tie_word_embeddings": True}),
        ("Qwen2", True, {"tie_word_embeddings": False}),
        ("Gemma2", False, {"head_dim": 8, "final_logit_softcapping": 5.0, "initializer_range": 0.3}),
        ("Granite", False, {"logits_scaling": 4.0, "initializer_range": 0.3}),
    ],
)
def test_a_patched_actor_gives_what_the_actor_gave(openrlhf, name, packing, config):
    actor = make_actor(openrlhf, name, packing=packing, **config)
    batch, upstream = rollouts(), tuple(torch.randn(2, 3, 6))
    expected = learn(actor, *batch, upstream)
    sequences, attention_mask, _ = batch
    all_expected = actor(sequences, attention_mask=attention_mask, return_logprobs=True)
    logits = actor(sequences, attention_mask=attention_mask, return_output=True, allgather_logits=True).logits
    undo = patch_actor(actor)
    torch.testing.assert_close(learn(actor, *batch, upstream), expected, rtol=1e-4, atol=1e-5)
    found = actor(sequences, attention_mask=attention_mask, return_logprobs=True)
    torch.testing.assert_close(found, all_expected, rtol=1e-4, atol=1e-5)
    output = actor(sequences, attention_mask=attention_mask, return_output=True, allgather_logits=True)
    torch.testing.assert_close(output.logits, logits, rtol=0, atol=0)
    undo()
    torch.testing.assert_close(learn(actor, *batch, upstream), expected, rtol=0, atol=0)


def test_no_logits_are_made_for_what_the_action_mask_leaves_out(openrlhf, monkeypatch):
    actor, (sequences, attention_mask, action_mask) = make_actor(openrlhf), rollouts()
    seen = []
    patch_actor(actor)
    module = sys.modules[patch_actor.__module__]
    linear_log_prob = module.linear_log_prob
    monkeypatch.setattr(
        module, "linear_log_prob", lambda *args, **options: seen.append(args[2]) or linear_log_prob(*args, **options)
    )
    _, output = actor(sequences, action_mask, attention_mask=attention_mask, return_output=True)
    assert output.logits is None
    assert [(labels != -100).sum() for labels in seen] == [action_mask.sum()]


def test_a_head_with_lora_is_refused_and_one_below_it_is_right(openrlhf):
    import peft

    batch, upstream = rollouts(), tuple(torch.randn(2, 3, 6))
    for modules in (["lm_head"], ["q_proj"]):
        actor = make_actor(openrlhf)
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=modules, init_lora_weights=False)
        actor.model = peft.get_peft_model(actor.model, config)
        if modules == ["lm_head"]:
            with pytest.raises(TypeError, match="torch.nn.Linear.*target_modules"):
                patch_actor(actor)
    for parameter in actor.parameters():
        parameter.requires_grad_(True)
    expected = learn(actor, *batch, upstream)
    patch_actor(actor)
    torch.testing.assert_close(learn(actor, *batch, upstream), expected, rtol=1e-4, atol=1e-5)


def test_patching_twice_and_vision_models_are_refused(openrlhf):
    actor = make_actor(openrlhf)
    theirs = [name for name in inspect.signature(actor.forward).parameters if name != "mm_inputs"]
    undo = patch_actor(actor)
    assert list(inspect.signature(actor.forward).parameters) == theirs
    with pytest.raises(ValueError, match="replaced already"):
        patch_actor(actor)
    undo()
    actor.is_vlm = True
    with pytest.raises(ValueError, match="vision-language"):
        patch_actor(actor)


def check_zero3(rank):
    """A parameter is empty outside of its module's forward and backward, on one rank too."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="1", DS_ACCELERATOR="cpu")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled, for minutes
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"train_batch_size": 1, "zero_allow_untested_optimizer": True, "zero_optimization": zero}
    with pytest.MonkeyPatch.context() as monkeypatch, contextmanager(import_openrlhf)(monkeypatch) as openrlhf:
        for tied in (False, True):
            torch.manual_seed(0)
            actor = make_actor(openrlhf, tie_word_embeddings=tied)
            (sequences, attention_mask, action_mask), upstream = rollouts(), tuple(torch.randn(2, 3, 6))
            expected = learn(actor, sequences, attention_mask, action_mask, upstream)
            optimizer = torch.optim.AdamW(actor.parameters(), lr=0.0)
            if tied:
                patch_actor(actor)
            actor.model, *_ = deepspeed.initialize(model=actor.model, optimizer=optimizer, config=config)
            if not tied:
                patch_actor(actor)
            log_probs, output = actor(
                sequences, action_mask, attention_mask=attention_mask, return_output=True, return_entropy=True
            )
            entropy = output.entropy[:, -action_mask.shape[1] :] * action_mask
            actor.model.backward((log_probs * upstream[0] + entropy * upstream[1]).sum())
            gradients = [deepspeed.utils.safe_get_full_grad(p) for p in actor.model.module.parameters()]
            found = log_probs.detach(), entropy.detach(), *gradients
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            actor.model.step()


@pytest.mark.long
def test_the_heads_weight_is_gathered_under_zero3(openrlhf, tmp_path):
    on_ranks(check_zero3, 1, tmp_path)
