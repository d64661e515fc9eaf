"""The checks of `exgrpo doctor`, one process each: `python -m exgrpo.tools.checks NAME RECIPE FOLDER PARENT`.

It writes its finding into FOLDER. The doctor itself does not import torch.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from exgrpo.train.common.errors import ExgrpoError
from exgrpo.train.common.process import end_group_with_parent, leave, run_program
from exgrpo.train.config.options import Config
from exgrpo.train.config.recipe import DEFAULT_RUN, load_recipe, merged, read_recipe, to_yaml, validate

FINDING, LOG = "finding.json", "log"
BACKENDS = ("cpu", "cuda", "torch", "triton")
"""Copy of `exgrpo.kernels.dispatch.BACKENDS`, whose module imports torch."""
ON_CPU = 2  # processes of `step_all` without a GPU
SIZES = {
    "steps": 1,
    "questions": 8,
    "preflight": "off",
    "data.train_limit": 64,
    "data.test": None,
    "reward.workers": 1,
    "rollout.check_every": 1,
    "rollout.samples": 4,
    "checkpoint.every": 1,
    "output.name": "run",
    "output.trackers": [],
}
TAKEN = (
    *("policy.dtype", "policy.attention", "policy.kernel_backend", "rollout.engine", "rollout.sleep_level"),
    *("distributed.timeout_minutes", "distributed.offload_optimizer", "distributed.persistence_threshold"),
)
"""Options that the small run takes from the recipe."""
TORCH_REMEDY = "install a build of torch for this machine (pytorch.org)"
HEAD = ((33, 48), (301, 48))
"""Shapes of the hidden states and the weight of a small head."""
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
"""Relative errors of gradients: rounding makes 1e-6 and, in 16 bits, 4e-3."""
KERNEL_REMEDY = "take another --policy.kernel_backend; `torch` needs nothing but torch"
STEP_REMEDY = (
    "look at the rows above it first, then at the last lines of its output; try --rollout.engine transformers, "
    "--policy.kernel_backend torch and --policy.attention eager, one by one"
)


class Skipped(Exception):
    """A check cannot run on this machine; the message gives the reason."""


class CheckFailedError(ExgrpoError, RuntimeError):
    """A part does not work; the message gives finding and remedy."""


class Check(NamedTuple):
    """A part that a run needs.

    `function(recipe, folder)` returns its measurement. It raises Skipped if it cannot run here, and an ExgrpoError with
    its own remedy or any other exception if the part does not work. The folder is empty but for the log.
    """

    function: Callable[[Config, Path], str]
    remedy: str


def gpus() -> int:
    """Return the number of GPUs that a run can use; 0: compute on the CPU."""
    import torch

    without = os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available()
    return 0 if without else torch.cuda.device_count()


def check_versions(recipe: Config, folder: Path) -> str:
    """Import torch and find its devices."""
    import torch

    from exgrpo.train.common.distributed import ALONE, missing_gpu

    text = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    if not gpus():
        if problem := missing_gpu(ALONE):
            raise CheckFailedError(f"{problem}: {TORCH_REMEDY}, or see nvidia-smi")
        return f"{text}, no GPU: the CPU computes"
    names = ", ".join(torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count()))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{text}, CUDA {torch.version.cuda}, NCCL {nccl}: {names}"


def gradient_error(backend: str, device: str, dtype: str) -> float:
    """Return the relative error of a policy loss's gradients against float64 on full logits, from the same operands."""
    import torch

    from exgrpo.kernels import linear_policy_loss

    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(*size, generator=generator).to(device, getattr(torch, dtype)) for size in HEAD]
    target, advantage = torch.arange(33, device=device) * 9, torch.linspace(-1, 1, 33, device=device)
    found = []
    for kind, name in ((getattr(torch, dtype), backend), (torch.float64, "reference")):
        hidden, weight = (values.to(kind, copy=True).requires_grad_() for values in operands)
        tokens = torch.full_like(advantage, -6.0), advantage
        result = linear_policy_loss(hidden, weight, target, *tokens, clip=None, entropy_coef=0.01, backend=name)
        found.append([gradient.double() for gradient in torch.autograd.grad(result.loss, (hidden, weight))])
    return max(((ours - exact).norm() / exact.norm()).item() for ours, exact in zip(*found, strict=True))


