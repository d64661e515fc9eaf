"""A run that trains adapters: what it saves, and how it goes on."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from exgrpo.train.common.errors import ConfigError, ModelError
from exgrpo.train.common.functions import ASSETS
from exgrpo.train.config.policy import LoraConfig, located
from exgrpo.train.policy.adapters import add_adapters
from tests.train.launch import MAIN, completed
from tests.train.run.test_run import SMALL, continued, records

peft = pytest.importorskip("peft", reason="peft is not installed")


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)], ids=["1 rank", "2 ranks"])
def runs(request, tmp_path_factory):
    """A run that saves adapters, and one that went on from its middle and saved the model with them added."""
    root = tmp_path_factory.mktemp("runs")
    arguments = ("--lora.rank=4", "--optimizer.lr=1e-3", "--checkpoint.every=2", f"--output.folder={root}")
    done = completed(MAIN, *SMALL, *arguments, "--preflight=off", ranks=request.param)
    assert "preflight: " not in done.stdout
    return root / "small", continued(root / "small", "--lora.result=merged", ranks=request.param)


def steps(folder):
    """The metrics of the steps that time does not change."""
    kept = ("step", "reward", "loss", "grad_norm", "entropy", "replayed")
    return [{name: record[name] for name in kept} for record in records(folder) if "reward" in record]


def test_a_run_that_goes_on_is_the_same_run_from_checkpoints_of_what_is_trained_alone(runs):
    straight, resumed = runs
    assert len(steps(straight)) == 4
    assert steps(resumed) == steps(straight)
    shards = sum(file.stat().st_size for file in (straight / "checkpoints" / "step_00000004" / "policy").rglob("*"))
    assert shards < 4 * sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(ASSETS / "arithmetic").parameters())
    with pytest.raises(ModelError, match=r"holds adapters and no model: name .*, and --lora\.path .+/model "):
        located(str(straight / "model"))


def test_adapters_of_peft_and_the_merged_model_are_the_same(runs):
    straight, resumed = runs
    base = AutoModelForCausalLM.from_pretrained(ASSETS / "arithmetic")
    start = {name: weight.clone() for name, weight in base.named_parameters()}
    adapted = peft.PeftModel.from_pretrained(base, straight / "model").merge_and_unload()
    assert not (resumed / "model" / "adapter_config.json").exists()  # of the run that it is a copy of
    merged = AutoModelForCausalLM.from_pretrained(resumed / "model")
    moved = 0.0
    for (name, ours), theirs in zip(merged.named_parameters(), adapted.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        moved = max(moved, (ours - start[name]).abs().max().item())
    assert moved > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": True}, "lora.head: the head of this model is its embedding, which has no adapter; leave it out"),
        ({"targets": ["embed_tokens"]}, "lora.targets: model.embed_tokens: no linear layer; leave it out"),
        ({"targets": ["q_porj"]}, r"lora.targets: Target modules .*q_porj.* not found in the base model"),
    ],
    ids=["head", "embedding", "unknown"],
)
def test_layers_that_can_have_no_adapter_are_named(options, message):
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "arithmetic")
    with pytest.raises(ConfigError, match=message):
        add_adapters(model, LoraConfig(rank=4, **options), seed=0)
