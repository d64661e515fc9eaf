"""The checks of what trains: grading, collectives, rollout engines, and all of it together.

The module is also the program of each process of `collectives`: its argument is the file to which the first one writes.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo.tools.doctor.check import Check, CheckFailedError, Given, Skipped, launch, open_inputs, tiny_run
from exgrpo.tools.doctor.machine import device, processes
from exgrpo.tools.estimate.parts import GIB
from exgrpo.train.common.success import is_success
from exgrpo.train.config.recipe import to_yaml

if TYPE_CHECKING:
    from torch import Tensor

    from exgrpo.train.common.distributed import World
    from exgrpo.train.rollout.engine import RolloutEngine

CASES = (
    ("math", r"<think>x</think>\boxed{\frac{1}{2}}", "0.5", 1.0),
    ("math", r"\boxed{\frac{1}{2}}", "0.5", 0.0),
    ("math_no_think", r"It is $\sqrt{8}$.", r"2\sqrt{2}", 1.0),
    ("math_no_think", r"\boxed{x^2 + 1}", "x^2 - 1", 0.0),
    ("exgrpo.train.data.tasks.countdown:reward", r"\boxed{(3 + 5) * 8 - 9}", "55 3 5 8 9", 1.0),
    ("exgrpo.train.data.tasks.countdown:reward", r"\boxed{3 + 5 + 8 + 9}", "55 3 5 8 9", 0.0),
    ("exgrpo.train.data.tasks.colouring:reward", r"\boxed{a=R b=G}", "ab ab", 1.0),
    ("exgrpo.train.data.tasks.colouring:reward", r"\boxed{a=R b=R}", "ab ab", 0.0),
)
"""A reward, an answer, the gold answer, and what the answer is worth."""
HANGS = "exgrpo.tools.doctor.training:hang"
ENDLESS = "endless"
LIMIT = 2.0
GRADING_REMEDY = (
    "See that math-verify and sympy have the versions that this package asks for: pip install 'exgrpo[train]'"
)
MODULE = "exgrpo.tools.doctor.training"
COLLECTIVES_REMEDY = (
    "NCCL_DEBUG=INFO has NCCL say more; NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1 and NCCL_SHM_DISABLE=1 leave out one way "
    "each, and NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names the network interface"
)
TURNS = 5
ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""By kind of device: fp32 elements that are gathered when that is timed."""
WEIGHTS_REMEDY = "Try --rollout.engine transformers, and with vLLM --rollout.sleep_level 0"
FACTOR = 1.5
"""By which the new weights differ from those with which the engine starts: exact in bf16, but for the last bit."""
STEP_REMEDY = (
    "Look at the rows above it first, then at the last lines of its output; try --rollout.engine transformers, "
    "--policy.kernel_backend torch and --policy.attention eager, one by one"
)
PROGRAM = Path(__file__).parents[2] / "train" / "main.py"


def hang(response: str, gold: str) -> float:
    """A reward that does not come to an end for one answer; grading processes try every other one as they start."""
    while response == ENDLESS:
        time.sleep(1)
    return 0.0


def check_grading(given: Given) -> str:
    """Grade answers whose worth is known, and one that hangs."""
    from exgrpo.train.reward.pool import Grader

    grader = given.resources.enter_context(
        Grader(*dict.fromkeys(reward for reward, *_ in CASES), HANGS, workers=2, time_limit=LIMIT)
    )
    grading = grader.begin()
    for reward, response, gold, _ in CASES:
        grading.add(response, gold, reward=reward)
    grading.add(ENDLESS, "", reward=HANGS)
    grades = grading.finish()
    wrong = [case[:3] for case, reward in zip(CASES, grades.reward, strict=False) if reward != case[3]]
    if wrong or grades.failed:
        count = max(len(wrong), grades.failed)
        raise CheckFailedError(
            f"{count} of {len(CASES)} answers got a wrong reward or failed: {wrong}. {GRADING_REMEDY}"
        )
    if grades.timed_out != 1:
        raise CheckFailedError(f"an answer that hangs was not ended after {LIMIT:g} s. {GRADING_REMEDY}")
    network = "without the network" if grader.offline else "with the network, which this system lets no process leave"
    return f"{len(CASES)} answers to 4 rewards graded rightly, 1 that hangs was ended; {network}"


