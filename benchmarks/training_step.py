"""Training steps of exgrpo: `python -m benchmarks.training_step OUT.json [training options]`.

OUT.json gets the measurements of each of `--steps` steps. With the environment variable STEP_TRACE a profiler follows
the last one, which takes longer then, and writes its operators and GPU kernels to that file in Chrome's format.
"""

import json
import math
import os
import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from torch.profiler import profile

from benchmarks.memory import program_peak
from exgrpo.train.common.distributed import start
from exgrpo.train.config.recipe import parse_args
from exgrpo.train.metrics.utilisation import FORWARD, Utilisation
from exgrpo.train.run.build import read_inputs
from exgrpo.train.run.loop import Run
from exgrpo.train.run.startup_checks import check_startup
from exgrpo.train.trainer import StepResult

PHASES = ("select", "generate", "grade", "score", "update", "push")


def facts_of(result: StepResult | None, utilisation: Utilisation) -> dict[str, Any]:
    """Return the measurements of a step, with the share of the matrix rate per phase."""
    assert result is not None, "every question is retired: use fewer rounds or more questions"
    metrics = result.metrics
    used = utilisation.metrics(result.work, metrics)
    shares = {phase: used[f"mfu/{phase}"] for phase in (*FORWARD, "update")}
    return {
        **program_peak(),
        "mfu": {phase: share for phase, share in shares.items() if not math.isnan(share)},
        "phases": {phase: metrics[f"seconds/{phase}"] for phase in PHASES},
        "generated_tokens": int(result.batch.length[result.batch.fresh].sum()),
        "replayed": metrics["replayed"],
        **({"mismatch": metrics["mismatch/mean"]} if "mismatch/mean" in metrics else {}),
    }


def main(argv: list[str]) -> int:
    out, config = Path(argv[0]), parse_args(argv[1:])
    steps, trace = [], os.environ.get("STEP_TRACE")
    with ExitStack() as resources:
        inputs = read_inputs(config, check_startup(config, resources))
        run = Run(config, inputs, start(config.distributed.timeout_minutes, len(os.sched_getaffinity(0))), resources)
        for step in range(1, config.steps + 1):
            begin = time.perf_counter()
            with profile() if trace and step == config.steps else nullcontext() as followed:
                result = run.trainer.step(step)
            steps.append({"seconds": time.perf_counter() - begin, **facts_of(result, run.utilisation)})
            if followed:
                followed.export_chrome_trace(trace)
    out.write_text(json.dumps(steps), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
