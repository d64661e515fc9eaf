"""The policy's own module generates: as a copy would, and it is the trainer's again afterwards."""

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.config.objective import ObjectiveConfig
from exgrpo.train.policy.attention import ONE_TOKEN, PACKED
from exgrpo.train.policy.policy import Policy
from exgrpo.train.policy.source import find_model
from exgrpo.train.rollout.engine import Sampling
from exgrpo.train.rollout.transformers.engine import SharedEngine, TransformersEngine, shares_policy
from tests.train import tiny
from tests.train.configs import configured

pytestmark = pytest.mark.usefixtures("one_thread")
OBJECTIVE = ObjectiveConfig(entropy_coef=0.01)
PROMPTS = [tiny.prompt(question) for question in range(4)]
SAMPLING = Sampling(max_tokens=12, log_prob=True)
ADAPTERS = {"rank": 4, "alpha": 8}
CASES = {
    "all weights": {},
    "bf16": {"dtype": "bf16"},
    "adapters": {"lora": ADAPTERS},
    "4 bits": {"lora": {**ADAPTERS, "quantised": "nf4"}},
    "compiled": {"compile": "inductor"},  # of which a copy knows nothing
}


def make(folder, dtype="fp32", **options):
    """A policy after a step, and the engine that shares it."""
    policy = Policy(tiny.config(folder, OBJECTIVE, dtype=dtype, **options), find_model(str(folder)), ALONE)
    update(policy, 0)
    return policy, SharedEngine(tiny.engine_settings(folder, dtype, batch_tokens=100), ALONE, policy)


def update(policy, number):
    return policy.update(tiny.minibatches(OBJECTIVE)[number], clip=True)


def generate(engine):
    engine.wake()
    answers = tiny.rollouts(engine, PROMPTS, [3] * len(PROMPTS), SAMPLING, seed=0)
    engine.sleep()
    return [(prompt, answer) for prompt, of_prompt in zip(PROMPTS, answers, strict=True) for answer in of_prompt]


def log_probs(answers):
    return np.concatenate([answer.log_prob for _, answer in answers])


def scored(policy, answers):
    return policy.score(StepBatch.from_answers(*zip(*answers, strict=True)), 1.0).log_prob


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_a_copy_and_their_log_probs_the_trainers(name, folder, monkeypatch):
    if "lora" in CASES[name]:
        pytest.importorskip("peft", reason="peft is not installed")
    if name == "4 bits":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    monkeypatch.setattr("exgrpo.train.policy.model.BACKEND", "aot_eager")  # which needs no compiler
    policy, engine = make(folder, **CASES[name])
    copy = TransformersEngine(tiny.engine_settings(folder, CASES[name].get("dtype", "fp32"), batch_tokens=100), ALONE)
    copy.push_weights(policy.weights())
    graphs = counters["stats"]["unique_graphs"]
    ours, theirs = generate(engine), generate(copy)
    assert counters["stats"]["unique_graphs"] == graphs
    assert [answer.response.tolist() for _, answer in ours] == [answer.response.tolist() for _, answer in theirs]
    # A copy has the adapters added to its weights, which rounds them once; without adapters nothing differs.
    tolerance = 1e-4 if "lora" in CASES[name] else 0
    np.testing.assert_allclose(log_probs(ours), log_probs(theirs), rtol=0, atol=tolerance)
    # In bf16 a logit of about 4 is off by 2^-7 after each of some roundings.
    trainers = 0.1 if name == "bf16" else 1e-4
    np.testing.assert_allclose(log_probs(ours), scored(policy, ours), rtol=0, atol=trainers)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_generating_changes_nothing_for_the_trainer(dtype, folder):
    """Its state between steps, and the steps themselves, bit for bit, with activations that are computed again."""
    policy, engine = make(folder, dtype, checkpointing=True)
    alone, _ = make(folder, dtype, checkpointing=True)
    policy.engine.train()
    engine.wake()
    assert not policy.model.training
    assert policy.model.config._attn_implementation == ONE_TOKEN
    engine.wake()
    engine.sleep()
    assert policy.model.training
    assert policy.model.config._attn_implementation == PACKED
    for number in (1, 2):
        generate(engine)
        ours, theirs = update(policy, number), update(alone, number)
        assert (ours.loss, ours.grad_norm) == (theirs.loss, theirs.grad_norm)
    for (name, ours), (_, theirs) in zip(policy.weights(), alone.weights(), strict=True):
        assert torch.equal(ours, theirs), name


def test_weights_of_another_policy_are_named(folder):
    policy, engine = make(folder)
    other, _ = make(folder, optimizer={"lr": 5e-3})
    assert engine.differing(policy.weights()) == []
    engine.push_weights(other.weights())
    assert "model.layers.0.self_attn.q_proj.weight" in engine.differing(other.weights())


@pytest.mark.parametrize(
    ("options", "ranks", "shared"),
    [
        ({}, 1, True),
        ({}, 2, False),
        ({"policy.dtype": "bf16", "lora.rank": 4, "lora.quantised": "nf4"}, 1, True),
        ({"distributed.offload_optimizer": True}, 1, True),
        ({"rollout.engine": "vllm"}, 1, False),
    ],
)
def test_one_process_that_keeps_the_policy_whole_shares_it(options, ranks, shared):
    assert shares_policy(configured({"rollout.engine": "transformers"}, options), ranks) == shared
