"""PolicyModel against the model's own logits, also of models that scale or cap them.

Tolerance: twice what plain torch in float32 on the model's own logits is off, and one part in a million, for
another order of summation.
"""

import copy
import dataclasses
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.config.objective import MethodOptions, ObjectiveConfig
from exgrpo.train.policy.batch import MicroBatch
from exgrpo.train.policy.loss import LossTerms
from exgrpo.train.policy.model import PolicyModel
from exgrpo.train.policy.policy import Policy
from exgrpo.train.policy.source import find_model
from tests.integrations import tiny
from tests.kernels.support import needs_inductor
from tests.train import tiny as of_trainer

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = ["granite", "cohere", "gemma2", "llama"]  # divided, multiplied, capped, none of these
CLIP, BETA, COEF, NORMALIZER = (0.2, 0.2), 0.1, 0.02, 13.0
OBJECTIVE = ObjectiveConfig(clip=CLIP, beta=BETA)


def micro_batch(model, temperature, *, cut=False):
    """Two rows, the second one replayed; the old log-probs are near the model's, on both sides of the clip range.

    With `cut`, tokens come from 1 to 30 words, or from all.
    """
    inputs = tiny.batch()
    target = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    own, tokens = (target >= 0).sum(1), int((target >= 0).sum())
    of_rows = [torch.tensor(values)[:, None].expand(target.shape) for values in ([0.7, -0.4], [False, True])]
    sets = allowed_sets(target) if cut else None
    batch = MicroBatch(inputs["input_ids"], target, tokens, torch.zeros(0), *of_rows, own, tokens, allowed_tokens=sets)
    log_prob = own_scores(model, batch, temperature)[0].detach()
    noise = torch.randn(target.shape, generator=torch.Generator().manual_seed(3))
    old = ((log_prob + 0.3 * noise) * (target >= 0)).float()
    return dataclasses.replace(batch, old_log_prob=old)


def allowed_sets(target):
    """Ids and offsets of sets for the tokens of a target [B, L]."""
    sizes = torch.tensor([0, 1, 2, 5, 30]).repeat(target.numel())[: target.numel()] * (target.flatten() >= 0)
    generator = torch.Generator().manual_seed(4)
    others = [torch.randperm(tiny.VOCABULARY, generator=generator) for _ in sizes]
    sets = [
        torch.cat([of.view(1), other[other != of]])[:size]
        for of, other, size in zip(target.flatten(), others, sizes, strict=True)
    ]
    return torch.cat(sets).int(), torch.nn.functional.pad(sizes.cumsum(0), (1, 0))


def own_scores(model, batch, temperature):
    """Log-probs and entropies from the model's own logits, [B, L] in the model's dtype."""
    logits = model(batch.tokens).logits / temperature
    outside = torch.zeros(logits.shape, dtype=torch.bool)
    if batch.allowed_tokens is not None:
        for flags, start, end in zip(
            outside.flatten(0, 1), batch.allowed_tokens[1], batch.allowed_tokens[1][1:], strict=False
        ):
            flags[:] = end > start
            flags[batch.allowed_tokens[0][start:end].long()] = False
    log_probs = logits.masked_fill(outside, -torch.inf).log_softmax(-1)
    active = batch.target >= 0
    own = log_probs.gather(-1, batch.target.clamp(min=0)[..., None])[..., 0]
    return own * active, -(log_probs.exp() * log_probs.masked_fill(outside, 0)).sum(-1) * active


def own_loss(model, batch, temperature):
    """The paper's objective, written out."""
    log_prob, entropy = own_scores(model, batch, temperature)
    active = (batch.target >= 0).to(log_prob.dtype)
    ratio = torch.exp(log_prob - batch.old_log_prob.to(log_prob.dtype))
    advantage = batch.advantage.to(log_prob.dtype)
    clipped = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP[0], 1 + CLIP[1]) * advantage)
    surrogate = torch.where(batch.replayed, ratio / (ratio + BETA) * advantage, clipped)
    return -((surrogate + COEF * entropy) * active).sum() / NORMALIZER


