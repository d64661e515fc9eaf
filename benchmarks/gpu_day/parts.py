"""The parts of a day on a GPU, in the order of what they are worth.

A command is written as in a shell. `python` is this interpreter, `{result}` the file that the part leaves, and
`{minutes}` how long it may measure.
"""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

MEASURING = 0.8
"""The part of its time after which a benchmark begins no further group: the rest is for the group that it measures."""
PYTEST = "python -m pytest -q -p no:cacheprovider"
BENCHMARK = "--benchmark-only --benchmark-json={result} --minutes={minutes}"
HEAD = f"{PYTEST} benchmarks/test_head.py {BENCHMARK}"
STEP = f"{PYTEST} benchmarks/test_training_step.py {BENCHMARK}"
ROLLOUTS = f"{PYTEST} benchmarks/test_rollouts.py {BENCHMARK}"
TRAINER, VLLM, NCU = "train", "vllm", "ncu"
"""What a part may need: a group of packages, or the program ncu."""
TAUGHT = "runs/models/SmolLM2-135M-countdown"
"""The model of the study, from `recipes.countdown.start`: a part may need a folder, too."""
# With compilers in processes of their own, pytest's workers would wait for these at the end and never report.
ALONE = MappingProxyType({"TORCHINDUCTOR_COMPILE_THREADS": "1"})


@dataclass(frozen=True, kw_only=True)
class Part:
    """One command of the day.

    Attributes:
        name: of the part and its files.
        title: its heading on the page.
        command: what it runs, on a GPU and in the rehearsal.
        day: further words on a GPU.
        rehearsal: further words in the rehearsal, which make it tiny.
        least: minutes without which it is not begun.
        most: minutes after which it is ended.
        result: ending of the file that it leaves: `.json` of pytest-benchmark, a text, or none.
        needs: keys of `needs.missing_of`.
        environment: beside the present one.
        rehearsal_environment: beside that, in the rehearsal.
        statuses: exit statuses with which it is finished.
    """

    name: str
    title: str
    command: str
    day: str = ""
    rehearsal: str = ""
    least: float
    most: float
    result: str = ""
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    rehearsal_environment: Mapping[str, str] = field(default_factory=dict)
    statuses: tuple[int, ...] = (0,)

    def words(self, rehearse: bool, result: Path, minutes: float) -> list[str]:
        """The command.

        Args:
            rehearse: whether it is the tiny one.
            result: the file that it leaves.
            minutes: its limit.
        """
        text = f"{self.command} {self.rehearsal if rehearse else self.day}"
        values = {"result": str(result), "minutes": f"{MEASURING * minutes:.2f}"}
        words = [word.format(**values) for word in shlex.split(text)]
        return [sys.executable, *words[1:]] if words[0] == "python" else words


PARTS = (
    Part(
        name="doctor",
        title="The machine, by the doctor",
        command="python -m exgrpo.tools.doctor --output {result}",
        rehearsal="--only versions memory kernels_torch",
        least=1,
        most=4,
        result=".md",
        needs=(TRAINER,),
        statuses=(0, 1),  # a check that fails is a finding
    ),
    Part(
        name="kernels",
        title="Tests of the kernels",
        command="python -m benchmarks.gpu_day.kernel_tests",
        rehearsal="--quick",
        least=2,
        most=8,
        environment=ALONE,
    ),
    Part(
        name="head",
        title="The head beside the others, isolated calls",
        command=HEAD,
        day="--sizes=full",
        rehearsal="--sizes=tiny -k 'exgrpo or floor or verl'",
        least=2,
        most=8,
        result=".json",
    ),
    Part(
        name="head_in_a_row",
        title="The head beside the others, one call after another",
        command=HEAD,
        day="--sizes=full --in-a-row=20 -k 'policy_loss and bfloat16 and not entropy and not active'",
        rehearsal="--sizes=tiny --in-a-row=3 -k 'floor or torch'",
        least=2,
        most=6,
        result=".json",
    ),
    *(
        Part(
            name=f"{kernel}_profile",
            title=f"Nsight Compute: {title}",
            command=f"python -m benchmarks.gpu_day.profile {kernel} {{result}}",
            rehearsal="--tiny",
            least=1,
            most=3,
            result=".txt",
            needs=(NCU,),
        )
        for kernel, title in (("product", "the fused product"), ("rows", "the row kernel"))
    ),
    *(
        Part(
            name=f"step_{size}",
            title=f"A training step of {size} billion parameters: on-policy, with replay, compiled, in fp16, and TRL's",
            command=STEP,
            day=f"--sizes=full --rounds=2 -k {size}B",
            rehearsal=f"--sizes=tiny --rounds=1 -k '{rehearsed}'",
            least=5,
            most=14,
            result=".json",
            needs=(TRAINER,),
        )
        for size, rehearsed in (("0.5", "not vllm"), ("1.5", "on-policy"))
    ),
    Part(
        name="rollouts",
        title="Rollouts: vLLM in the process of the trainer, in bf16, fp16 and fp32",
        command=ROLLOUTS,
        day="--sizes=full",
        rehearsal="--sizes=tiny -k fp32",
        least=4,
        most=12,
        result=".json",
        needs=(TRAINER, VLLM),
    ),
    Part(
        name="launch_table",
        title="A launch table for this GPU",
        command="python -m exgrpo.kernels.tune --output {result} --minutes {minutes}",
        rehearsal="--shapes 4,16,128 --dtype float32 --minutes 0.02",
        least=4,
        most=12,
        result=".toml",
        rehearsal_environment={"TRITON_INTERPRET": "1"},
    ),
    Part(
        name="study",
        title="The study of long answers: its runs so far",
        command="python -m studies.run studies/long_answers.yaml",
        day="--workers 10",
        rehearsal="--plan",
        least=15,
        most=120,
        needs=(TRAINER, TAUGHT),
    ),
)