def check_collectives(given: Given) -> str:
    """Run the collectives of ZeRO-3 on all GPUs, or two processes."""
    found = given.folder / "measured"
    launch(processes(), given.folder, ["--module", MODULE, str(found)], COLLECTIVES_REMEDY)
    return found.read_text(encoding="utf-8")


def measure(world: "World") -> str:
    """What the collectives of one process group give, and how fast.

    Raises:
        CheckFailedError: on a rank that got something wrong.
    """
    import torch
    import torch.distributed as dist

    size, rank, device = world.size, world.rank, world.device
    own = torch.full((size,), float(rank + 1), device=device)
    every = torch.arange(1, size + 1, dtype=own.dtype, device=device)
    summed, scattered = own.clone(), own.new_empty(1)
    gathered, first = own.new_empty(size), torch.full((1,), float(rank), device=device)
    dist.all_reduce(summed)
    dist.all_gather_into_tensor(gathered, own[:1].clone())
    dist.reduce_scatter_tensor(scattered, own)
    dist.broadcast(first, 0)
    wrong = [
        name
        for name, right in (
            ("all_reduce", bool((summed == every.sum()).all())),
            ("all_gather", torch.equal(gathered, every)),
            ("reduce_scatter", bool((scattered == every.sum()).all())),
            ("broadcast", first.item() == 0),
            ("all_gather_object", world.gather(rank) == list(range(size))),
        )
        if not right
    ]
    if wrong:
        raise CheckFailedError(f"rank {rank} of {size} got wrong numbers from {', '.join(wrong)}")
    rate = f"; {gather_rate(world) / 1e9:.2f} GB/s in all_gather" if size > 1 else ""
    return f"{dist.get_backend()}, {size} x {device.type}: right{rate}"


def gather_rate(world: "World") -> float:
    """Bytes per second that each rank receives in the fastest of some gathers."""
    import torch
    import torch.distributed as dist

    part = torch.ones(ELEMENTS[world.device.type] // world.size, device=world.device)
    whole = part.new_empty(len(part) * world.size)
    seconds = []
    for _ in range(TURNS):
        world.gather(None)
        start = time.perf_counter()
        dist.all_gather_into_tensor(whole, part)
        if world.device.type != "cpu":
            torch.accelerator.synchronize(world.device)
        seconds.append(time.perf_counter() - start)
    return 4 * len(part) * (world.size - 1) / min(seconds)


def main(found: Path) -> int:
    """The program of one process; returns its exit status."""
    from exgrpo.train.common.process import run_program

    def work(_: ExitStack) -> None:
        from exgrpo.train.common.distributed import start

        world = start(timeout_minutes=5)
        text = measure(world)
        if world.is_main:
            found.write_text(text, encoding="utf-8")

    return run_program(work, "stopped")


def check_weights(given: Given) -> str:
    """Ask the engine that a run would take, push changed weights into it, let it sleep and wake it."""
    config = tiny_run(given)
    inputs, world = open_inputs(config, given.resources)
    from exgrpo.train.rollout.answers import Answerer
    from exgrpo.train.rollout.engine import Sampling, training_settings
    from exgrpo.train.rollout.registry import choose_engine, open_engine
    from exgrpo.train.rollout.vllm.engine import VllmEngine, cache_gib
    from exgrpo.train.run.preflight import QUESTIONS

    settings = training_settings(config, inputs.pretrained)
    choice = choose_engine(settings, world)
    engine = open_engine(choice, settings, world)
    given.resources.callback(engine.close)
    answerer = Answerer(engine, inputs.grader, inputs.pretrained.tokenizer.decode, world)
    start, questions = time.perf_counter(), inputs.train_set.first(QUESTIONS)
    batch = answerer.answer(questions, [1] * len(questions), Sampling(config.rollout.max_tokens), config.seed)
    rate = answerer.tokens / (time.perf_counter() - start)
    right = int(is_success(batch.reward, config.reward.success).sum())
    told = f"{choice}: {right} of {len(batch)} answers are right"
    if not right:  # the model answers four in ten rightly
        raise CheckFailedError(f"{told}, so it computes another model. {WEIGHTS_REMEDY}")
    model = settings.source.load(settings.dtype, settings.attention).to(world.device).requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(FACTOR)
    seconds, freed = exercise(engine, list(model.named_parameters()))
    times = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in seconds.items())
    found = f"{told}, {rate:.0f} tokens/s; {times}"
    level = config.rollout.sleep_level
    if not isinstance(engine, VllmEngine) or world.device.type == "cpu" or not level:
        return found
    found += f"; at sleep level {level}, vLLM gave {freed / GIB:.2f} GiB back"
    if freed < cache_gib(config.rollout, None) * GIB / 2:
        raise CheckFailedError(f"{found}, and its cache alone has more. {WEIGHTS_REMEDY}")
    return found