def gradient(model):
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])


def assert_as_near(found, plain, exact):
    error, of_plain = ((value.double() - exact).norm() for value in (found, plain))
    assert exact.norm() > 0
    assert error <= 2 * of_plain + 1e-6 * exact.norm(), (error, of_plain, exact.norm())


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", MODELS)
def test_scores_and_loss_are_those_of_the_models_own_logits(name, temperature, cut):
    plain = tiny.model(name)
    model, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    batch = micro_batch(exact, temperature, cut=cut)
    policy = PolicyModel(model)

    scores = policy(batch, temperature)
    for values in zip(
        scores, own_scores(plain, batch, temperature), own_scores(exact, batch, temperature), strict=True
    ):
        assert_as_near(*values)

    result = policy(batch, LossTerms(MethodOptions(objective=OBJECTIVE, temperature=temperature), NORMALIZER, COEF))
    losses = [own_loss(one, batch, temperature) for one in (plain, exact)]
    assert_as_near(result.loss, *losses)
    assert 0 < result.clipped.sum() < (batch.target >= 0).sum()
    for loss in (result.loss, *losses):
        loss.backward()
    assert_as_near(*(gradient(one) for one in (model, plain, exact)))


def test_a_model_that_does_more_is_refused():
    with pytest.raises(ValueError, match="MiniCPM3ForCausalLM changes its hidden states between its decoder and its"):
        PolicyModel(tiny.model("minicpm3"))
    shifted = tiny.model("llama")
    shifted.lm_head.register_forward_hook(lambda head, args, logits: logits + torch.arange(logits.shape[-1]))
    with pytest.raises(ValueError, match="LlamaForCausalLM does more with its logits than a softcap and a scale"):
        PolicyModel(shifted)


def policy_of(folder, **options):
    return Policy(of_trainer.config(folder, OBJECTIVE, **options), find_model(str(folder)), ALONE)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_an_update_has_no_dropout(name, tmp_path):
    shape = {**tiny.SHAPE, **tiny.ARCHITECTURES[name], "vocab_size": of_trainer.VOCABULARY}
    config = AutoConfig.for_model(name, **shape)
    assert 0.1 in config.to_dict().values()
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = policy_of(tmp_path)
    minibatch = of_trainer.minibatches(OBJECTIVE)[0]
    before = policy.score(minibatch.batch, 1.0)
    assert policy.update(minibatch, clip=True, keep_scores=True).scores.log_prob == pytest.approx(before.log_prob)


def gradients_by_pass(policy):
    """Of the trained parameters, by pass of some mini-batches: passes of many lengths."""
    policy.engine.train()
    parameters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    for minibatch in of_trainer.minibatches(OBJECTIVE):
        terms = LossTerms.from_minibatch(minibatch, policy.method, policy.surrogate, ranks=1, clip=True, term="shaped")
        for numbers in policy.layout.plan(minibatch.batch, policy.budget, 1)[0]:
            rows = policy.layout.rows(minibatch.batch.take(np.array(numbers)), torch.device("cpu"))
            found = torch.autograd.grad(policy.engine(rows, terms).loss, parameters)
            yield rows.tokens.shape[1], torch.cat([one.double().flatten() for one in found])


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("aot_eager", {"checkpointing": True}),
        pytest.param("aot_eager", {"lora": {"rank": 4}}, marks=pytest.mark.long),
        pytest.param("inductor", {}, marks=[needs_inductor, pytest.mark.long]),
    ],
)
def test_compiled_layers_have_the_gradients_of_plain_ones_and_are_compiled_at_the_start_alone(
    backend, options, tmp_path, monkeypatch
):
    """In float64 plain layers are exact but for their norms, which transformers computes in float32."""
    folder = tmp_path / "model"
    of_trainer.save_model(folder, tied=True)
    plain, exact = (policy_of(folder, **options) for _ in range(2))
    exact.engine.module.double()
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr("exgrpo.train.policy.model.BACKEND", backend)
    policy = policy_of(folder, compile="inductor", **options)
    graphs = counters["stats"]["unique_graphs"]
    assert 0 < graphs < 16  # parts of a layer, with and without gradients
    lengths = set()
    for (length, found), (_, of_plain), (_, right) in zip(*map(gradients_by_pass, (policy, plain, exact)), strict=True):
        lengths.add(length)
        assert_as_near(found, of_plain, right)
    policy.score(of_trainer.step_batch(), 1.0)
    assert len(lengths) > 4
    assert counters["stats"]["unique_graphs"] == graphs
    policy.save(tmp_path / "compiled")
    plain.save(tmp_path / "plain")
    name = "adapter_model.safetensors" if "lora" in options else "model.safetensors"
    assert load_file(tmp_path / "compiled" / name).keys() == load_file(tmp_path / "plain" / name).keys()


