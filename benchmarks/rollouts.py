"""Rollout engines in turns on the same prompts: `python -m benchmarks.rollouts OUT.json [options]`.

All engines that can run here have the same model and answer the same questions with the same sampling, round after
round in one process; weights are pushed between rounds. Training options may follow. OUT.json gets the numbers of every
timed round, and why engines cannot run here.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import requests
import torch

from benchmarks.programs import words
from benchmarks.timing import wait
from exgrpo.train.common.distributed import World, start
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.seeds import derive_seed
from exgrpo.train.config.options import Config
from exgrpo.train.config.recipe import parse_args
from exgrpo.train.data.files import read_rows
from exgrpo.train.data.prompts import PromptFormat
from exgrpo.train.data.questions import question_set
from exgrpo.train.metrics.utilisation import PhaseClock
from exgrpo.train.policy.policy import WholeWeights
from exgrpo.train.policy.source import find_model
from exgrpo.train.policy.tokenizer import DTYPES, load_pretrained
from exgrpo.train.rollout.engine import Request, RolloutEngine, Sampling, collect, training_settings
from exgrpo.train.rollout.registry import choose_engine, open_engine

ENGINES = ("transformers", "vllm", "server")
START_SECONDS = 300
GAP_PROMPTS, GAP_TOKENS = 4, 32  # for the comparison of log-probs


def start_server(config: Config, resources: ExitStack) -> str:
    """Start a server that runs until `resources` closes; return its address. Raise ConfigError if it does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    length = config.data.max_prompt_tokens + config.rollout.max_tokens
    options = {"port": port, "dtype": config.policy.dtype, "max-tokens": length}
    options |= {} if config.rollout.kv_cache_gib is None else {"kv-cache-gib": config.rollout.kv_cache_gib}
    server = subprocess.Popen(
        [sys.executable, "-m", "exgrpo.tools.serve", config.policy.path, *words(options)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    resources.callback(server.wait)
    resources.callback(stop_group, server.pid)
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        with suppress(requests.RequestException):
            if requests.get(f"{url}/health", timeout=5).ok:
                return url
        time.sleep(0.5)
    raise ConfigError(f"a server of {config.policy.path} does not start: try `python -m exgrpo.tools.serve`")


def stop_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def open_all(
    config: Config, world: World, resources: ExitStack, chosen: Sequence[str]
) -> tuple[dict[str, RolloutEngine], dict[str, str]]:
    """Open the chosen engines; return them and the reasons why others cannot run here, by name."""
    engines, reasons = {}, {}
    for name in chosen:
        try:
            servers = (start_server(config, resources),) if name == "server" else ()
            rollout = config.rollout.model_copy(update={"engine": name, "servers": servers})
            of_engine = config.model_copy(update={"rollout": rollout})
            settings = training_settings(of_engine, load_pretrained(config.policy.path, config.policy.overrides))
            engines[name] = open_engine(choose_engine(settings, world), settings, world)
        except ConfigError as error:
            reasons[name] = str(error)
        else:
            resources.callback(engines[name].close)
    return engines, reasons


def one_round(
    engine: RolloutEngine, weights: WholeWeights, prompts: list[np.ndarray], config: Config, seed: int
) -> dict[str, float]:
    """Push weights, wake, generate and sleep; return times and counts."""
    sampling, samples = Sampling(config.rollout.max_tokens, config.rollout.temperature), config.rollout.samples
    requests = [Request(prompt, samples, sampling, derive_seed(seed, "prompt", i)) for i, prompt in enumerate(prompts)]
    clock = PhaseClock()
    with clock("push"):
        engine.push_weights(weights)
        wait(weights.model.device)
    with clock("wake"):
        engine.wake()
    with clock("generate"):
        tokens = sum(len(answer.rollout.response) for answer in engine.generate(requests))
    with clock("sleep"):
        engine.sleep()
    seconds = clock.seconds["wake"] + clock.seconds.pop("generate")
    return {**clock.seconds, "seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}


@torch.no_grad()
def weight_gap(engine: RolloutEngine, weights: WholeWeights, prompts: list[np.ndarray], config: Config) -> float:
    """Return the mean absolute difference, in nats, between log-probs of the engine and of the pushed model."""
    sampling = Sampling(min(GAP_TOKENS, config.rollout.max_tokens), log_prob=True)
    requests = [Request(prompt, 2, sampling, derive_seed(config.seed, "gap", i)) for i, prompt in enumerate(prompts)]
    engine.push_weights(weights)
    engine.wake()
    answers = collect(requests, engine.generate(requests))
    engine.sleep()
    gaps = []
    for prompt, rollouts in zip(prompts, answers, strict=True):
        for rollout in rollouts:
            response = torch.from_numpy(rollout.response.astype(np.int64))
            ids = torch.cat([torch.from_numpy(prompt.astype(np.int64)), response])[None].to(weights.model.device)
            logits = weights.model(ids).logits[0, len(prompt) - 1 : -1].float().cpu()
            log_prob = logits.log_softmax(-1).gather(-1, response[:, None]).squeeze(-1)
            gaps.append((log_prob - torch.from_numpy(rollout.log_prob)).abs())
    return float(torch.cat(gaps).mean())


def measure(config: Config, rounds: int, chosen: Sequence[str]) -> dict[str, Any]:
    """Return the numbers of `rounds` rounds of each engine after a warm-up, and why others did not run."""
    with ExitStack() as resources:
        world = start(config.distributed.timeout_minutes)
        engines, reasons = open_all(config, world, resources, chosen)
        tokenizer = load_pretrained(config.policy.path, config.policy.overrides).tokenizer
        data, prompt_format = config.data, PromptFormat.from_options(config.data)
        rows = read_rows(data.train[0], split=data.train_split, limit=data.train_limit)
        questions = question_set(data.train[0], rows, tokenizer, prompt_format, limit=config.questions).questions
        prompts = [np.array(question.prompt, np.int32) for question in questions]
        model = find_model(config.policy.path, config.policy.overrides)
        weights = WholeWeights(model.load(DTYPES[config.policy.dtype], config.policy.attention).to(world.device))
        gaps = {name: weight_gap(engine, weights, prompts[:GAP_PROMPTS], config) for name, engine in engines.items()}
        numbers: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
        for number in range(rounds + 1):
            for name in sorted(engines, reverse=bool(number % 2)):
                seed = derive_seed(config.seed, "benchmark", number)
                of_round = one_round(engines[name], weights, prompts, config, seed)
                if number:
                    numbers[name].append(of_round)
        return {"rounds": numbers, "gaps": gaps, "reasons": reasons}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    own, rest = parser.parse_known_args(argv)
    numbers = measure(parse_args(rest), own.rounds, own.engines)
    if os.environ["RANK"] == "0":
        own.out.write_text(json.dumps(numbers), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