def check_backend(backend: str, recipe: Config, folder: Path) -> str:
    """Compare the gradients of a backend with float64."""
    import torch

    from exgrpo.kernels import dispatch

    device = "cuda" if gpus() else "cpu"
    if reason := dispatch.unavailable(backend, torch.device(device)):
        raise Skipped(reason)
    errors = {dtype: gradient_error(backend, device, dtype) for dtype in TOLERANCES}
    found = ", ".join(f"{dtype} {error:.1e}" for dtype, error in errors.items())
    if not all(errors[dtype] < TOLERANCES[dtype] for dtype in TOLERANCES):
        raise CheckFailedError(f"its gradients are wrong, relative errors: {found}; {KERNEL_REMEDY}")
    return f"right, relative errors of gradients: {found}"


def tiny_run(recipe: Config, folder: Path, engine: str | None = None) -> Config:
    """Return the configuration of a small run that computes as the recipe does, with `engine` or without servers."""
    taken = {key: getattr(getattr(recipe, section), name) for key in TAKEN for section, name in [key.split(".")]}
    if engine or taken["rollout.engine"] == "server":
        taken["rollout.engine"] = engine or "auto"
    return validate(merged(read_recipe(DEFAULT_RUN), SIZES, taken, {"output.folder": folder}), "the small run")


def check_step(processes: Callable[[], int], engine: str | None, recipe: Config, folder: Path) -> str:
    """Train for one step; the run compares its engine's weights and log-probs with the trainer's before and after it.

    `processes` returns their number. The rollout engine is the recipe's if `engine` is None.
    """
    from exgrpo.train.rollout.vllm.availability import INSTALL, installed_version

    device, count = "cuda" if gpus() else "cpu", processes()
    if engine == "vllm" and installed_version(device) is None:
        raise Skipped(f"vLLM is not installed: {INSTALL[device]}")
    config, tiny = tiny_run(recipe, folder, engine), folder / "tiny.yaml"
    tiny.write_text(to_yaml(config), encoding="utf-8")
    command = [sys.executable, "-m", "exgrpo.tools.launch", f"--processes={count}", f"--recipe={tiny}"]
    if status := subprocess.run(command, check=False).returncode:
        printed = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        error = next((f": {line}" for line in reversed(printed) if line.startswith("error")), "")
        raise CheckFailedError(f"{count} x {device} ended with status {status}{error}; {STEP_REMEDY}")
    text = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    step = next(record for record in map(json.loads, text.splitlines()) if "loss" in record)
    if problem := wrong_in(step):
        raise CheckFailedError(f"{problem}; {STEP_REMEDY}")
    return (
        f"{count} x {device}, {config.policy.dtype}: a step in {step['seconds']:.1f} s, loss {step['loss']:.3g}, "
        f"gradient norm {step['grad_norm']:.3g}; log-probs differ by {step['weight_gap']:.1e}"
    )


def all_processes() -> int:
    """Return the number of GPUs, or `ON_CPU` without one. Raise Skipped for one GPU."""
    if gpus() == 1:
        raise Skipped("this machine has one GPU: step_one is the same")
    return gpus() or ON_CPU


def wrong_in(step: Mapping[str, float | None]) -> str:
    """Return what is impossible in the metrics of a step, None being NaN; an empty string if nothing is."""
    if step["skipped_updates"]:  # in fp16 until the loss scale has come down
        return "" if "loss_scale" in step else "an optimiser step was skipped: its gradient is not finite"
    loss, norm = (math.nan if value is None else value for value in (step["loss"], step["grad_norm"]))
    right = math.isfinite(loss) and 0 < norm < math.inf
    return "" if right else f"the loss is {loss:g}, and the norm of its gradient {norm:g}"


CHECKS = {
    "versions": Check(check_versions, TORCH_REMEDY),
    **{f"kernels_{backend}": Check(partial(check_backend, backend), KERNEL_REMEDY) for backend in BACKENDS},
    "step_one": Check(partial(check_step, lambda: 1, None), STEP_REMEDY),
    "step_all": Check(partial(check_step, all_processes, None), STEP_REMEDY),
    "vllm": Check(partial(check_step, lambda: 1, "vllm"), STEP_REMEDY),
}
"""Checks by name, in order of execution."""


def main(argv: Sequence[str]) -> int:
    """Do a check; return 0 if it has reached a finding."""
    name, recipe, folder = argv[0], Path(argv[1]), Path(argv[2])
    end_group_with_parent(int(argv[3]))

    def work(_: ExitStack) -> None:
        try:
            found = "ok", CHECKS[name].function(load_recipe(recipe), folder)
        except Skipped as reason:
            found = "skipped", str(reason)
        except ExgrpoError as error:
            found = "failed", str(error)
        (folder / FINDING).write_text(json.dumps(found), encoding="utf-8")

    return run_program(work, "the check was stopped")


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
