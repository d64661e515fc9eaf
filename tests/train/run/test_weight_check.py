"""The check at the start of a run: it passes for equal weights and stops the run for others."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import ModelError, RolloutError, WeightMismatchError
from exgrpo.train.common.records import Score
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.policy.tokenizer import DTYPES
from exgrpo.train.rollout.transformers.engine import TransformersEngine
from exgrpo.train.run.weight_check import check_engine
from tests.train import tiny


def among(logits, allowed_tokens):
    """The logits [R, V] of the ids allowed for each token; the others have no probability."""
    outside = torch.ones_like(logits, dtype=torch.bool)
    for row, words in enumerate(allowed_tokens.lists()):
        outside[row, torch.from_numpy(words).long() if len(words) else slice(None)] = False
    return logits.masked_fill(outside, -torch.inf)


class FullLogitPolicy:
    """Scores by full logits of a plain model."""

    def __init__(self, folder, dtype=torch.float32):
        self.world = ALONE
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    def weights(self):
        return ((name, parameter.data) for name, parameter in self.model.named_parameters())

    @torch.no_grad()
    def score(self, batch, temperature):
        log_probs = []
        for row, group in enumerate(batch.group):
            prompt, response = batch.prompt[group], torch.from_numpy(batch.token[batch.at(row)]).long()
            tokens = torch.cat([torch.from_numpy(prompt), response])
            logits = self.model(tokens[None, :-1]).logits[0, len(prompt) - 1 :].float()
            if batch.has("allowed_tokens"):
                logits = among(logits, batch.allowed_tokens[batch.at(row)])
            log_probs.append((logits / temperature).log_softmax(-1).gather(1, response[:, None])[:, 0])
        log_prob = torch.cat(log_probs).numpy()
        return Score(log_prob, np.zeros_like(log_prob))

    def gap(self, prompts, answers, temperature):
        """Largest and mean difference of the answers' log-probs from a full forward, in nats."""
        pairs = [(prompt, rollout) for prompt, rs in zip(prompts, answers, strict=True) for rollout in rs]
        batch = StepBatch.from_answers(*zip(*pairs, strict=True))
        of_tokens = np.abs(self.score(batch, temperature).log_prob - batch.engine_log_prob)
        return float(of_tokens.max()), float(of_tokens.mean())


def made(folder, dtype="fp32", *, tied=True, kind=TransformersEngine):
    """A policy, an engine with its weights, and the check of the two."""
    tiny.save_model(folder, tied=tied)
    engine = kind(tiny.engine_settings(folder, dtype, eos=(2,), batch_tokens=100), ALONE)
    policy, prompts = FullLogitPolicy(folder, DTYPES[dtype]), [tiny.prompt(question) for question in range(4)]

    def check(**cut):
        return check_engine(policy, engine, prompts, dtype=dtype, max_tokens=16, seed=0, cut=cut)

    return policy, engine, check


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_check_tells_equal_from_unequal_weights(tmp_path, dtype):
    policy, _, check = made(tmp_path, dtype)
    assert check() < {"fp32": 1e-5, "bf16": 3e-2, "fp16": 4e-3}[dtype]
    # One matrix of the last layer did not arrive.
    policy.model.model.layers[-1].mlp.down_proj.weight.data.zero_()
    lost = r"other weights on rank 0: model\.layers\.1\.mlp\.down_proj\.weight: rollouts"
    with pytest.raises(WeightMismatchError, match=f"rollout engine's log-probs differ from the trainer's .* {lost}"):
        check()


def test_a_model_whose_activations_fp16_cannot_hold_is_refused(tmp_path):
    policy, engine, check = made(tmp_path, "fp16")
    policy.model.model.layers[0].mlp.down_proj.weight.data.mul_(1e5).clamp_(-6e4, 6e4)
    engine.push_weights(policy.weights())
    with pytest.raises(ModelError, match=r"fp16: .* its activations exceed 65504, .* take policy\.dtype bf16"):
        check()


@pytest.mark.parametrize("cut", [{"top_p": 0.7}, {"top_k": 5, "min_p": 0.05}])
def test_a_cut_engine_agrees_among_the_tokens_that_it_allows_and_there_alone(tmp_path, cut):
    _, _, check = made(tmp_path)
    assert check(**cut, allowed_tokens=True) < 1e-5
    with pytest.raises(WeightMismatchError):  # the trainer would take the whole vocabulary
        check(**cut)


class Lost(TransformersEngine):
    def generate(self, requests):
        raise RolloutError("no server is left")
        yield


def test_a_model_that_computes_something_else_and_an_engine_that_cannot_generate_are_refused(tmp_path):
    _, _, check = made(tmp_path, kind=Lost)
    with pytest.raises(RolloutError, match="no server is left"):
        check()
    policy, _, check = made(tmp_path, tied=False)
    policy.model.lm_head.register_forward_hook(lambda module, inputs, logits: logits / 2)
    with pytest.raises(WeightMismatchError, match="No weight was found to differ"):
        check()
