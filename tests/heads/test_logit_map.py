"""What models do with their logits, against their configurations and known maps."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from exgrpo.heads.logit_map import LogitMap, measure
from exgrpo.integrations.transformers import patch_lm_head, unpatch_lm_head
from tests.integrations import tiny
from tests.programs import python

pytestmark = pytest.mark.usefixtures("one_thread")

MAPS = {
    "gemma2": LogitMap(1.0, 3.0),
    "cohere": LogitMap(1 / 0.3),
    "granite": LogitMap(4.0),
    "falcon_h1": LogitMap(2.0),
    "nanochat": LogitMap(1.0, 15.0),
    **dict.fromkeys(("mamba", "llama", "mixtral", "gpt2", "opt"), LogitMap()),
}


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_scale_and_softcap_are_found_to_the_last_digit(name, direct):
    assert measure(tiny.model(name), direct=direct) == MAPS[name]


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite", "llama"])
def test_no_weight_is_needed(name):
    """Parameters are on the meta device, or empty as ZeRO-3 leaves them."""
    assert measure(tiny.model(name).to("meta"), direct=True) == MAPS[name]
    empty = tiny.model(name)
    for parameter in empty.parameters():
        parameter.data = torch.empty(0)
    assert measure(empty, direct=True) == MAPS[name]


def test_hidden_states_that_change_before_the_head_are_refused_where_they_are_not_seen():
    model = tiny.model("minicpm3")  # which divides them
    assert measure(model, direct=False) == LogitMap()
    with pytest.raises(ValueError, match="MiniCPM3ForCausalLM changes its hidden states between its decoder and its"):
        measure(model, direct=True)


def with_logits(change):
    """A model whose forward does more with its logits."""
    model = tiny.model("llama")
    own = model.forward

    def forward(*args, **kwargs):
        output = own(*args, **kwargs)
        output.logits = change(output.logits)
        return output

    model.forward = forward
    return model


def test_a_scale_in_place_is_found():
    assert measure(with_logits(lambda logits: logits.mul_(2)), direct=True) == LogitMap(0.5)


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits + 1,
        lambda logits: -logits,
        lambda logits: logits.tanh() * 2 + logits,
        lambda logits: logits.clamp(-30, 30),
        lambda logits: logits.masked_fill(torch.arange(67) == 2, -torch.inf),
        lambda logits: logits[:, -1:],
    ],
    ids=["moved", "negative", "partly capped", "clamped", "masked", "last"],
)
def test_another_map_is_refused(change):
    model = with_logits(change)
    forward = model.forward
    with pytest.raises(ValueError, match="LlamaForCausalLM does more with its logits"):
        measure(model, direct=True)
    assert model.forward is forward


def test_a_head_that_is_called_twice_is_refused():
    model = tiny.model("llama")
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs) and own(*args, **kwargs)
    with pytest.raises(ValueError, match="calls its head 2 times"):
        measure(model, direct=False)


def test_too_little_memory_is_told_by_whoever_computes_with_the_map():
    model = tiny.model("llama")
    patch_lm_head(model, memory=1 << 30)
    tokens = torch.arange(6)[None]
    assert model(tokens, labels=tokens).log_prob.shape == (1, 6)
    unpatch_lm_head(model)
    with pytest.raises(ValueError, match=r"memory: a call on \d+ tokens .* needs \d+ bytes at least, got 10$"):
        patch_lm_head(model, memory=10)


def test_heads_need_torch_alone():
    """The room lies below the trainer and the drop-ins, and is there without transformers."""
    program = """
import sys
for name in ("numpy", "transformers", "peft", "deepspeed"):
    sys.modules[name] = None
import torch
from exgrpo.heads import forwards, inputs, inside, logit_map
head = torch.nn.Linear(4, 6)
inside.open_head(head)
assert inside.compute(head, torch.zeros(3, 4), lambda head: torch.nn.functional.linear(*head)).shape == (3, 6)
assert not any(name.startswith(("exgrpo.train", "exgrpo.integrations.t")) for name in sys.modules)
"""
    python("-W", "ignore", "-c", program)
