"""Three real ExGRPO steps of each run; rank 0 saves losses and weights.

Argument: JSON of the runs: of each the model's folder, the output folder and changes of the options.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.ops import __compatible_ops__

from tests.integrations.trl_trainers import exgrpo


def main(runs: list[tuple[str, str, dict]]) -> None:
    __compatible_ops__["deepspeed_shm_comm"] = False  # only inference would use it
    if any("deepspeed" in changes for *_, changes in runs):
        deepspeed.init_distributed("gloo")  # on CPUs nothing else does before the model is loaded in shards
    for model, output, changes in runs:
        train(model, Path(output), changes)


def train(model: str, output: Path, changes: dict) -> None:
    trainer = exgrpo(output, Path(model), **{"per_device_train_batch_size": 8, **changes})
    trainer.train()
    trainer.save_model(str(output / "model"))  # gathers under ZeRO-3
    if trainer.accelerator.is_main_process:
        sharded = any(getattr(p, "ds_numel", 0) > p.numel() for p in trainer.model.parameters())
        result = {"log": trainer.state.log_history, "asked": trainer.asked, "sharded": sharded}
        (output / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(sys.argv[-1]))  # the launcher puts --local_rank first