def floats(change, values):
    return [change(one) if torch.is_tensor(one) and one.is_floating_point() else one for one in values]


def wrong_output(graph, inputs):
    return lambda *values: floats(lambda one: 1.05 * one, graph(*values))


def wrong_gradient(graph, inputs):
    return lambda *values: floats(lambda one: one.detach() + 1.05 * (one - one.detach()), graph(*values))


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (wrong_gradient, "a result of shape .* is off by"),
        pytest.param("aot_eager", None, marks=pytest.mark.long),
    ],
)
def test_compiled_layers_are_taken_where_they_give_what_plain_ones_do(backend, said, tmp_path, monkeypatch):
    """On GPUs unless an option says otherwise; here on a CPU, with a compiler that scales what it compiles by 1.05."""
    of_trainer.save_model(tmp_path, tied=False)
    monkeypatch.setattr("exgrpo.train.policy.model.BACKEND", backend)
    plain = policy_of(tmp_path, compile="auto", dtype="bf16")  # as on all CPUs
    assert not plain.compiled
    monkeypatch.setattr("exgrpo.train.policy.policy.COMPILED_ON", ("cpu",))
    torch._dynamo.reset()
    policy = policy_of(tmp_path, compile="auto", dtype="bf16")
    assert policy.compiled == (said is None)
    # Compiling leaves no gradient for the first step; in bf16 a head adds to its sum by itself, whatever is asked for.
    assert all(master.grad is None for master in policy.engine.masters.values())
    if said:
        assert re.search(said, policy.plain_layers)
        scores = (one.score(of_trainer.step_batch(), 1.0).log_prob for one in (policy, plain))
        assert np.array_equal(*scores)


def test_compiled_layers_with_other_log_probs_are_refused_where_they_are_asked_for(tmp_path, monkeypatch):
    of_trainer.save_model(tmp_path, tied=False)
    monkeypatch.setattr("exgrpo.train.policy.model.BACKEND", wrong_output)
    torch._dynamo.reset()
    said = "log-probs differ from those of plain layers by"
    with pytest.raises(ConfigError, match=f"^policy.compile inductor fails: .*{said}.*; take none$"):
        policy_of(tmp_path, compile="inductor")


def test_layers_that_cannot_be_compiled_are_refused(tmp_path):
    """Under ZeRO-3 and with experts."""
    of_trainer.save_model(tmp_path / "dense", tied=True)
    tiny.model("qwen3_moe").save_pretrained(tmp_path / "experts")
    with pytest.raises(ConfigError, match="^policy.compile inductor is for one process, dense layers and"):
        policy_of(tmp_path / "experts", compile="inductor")
    config = of_trainer.config(tmp_path / "dense", OBJECTIVE, compile="inductor")
    with pytest.raises(ConfigError, match="^policy.compile inductor is for one process"):
        Policy(config, find_model(config.policy.path), dataclasses.replace(ALONE, size=2))


def test_a_compiler_that_fails_is_told_in_one_line(tmp_path, monkeypatch):
    of_trainer.save_model(tmp_path, tied=True)
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, str(tmp_path / "no-such-compiler")))
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    torch._dynamo.reset()
    with pytest.raises(ConfigError, match=r"^policy.compile inductor fails: .*compiler.*; take none$"):
        policy_of(tmp_path, compile="inductor")
