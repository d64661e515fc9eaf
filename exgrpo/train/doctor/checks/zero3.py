"""Does a training step with ZeRO-3 work, on one and on all GPUs, with its checkpoint?"""

import json
import math
from functools import partial
from pathlib import Path

from exgrpo.train.doctor.check import Check, CheckFailedError, Given, Skipped
from exgrpo.train.doctor.machine import device, processes
from exgrpo.train.doctor.ranks import launch
from exgrpo.train.doctor.tiny import tiny_run
from exgrpo.train.recipe import to_yaml

REMEDY = "Look at the rows above it first: kernels, collectives, grading; then at the last lines of its output"
PROGRAM = Path(__file__).parents[2] / "main.py"


def check(everywhere: bool, given: Given) -> str:
    """Run the training program for one step as a user does, with the engine of transformers."""
    ranks = processes() if everywhere else 1
    if everywhere and ranks == 1:
        raise Skipped("this machine has one GPU: zero3_one is the same")
    # In fp32, one process does without ZeRO-3.
    dtype = {} if everywhere else {"policy.dtype": "bf16"}
    config = tiny_run(given, {"rollout.engine": "transformers", **dtype})
    recipe = given.folder / "tiny.yaml"
    recipe.write_text(to_yaml(config), encoding="utf-8")
    launch(ranks, given.folder, [str(PROGRAM), "--recipe", str(recipe)], REMEDY)
    text = (given.folder / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    step = next(record for record in map(json.loads, text.splitlines()) if "loss" in record)
    if problem := wrong(step):
        raise CheckFailedError(f"{problem}. {REMEDY}")
    return (
        f"{ranks} x {device().type}, {config.policy.dtype}: a step in {step['seconds']:.1f} s, "
        f"loss {step['loss']:.3g}, gradient norm {step['grad_norm']:.3g}"
    )


def wrong(step: dict[str, float]) -> str:
    """What cannot be in the metrics of a step; empty: nothing."""
    if step["skipped_updates"]:
        return "an optimiser step was skipped: its gradient is not finite"
    if not (math.isfinite(step["loss"]) and step["grad_norm"] > 0 and math.isfinite(step["grad_norm"])):
        return f"the loss is {step['loss']:g}, and the norm of its gradient {step['grad_norm']:g}"
    return ""


CHECKS = tuple(
    Check(f"zero3_{name}", partial(check, everywhere), 2, REMEDY)
    for name, everywhere in (("one", False), ("all", True))
)
