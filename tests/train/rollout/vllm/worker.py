"""Observation of the real vLLM engine in separate processes.

`worker.py FOLDER RANKS NAME ...` observes one engine after another, over as many ranks as there are, and writes
FOLDER/NAME/seen.RANK.json. A name is tied or untied, a comma and a dtype; FOLDER/NAME holds its model.
"""

import dataclasses
import importlib
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from exgrpo.train.common.distributed import ALONE, start
from exgrpo.train.common.errors import WeightMismatchError
from exgrpo.train.policy.source import find_model
from exgrpo.train.policy.tokenizer import DTYPES
from exgrpo.train.rollout.engine import Sampling, collect
from exgrpo.train.rollout.stops import Stops
from exgrpo.train.rollout.vllm.availability import refusal
from exgrpo.train.rollout.vllm.engine import VllmEngine
from exgrpo.train.rollout.vllm.process import KEPT
from exgrpo.train.run.weight_check import check_engine
from tests.train import pieces, tiny
from tests.train.asking import continued, in_two_parts, requests_for
from tests.train.run.test_weight_check import FullLogitPolicy

CPU = torch.device("cpu")
EOS = (2, 5)
PROMPTS = [tiny.prompt(question) for question in range(6)]
COUNTS = [40, 1, 0, 3, 40, 40]
MAX_TOKENS = 12
CUT = {"top_p": 0.9, "top_k": 30, "min_p": 0.01, "allowed_tokens": True}
STOPS = ("b\n", "→", "é:", ":Q", "x1")
LONG_PROMPT, LONG_SAMPLES = np.arange(3, 43, dtype=np.int32), 5


class Unpacked(VllmEngine):
    """Pushes weights without the remedy for tied heads, where the head computes with a copy of its weight.

    Whether vLLM packs such a copy is the processor's: it has none in bf16 without AVX-512, where its head multiplies
    with the embedding itself, which a push reaches. So the copy is made here, on all processors.
    """

    def push_weights(self, weights):
        self._llm.apply(copy_tied_head)
        self._llm.reload(weights)


def copy_tied_head(model):
    if model.config.tie_word_embeddings:
        copied = model.lm_head.weight.data.clone()
        model.lm_head.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, copied, bias)


def make(folder, dtype, ranks, source=None, **changes):
    rollout = {"max_tokens": MAX_TOKENS, "batch_tokens": 5000, "kv_cache_gib": 0.1, "tensor_parallel": ranks}
    rollout |= {name: CUT[name] for name in ("top_p", "top_k", "min_p")} | changes
    settings = tiny.engine_settings(folder, dtype, eos=EOS, prompt_tokens=len(LONG_PROMPT), **rollout)
    return Unpacked(dataclasses.replace(settings, source=source or settings.source), ALONE)


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
        {name: os.environ.get(name) for name in KEPT},
    ]


def sample(engine, sampling, seed, prompts=PROMPTS, counts=COUNTS):
    asked = requests_for(prompts, counts, sampling, [seed] * len(prompts))
    return collect(asked, engine.generate(asked))


def plain(answers):
    return [
        [(r.response.tolist(), r.finished, None if r.log_prob is None else r.log_prob.tolist()) for r in of_prompt]
        for of_prompt in answers
    ]


def refused(action):
    try:
        action()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def watch_stream(engine, sampling, seed):
    """The answers one by one, while this process draws random numbers of its own."""
    asked = requests_for(PROMPTS, COUNTS, sampling, [seed] * len(PROMPTS))
    before = process_state()
    untouched, unfinished, finished = [], [], []
    for answer in engine.generate(asked):
        untouched.append(process_state() == before)
        random.random()
        torch.rand(3)
        before = process_state()
        unfinished.append(engine._llm.engine.get_num_unfinished_requests())
        finished.append(answer)
    return {
        "untouched by generate": all(untouched) and process_state() == before,
        "unfinished at answers": unfinished,
        "streamed": plain(collect(asked, finished)),
    }


def stop_early(engine, sampling, seed):
    asked = requests_for(PROMPTS, COUNTS, sampling, [seed] * len(PROMPTS))
    stream = engine.generate(asked)
    next(stream)
    stream.close()
    scheduler = engine._llm.engine.engine_core.engine_core.scheduler
    return {"left by a closed call": len(scheduler.requests)}


