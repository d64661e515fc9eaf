"""What the real vLLM engine does, observed in a process of its own: `vllm_worker.py FOLDER DTYPE` prints JSON."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from exgrpo.train.distributed import start
from exgrpo.train.pretrained import DTYPES
from exgrpo.train.rollout import Sampling
from exgrpo.train.rollout.vllm_engine import VllmEngine
from exgrpo.train.weight_check import WeightMismatchError, check_engine
from tests.train import tiny
from tests.train.test_weight_check import FullLogitPolicy

EOS = (2, 5)
PROMPTS = [tiny.prompt(question) for question in range(6)]
COUNTS = [40, 1, 0, 3, 40, 40]
MAX_TOKENS = 12


class Unpacked(VllmEngine):
    """Pushes weights without the remedy for tied heads."""

    def push_weights(self, weights):
        self._reload(weights)
        self._llm.reset_prefix_cache()


def process_state():
    """Everything global that an engine might change."""
    legacy = np.random.get_state()  # noqa: NPY002
    return [
        torch.random.get_rng_state().tolist(),
        repr(random.getstate()),
        repr((legacy[0], legacy[1].tolist(), *legacy[2:])),
        torch.get_num_threads(),
        torch.set_num_threads.__name__,
        str(torch.get_default_dtype()),
        torch.is_grad_enabled(),
        dist.get_world_size(),
    ]


def plain(answers):
    return [
        [(r.response.tolist(), r.finished, None if r.log_prob is None else r.log_prob.tolist()) for r in of_prompt]
        for of_prompt in answers
    ]


def gap(policy, engine, dtype, temperature=0.7):
    """Largest and mean difference of the engine's log-probs from a full forward."""
    answers = engine.generate(PROMPTS, COUNTS, Sampling(MAX_TOKENS, temperature=temperature, log_prob=True), seed=3)
    differences = []
    for prompt, of_prompt in zip(PROMPTS, answers, strict=True):
        for rollout in of_prompt:
            tokens = torch.tensor([*prompt, *rollout.response])
            with torch.no_grad():
                logits = policy.model(tokens[None, :-1]).logits[0, len(prompt) - 1 :]
            full = logits.float().log_softmax(-1)[torch.arange(len(rollout.response)), tokens[len(prompt) :]]
            differences.append(np.abs(full.numpy() - rollout.log_prob))
    everything = np.concatenate(differences)
    return [float(everything.max()), float(everything.mean())]


def check(policy, engine, dtype):
    try:
        return check_engine(policy, engine, PROMPTS, dtype=dtype, max_tokens=MAX_TOKENS, seed=0)
    except WeightMismatchError as error:
        return str(error)


def observe(folder, dtype):
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    before = process_state()
    engine = Unpacked(
        str(folder),
        dtype=DTYPES[dtype],
        eos=EOS,
        max_prompt_tokens=8,
        max_tokens=MAX_TOKENS,
        batch_tokens=1000,
        kv_cache_gib=0.1,
    )
    seen = {"untouched by construction": process_state() == before}
    sampling = Sampling(MAX_TOKENS, log_prob=True)
    first = plain(engine.generate(PROMPTS, COUNTS, sampling, seed=1))
    seen["untouched by generate"] = process_state() == before
    seen["other seed"] = plain(engine.generate(PROMPTS, COUNTS, sampling, seed=2)) != first
    seen["same seed"] = plain(engine.generate(PROMPTS, COUNTS, sampling, seed=1)) == first
    seen["answers"] = first
    draws = engine.generate(PROMPTS[:1], [3000], Sampling(1), seed=4)[0]
    seen["first tokens"] = np.bincount([r.response[0] for r in draws], minlength=tiny.VOCABULARY).tolist()
    policy = FullLogitPolicy(folder, DTYPES[dtype])
    with torch.no_grad():
        logits = policy.model(torch.from_numpy(PROMPTS[0])[None].long()).logits[0, -1]
    seen["first probabilities"] = logits.float().softmax(-1).tolist()
    seen["gap at start"] = gap(policy, engine, dtype)
    seen["differing at start"] = engine.differing(policy.weights())
    generator = torch.Generator().manual_seed(0)
    for _, weight in policy.weights():
        weight.add_(torch.randn(weight.shape, generator=generator).to(weight.dtype), alpha=0.03)
    before = process_state()
    engine.push_weights(policy.weights())
    seen["without remedy"] = check(policy, engine, dtype)
    VllmEngine.push_weights(engine, policy.weights())
    seen["untouched by push"] = process_state() == before
    seen["with remedy"] = check(policy, engine, dtype)
    seen["gap after push"] = gap(policy, engine, dtype)
    for name, weight in policy.weights():
        if name.endswith(("layers.1.self_attn.k_proj.weight", "layers.0.input_layernorm.weight")):
            weight.mul_(1.5)
    seen["differing"] = engine.differing(policy.weights())
    engine.close()
    seen["world after close"] = dist.is_initialized() and dist.get_world_size()
    return seen


if __name__ == "__main__":
    start(timeout_minutes=2)
    print(json.dumps(observe(Path(sys.argv[1]), sys.argv[2])))
