"""What the checks refuse: each is given a part that is broken, and has to say so."""

import pickle
import re
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from exgrpo.kernels import dispatch
from exgrpo.kernels.chunks.products import Products
from exgrpo.tools.doctor import machine, training
from exgrpo.tools.doctor.check import CheckFailedError, Given, Skipped, launch, tiny_run
from exgrpo.tools.doctor.program import all_checks
from exgrpo.train.common.distributed import World
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.config.options import Config
from tests.gloo import on_ranks
from tests.train.configs import configured


@pytest.fixture
def given(tmp_path, monkeypatch):
    """What a check is given, by the values of its recipe."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with ExitStack() as resources:
        yield lambda **values: Given(configured({"output.folder": tmp_path}, values), tmp_path, resources)


def test_checks_have_names_of_their_own_a_remedy_and_travel():
    checks = all_checks()
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        assert check.name.isidentifier()
        assert check.remedy
        assert not check.remedy.endswith(".")
        assert pickle.loads(pickle.dumps(check.function))


def test_processes_see_the_gpus_that_the_doctor_sees(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5,GPU-7")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, sys\n"
        "pathlib.Path(sys.argv[1], os.environ['LOCAL_RANK']).write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    )
    launch(2, tmp_path, [str(program), str(tmp_path)], "")
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["GPU-5,GPU-7"] * 2


def test_a_backend_that_is_not_there_is_skipped(given):
    assert set(machine.BACKENDS) == set(dispatch.BACKENDS)
    with pytest.raises(Skipped, match="GPU"):
        machine.check_backend("cuda", given())


def test_a_backend_that_computes_wrongly_fails(given, monkeypatch):
    right = Products.hidden_gradient
    monkeypatch.setattr(Products, "hidden_gradient", lambda self, grad: 1.5 * right(self, grad))
    monkeypatch.setenv("EXGRPO_SELF_TEST", "0")  # which would leave the backend out at its first call
    with pytest.raises(CheckFailedError, match=r"gradients are wrong.*float32 [3-6]\.\de-01.*kernel_backend"):
        machine.check_backend("torch", given())


def test_answers_that_are_graded_otherwise_fail(given, monkeypatch):
    assert "8 answers to 4 rewards graded rightly, 1 that hangs was ended" in training.check_grading(given())
    reward, answer, gold, worth = training.CASES[0]
    monkeypatch.setattr(training, "CASES", ((reward, answer, gold, 1 - worth), *training.CASES[1:]))
    with pytest.raises(CheckFailedError, match=r"1 of 8 answers .*frac.*math-verify"):
        training.check_grading(given())


def test_too_little_memory_fails_with_what_is_needed(given):
    model = {"policy.path": "Qwen/Qwen2.5-Math-7B", "policy.dtype": "bf16"}
    with pytest.raises(CheckFailedError) as short:
        machine.check_memory(given(**model, **{"policy.overrides": {"intermediate_size": 10_000_000}}))
    told = r"CPU memory: ([\d.]+) of [\d.]+ GiB free\. .*estimate.* disk: .* Make room .*"
    needed = re.fullmatch(told, str(short.value))
    # Masters, two moments and gradients in fp32 of the MLPs' parameters, and these in bf16, are the least.
    assert float(needed[1]) > 18 * (28 * 3 * 3584 * 10_000_000) / 2**30
    assert "CPU memory: " in machine.check_memory(given(**{"policy.path": "builtin:arithmetic"}))
    with pytest.raises(Skipped, match=r"policy\.path"):
        machine.check_memory(given(**{"policy.path": ""}))


def test_the_fullest_gpu_decides_and_the_remedy_is_the_estimates(given, monkeypatch):
    monkeypatch.setattr(machine, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(machine, "processes", lambda: 2)
    monkeypatch.setattr(machine, "free_memory", lambda: 2**40)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**40))
    asked = given(**{"policy.path": "Qwen/Qwen2.5-Math-1.5B", "policy.dtype": "bf16"})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: ((80 - gpu) * 2**30, 80 * 2**30))
    assert " of 75.0 GiB, CPU memory: " in machine.check_memory(asked)  # 79 without the 4 that no tensor gets
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: ((80 - 70 * gpu) * 2**30, 80 * 2**30))
    with pytest.raises(CheckFailedError, match=r"GPU: [\d.]+ of 6\.0 GiB free\. It fits with --.* GPUs: "):
        machine.check_memory(asked)


def test_the_disk_is_that_of_the_folder_to_come(given, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "BLOCK", 4096)
    assert "MiB/s with fsync" in machine.check_disk(given(**{"output.folder": tmp_path / "not" / "yet"}))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"output\.folder: .*file/runs cannot be written"):
        machine.check_disk(given(**{"output.folder": tmp_path / "file" / "runs"}))


def collect(rank):
    world = World(rank, 2, torch.device("cpu"), control=None)
    training.ELEMENTS["cpu"] = 1 << 10
    assert training.measure(world).startswith("gloo, 2 x cpu: right; ")
    dist.all_reduce = lambda tensor: None
    dist.broadcast = lambda tensor, source: tensor.fill_(7)
    with pytest.raises(CheckFailedError, match=f"rank {rank} of 2 got wrong numbers from all_reduce, broadcast"):
        training.measure(world)


def test_collectives_that_give_wrong_numbers_fail(tmp_path):
    on_ranks(collect, 2, tmp_path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"loss": None}, "the loss is nan"),
        ({"grad_norm": 0.0}, "norm of its gradient 0"),
        ({"grad_norm": float("inf")}, "norm of its gradient inf"),
        ({"skipped_updates": 1}, "skipped"),
    ],
)
def test_a_step_without_finite_numbers_fails(changes, problem):
    found = training.wrong_in({"skipped_updates": 0, "loss": 0.1, "grad_norm": 0.2, **changes})
    assert problem in found
    assert bool(found) == bool(problem)


class Engine:
    """A rollout engine as far as weights go; `lost` is the action that loses them."""

    def __init__(self, lost=None):
        self.lost = lost
        self.weights = {"w": torch.zeros(2)}

    def differing(self, weights):
        return [name for name, weight in weights if not torch.equal(self.weights[name], weight)]

    def push_weights(self, weights):
        if self.lost != "push":
            self.weights = {name: weight.clone() for name, weight in weights}

    def sleep(self):
        if self.lost == "sleep":
            self.weights = {"w": torch.zeros(2)}

    def wake(self):
        pass


def test_weights_that_do_not_arrive_or_stay_fail(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    new = [("w", nn.Parameter(torch.ones(2), requires_grad=False))]
    seconds, freed = training.exercise(Engine(), new)
    assert (list(seconds), freed) == (["push", "sleep", "wake"], 0)
    for lost, when in (("push", "after a push"), ("sleep", "after sleep")):
        with pytest.raises(CheckFailedError, match=f"{when} the engine has other weights in 1 tensors, such as w"):
            training.exercise(Engine(lost), new)
    with pytest.raises(CheckFailedError, match="does not notice"):
        training.exercise(Engine(), [("w", torch.zeros(2))])


def test_the_small_run_computes_as_the_recipe_does_and_leaves_its_size_and_servers(given):
    asked = given(
        steps=500,
        policy={"dtype": "bf16", "attention": "eager"},
        rollout={"servers": ("http://localhost:1",), "engine": "server", "sleep_level": 1},
    )
    small = tiny_run(asked)
    assert isinstance(small, Config)
    assert (small.policy.dtype, small.policy.attention, small.rollout.sleep_level) == ("bf16", "eager", 1)
    assert (small.rollout.engine, small.rollout.servers) == ("auto", ())
    assert (small.steps, small.policy.path) == (1, "builtin:arithmetic")
    assert small.output.folder == asked.folder