def stop(engine):
    """Answers one at a time, which draw alike with and without stop strings, and a call that ends early."""
    free = Sampling(MAX_TOKENS, log_prob=True)
    stopped = Sampling(MAX_TOKENS, log_prob=True, stop=Stops(STOPS, pieces.read))
    one_by_one = [
        [plain(sample(engine, sampling, seed, [PROMPTS[seed % 6]], [1]))[0][0] for sampling in (free, stopped)]
        for seed in range(40)
    ]
    steps, step = [], engine._llm.engine.step
    engine._llm.engine.step = lambda: steps.append("step") or step()
    sample(engine, Sampling(MAX_TOKENS, stop=Stops(tuple("abQ:x<\n\ufffdé→"), pieces.read)), 1, PROMPTS, [2] * 6)
    engine._llm.engine.step = step
    left = len(engine._llm.engine.engine_core.engine_core.scheduler.requests)
    return {"stopped": one_by_one, "left by stops": left, "steps": len(steps)}


def count_tokens(engine):
    engine.counts()
    sample(engine, Sampling(2), 0, [LONG_PROMPT, PROMPTS[0]], [LONG_SAMPLES, 1])
    counts, again = engine.counts(), engine.counts()
    return {
        "prompt tokens": [counts.prompt_tokens, again.prompt_tokens],
        "cached tokens": [counts.cached_tokens, again.cached_tokens],
    }


def gap(policy, engine, temperature=0.7, **more):
    """Largest and mean difference of the engine's log-probs from a full forward at the sampling temperature."""
    answers = sample(engine, Sampling(MAX_TOKENS, temperature=temperature, log_prob=True, **more), 3)
    return policy.gap(PROMPTS, answers, temperature)


def cut(policy, engine):
    """Differences among the allowed tokens, of whole and of stopped answers; and the numbers of these."""
    seen = [gap(policy, engine, **CUT), gap(policy, engine, **CUT, stop=Stops(STOPS, pieces.read))]
    sizes = [r.allowed_tokens.sizes.tolist() for of in sample(engine, Sampling(MAX_TOKENS, **CUT), 3) for r in of]
    return {"gaps of cut answers": seen, "words": sizes}


def begin(policy, engine):
    """Differences of answers that two calls have written, whole and cut; and how long they are."""
    gaps, lengths = [], []
    for more in ({}, {**CUT, "stop": Stops(STOPS, pieces.read)}):
        sampling = Sampling(MAX_TOKENS, log_prob=True, **more)
        answers = in_two_parts(engine, requests_for(PROMPTS, COUNTS, sampling, range(6)), 4)
        gaps.append(policy.gap(PROMPTS, answers, 1.0))
        lengths += [len(rollout.response) for of_prompt in answers for rollout in of_prompt]
    return {"gaps of begun answers": gaps, "lengths of begun answers": lengths}


def interrupt(policy, engine):
    """Differences of answers that a call left when it had enough, and another one finished; their lengths in both."""
    asked, got = requests_for(PROMPTS, COUNTS, Sampling(MAX_TOKENS, log_prob=True), range(6)), {}
    for answer in engine.generate(asked, enough=lambda: len(got) >= 5):
        got[answer.request, answer.sample] = answer.rollout
    begun = [[got.get((i, sample)) for sample in range(one.count)] for i, one in enumerate(asked)]
    whole = continued(engine, asked, begun)
    lengths = [[len(one.response) if one else 0 for of_prompt in of for one in of_prompt] for of in (begun, whole)]
    return {"gap of interrupted answers": policy.gap(PROMPTS, whole, 1.0), "lengths of interrupted answers": lengths}


def check(policy, engine, dtype):
    try:
        return check_engine(policy, engine, PROMPTS, dtype=dtype, max_tokens=MAX_TOKENS, seed=0)
    except WeightMismatchError as error:
        return str(error)


def watch_weights(engine, policy, dtype):
    seen = {"gap at start": gap(policy, engine), "differing at start": engine.differing(policy.weights())}
    generator = torch.Generator().manual_seed(0)
    for _, weight in policy.weights():
        weight.add_(torch.randn(weight.shape, generator=generator).to(weight.dtype), alpha=0.03)
    before = process_state()
    engine.push_weights(policy.weights())
    seen["without remedy"] = check(policy, engine, dtype)
    VllmEngine.push_weights(engine, policy.weights())
    seen["untouched by push"] = process_state() == before
    seen["with remedy"] = check(policy, engine, dtype)
    seen["gap after push"] = gap(policy, engine)
    seen["differing after push"] = engine.differing(policy.weights())
    for name, weight in policy.weights():
        if name.endswith(("layers.1.self_attn.k_proj.weight", "layers.0.input_layernorm.weight")):
            weight.mul_(1.5)
    seen["differing"] = engine.differing(policy.weights())
    seen["copies"] = engine._llm._copies
    return seen


