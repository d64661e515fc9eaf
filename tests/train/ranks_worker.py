"""ZeRO-3 ranks with rollout servers: `ranks_worker.py FOLDER OUTPUT URL...` writes what each rank saw."""

import json
import sys
import time
from pathlib import Path

from exgrpo.train.common.distributed import start
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.config.options import ObjectiveConfig
from exgrpo.train.policy.policy import Policy
from exgrpo.train.policy.source import find_model
from exgrpo.train.rollout.engine import Sampling, collect
from exgrpo.train.rollout.server.engine import ServerEngine
from exgrpo.train.run.weight_check import check_engine
from tests.train import tiny
from tests.train.asking import requests_for


def observe(world, folder, urls):
    def make(*servers):
        return ServerEngine(tiny.engine_settings(folder, max_tokens=24, servers=servers), world, bucket_bytes=4000)

    seen = {}
    try:
        make("http://127.0.0.1:1", *urls)
    except ConfigError as error:
        seen["unreachable"] = str(error)
    engine = make(*urls)
    policy = Policy(tiny.config(folder, ObjectiveConfig()), find_model(str(folder)), world)
    for minibatch in tiny.minibatches(ObjectiveConfig()):
        policy.update(minibatch, clip=False)
    prompts = [tiny.prompt(question) for question in range(4)]
    try:
        seen["before"] = check_engine(policy, engine, prompts, dtype="fp32", max_tokens=12, seed=0)
    except RuntimeError as error:
        seen["before"] = type(error).__name__
    engine.push_weights(policy.weights())
    seen["after"] = check_engine(policy, engine, prompts, dtype="fp32", max_tokens=12, seed=0)
    mine = prompts[world.rank :: world.size]
    time.sleep(2 * world.rank)  # no rank tells servers to do anything else while another one's answers are missing
    asked = requests_for(mine, [5] * len(mine), Sampling(12), range(len(mine)))
    answers = collect(asked, engine.generate(asked))
    seen["answers"] = sum(len(of_prompt) for of_prompt in answers)
    seen["differing"] = engine.differing(policy.weights())
    seen["prompt tokens"] = engine.counts().prompt_tokens
    engine.close()
    return seen


if __name__ == "__main__":
    folder, output, *urls = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    world = start(timeout_minutes=4)
    seen = observe(world, Path(folder), urls)
    (Path(output) / f"{world.rank}.json").write_text(json.dumps(seen))
