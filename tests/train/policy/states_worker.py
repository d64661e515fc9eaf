"""Optimiser steps that go on from a folder: `states_worker.py FOLDER JOBS CASE...`.

Takes, for each [FIRST, LAST, FROM, TO] of the JSON list JOBS, the mini-batches FIRST to LAST - 1 of each case, from the
states in FOLDER/FROM/CASE where there are any, and leaves the states in FOLDER/TO/CASE.
"""

import json
import sys
from itertools import product
from pathlib import Path

from exgrpo.train.common.distributed import start
from exgrpo.train.config.objective import ObjectiveConfig
from exgrpo.train.policy import states
from exgrpo.train.policy.policy import Policy
from exgrpo.train.policy.source import find_model
from tests.train import tiny

OBJECTIVE = ObjectiveConfig(entropy_coef=0.01)
SCHEDULE = {"schedule": "linear", "warmup_steps": 1, "decay": "matrices", "weight_decay": 5.0}
CASES = {
    "fp32": {"optimizer": SCHEDULE},
    "adapters": {"lora": {"rank": 3, "alpha": 6}},
    "persistent": {"optimizer": SCHEDULE},
    "bf16": {"dtype": "bf16", "optimizer": SCHEDULE},
    "fp16": {"dtype": "fp16", "optimizer": SCHEDULE},
}


def main(folder: Path, jobs: list[tuple[int, int, str, str]], names: list[str]) -> None:
    world = start(timeout_minutes=2)
    tiny.allow_fp16()
    states.FILE_BYTES = 20_000  # several files for each rank
    for (first, last, origin, result), name in product(jobs, names):
        config = tiny.config(folder / "model", OBJECTIVE, **CASES[name])
        if name == "persistent":
            distributed = config.distributed.model_copy(update={"persistence_threshold": 1000})
            config = config.model_copy(update={"distributed": distributed})
        policy = Policy(config, find_model(config.policy.path), world)
        if (folder / origin / name).exists():
            policy.load_checkpoint(folder / origin / name)
        for minibatch in tiny.minibatches(OBJECTIVE)[first:last]:
            policy.update(minibatch, clip=True)
        policy.save_checkpoint(folder / result / name)


if __name__ == "__main__":
    folder, jobs, *names = [one for one in sys.argv[1:] if not one.startswith("--local_rank")]
    main(Path(folder), json.loads(jobs), names)