def observe(folder, dtype, ranks):
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    before = process_state()
    engine = make(folder, dtype, ranks)
    seen = {"untouched by construction": process_state() == before, "ranks": engine.ranks}
    sampling = Sampling(MAX_TOKENS, log_prob=True)
    first = plain(sample(engine, sampling, 1))
    seen |= watch_stream(engine, sampling, 1) | stop_early(engine, sampling, 2) | stop(engine) | count_tokens(engine)
    seen["other seed"] = plain(sample(engine, sampling, 2)) != first
    seen["same seed"] = plain(sample(engine, sampling, 1)) == first
    seen["answers"] = first
    (draws,) = sample(engine, Sampling(1), 4, PROMPTS[:1], [3000])
    seen["first tokens"] = np.bincount([r.response[0] for r in draws], minlength=tiny.VOCABULARY).tolist()
    policy = FullLogitPolicy(folder, DTYPES[dtype])
    with torch.no_grad():
        logits = policy.model(torch.from_numpy(PROMPTS[0])[None].long()).logits[0, -1]
    seen["first probabilities"] = logits.float().softmax(-1).tolist()
    seen |= cut(policy, engine) | begin(policy, engine) | interrupt(policy, engine)
    seen |= watch_weights(engine, policy, dtype)
    engine.close()
    seen["world after close"] = dist.is_initialized() and dist.get_world_size()
    return seen


def copied(folder, dtype, ranks):
    """True if copying in place gives the parameters that a reload gives, where vLLM does not pack, as on GPUs."""
    layers = importlib.import_module("vllm.model_executor.layers.utils")
    packing, layers.dispatch_cpu_unquantized_gemm = layers.dispatch_cpu_unquantized_gemm, leave
    engine = make(folder, dtype, ranks)
    weights = [
        (name, weight + torch.randn_like(weight)) for name, weight in FullLogitPolicy(folder, DTYPES[dtype]).weights()
    ]
    states = []
    for _ in range(2):
        engine._llm.apply(lambda model: [parameter.data.zero_() for parameter in model.parameters()])
        engine._llm.reload(weights)
        states.append(engine._llm.apply(lambda model: {name: p.tolist() for name, p in model.named_parameters()}))
    copies = engine._llm._copies
    layers.dispatch_cpu_unquantized_gemm = packing
    engine.close()
    return copies and states[0] == states[1] and any(map(any, states[0]["model.embed_tokens.weight"]))


def leave(layer, remove_weight):
    layer.cpu_linear = torch.nn.functional.linear


def refusals(folder, ranks):
    """Return the errors of engines with impossible settings."""
    return {
        "small cache": refused(lambda: make(folder, "fp32", ranks, kv_cache_gib=1e-5)),
        "large cache": refused(lambda: make(folder, "fp32", ranks, kv_cache_gib=16384)),
        "refusal": refusal(find_model(str(folder)), CPU),
    }


def stretched(folder, ranks):
    """Differences, in nats, of an engine with overrides from the edited copy of its model and from the model itself."""
    copy = folder / "edited"
    copy.mkdir(exist_ok=True)
    values = json.loads((folder / "config.json").read_text())
    values["rope_parameters"] |= {"rope_theta": 40000}
    (copy / "config.json").write_text(json.dumps({**values, "max_position_embeddings": 16384}))
    (copy / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    source = find_model(str(folder), {"max_position_embeddings": 16384, "rope_theta": 40000})
    engine = make(folder, "fp32", ranks, source)
    answers = sample(engine, Sampling(MAX_TOKENS, log_prob=True), 5)
    engine.close()
    return {
        "gap to the edited copy": FullLogitPolicy(copy).gap(PROMPTS, answers, temperature=1.0),
        "gap to the model": FullLogitPolicy(folder).gap(PROMPTS, answers, temperature=1.0),
    }


def main(folder, ranks, *names):
    world = start(timeout_minutes=2)
    torch.set_num_threads(1)  # tiny products: threads would wait for each other
    for name in names:
        seen = observe(Path(folder) / name, name.split(",")[1], int(ranks))
        seen["copied"] = copied(Path(folder) / name, name.split(",")[1], int(ranks))
        if name == names[-1]:
            seen |= refusals(Path(folder) / name, int(ranks))
        if name.endswith("fp32"):
            seen |= stretched(Path(folder) / name, int(ranks))
        (Path(folder) / name / f"seen.{world.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")))