def exercise(engine: "RolloutEngine", weights: "list[tuple[str, Tensor]]") -> tuple[dict[str, float], float]:
    """Push weights that are not the engine's, and see that it has them then and after sleep.

    Returns:
        the seconds of each action by its name, and the bytes of the GPU that sleep gave back.

    Raises:
        CheckFailedError: it has other weights, or does not know which it has.
    """
    if not engine.differing(weights):
        raise CheckFailedError(f"the engine does not notice that its weights differ. {WEIGHTS_REMEDY}")
    seconds = {"push": _seconds(lambda: engine.push_weights(weights))}
    _same(engine.differing(weights), "after a push")
    awake = _free()
    seconds["sleep"] = _seconds(engine.sleep)
    freed = _free() - awake
    seconds["wake"] = _seconds(engine.wake)
    _same(engine.differing(weights), "after sleep")
    return seconds, freed


def _same(differing: list[str], when: str) -> None:
    if differing:
        raise CheckFailedError(
            f"{when} the engine has other weights in {len(differing)} tensors, such as {differing[0]}. {WEIGHTS_REMEDY}"
        )


def _seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _free() -> float:
    """Bytes of the GPU that nobody has; 0 without one."""
    import torch

    if device().type == "cpu":
        return 0.0
    torch.cuda.empty_cache()
    return float(torch.cuda.mem_get_info()[0])


def check_step(everywhere: bool, given: Given) -> str:
    """Run the training program for one step as a user does.

    Several processes train under ZeRO-3, and one without it. Before the step the run compares the log-probs of its
    engine with those of the trainer.
    """
    ranks, config = processes() if everywhere else 1, tiny_run(given)
    if everywhere and ranks == 1:
        raise Skipped("this machine has one GPU: step_one is the same")
    recipe = given.folder / "tiny.yaml"
    recipe.write_text(to_yaml(config), encoding="utf-8")
    launch(ranks, given.folder, [str(PROGRAM), "--recipe", str(recipe)], STEP_REMEDY)
    text = (given.folder / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    step = next(record for record in records if "loss" in record)
    gap = next(record["weight_gap"] for record in records if "weight_gap" in record)
    if problem := wrong_in(step):
        raise CheckFailedError(f"{problem}. {STEP_REMEDY}")
    return (
        f"{ranks} x {device().type}, {config.policy.dtype}: a step in {step['seconds']:.1f} s, "
        f"loss {step['loss']:.3g}, gradient norm {step['grad_norm']:.3g}; log-probs differ by {gap:.1e}"
    )


def wrong_in(step: dict[str, float | None]) -> str:
    """What cannot be in the metrics of a step, where None stands for NaN; empty: nothing."""
    if step["skipped_updates"]:
        if "loss_scale" in step:  # of fp16, which overflows until the scale has come down
            return ""
        return "an optimiser step was skipped: its gradient is not finite"
    loss, norm = (math.nan if value is None else value for value in (step["loss"], step["grad_norm"]))
    if math.isfinite(loss) and 0 < norm < math.inf:
        return ""
    return f"the loss is {loss:g}, and the norm of its gradient {norm:g}"


CHECKS = (
    Check("grading", check_grading, GRADING_REMEDY),
    Check("collectives", check_collectives, COLLECTIVES_REMEDY),
    Check("weights", check_weights, WEIGHTS_REMEDY),
    Check("step_one", partial(check_step, False), STEP_REMEDY),
    Check("step_all", partial(check_step, True), STEP_REMEDY),
)

if __name__ == "__main__":
    from exgrpo.train.common.process import leave

    leave(main(Path(sys.argv[1])))
