"""Ranks that fail together: what one of them cannot do ends all of them with the same error."""

import pickle
import socket
import threading

import pytest
import torch

from exgrpo.train.common import distributed, errors
from exgrpo.train.common.distributed import ALONE, World, agree, check_devices, fail_together, missing_gpu, on_main
from exgrpo.train.common.errors import ConfigError, DataError, ExgrpoError
from exgrpo.train.common.process import _status
from exgrpo.train.rollout.server.pool import NoServerError

SIZE = 3


class ThreadWorld(World):
    """A rank that is a thread; what is gathered is pickled, as between processes."""

    def gather(self, value):
        values, barrier = self.control
        values[self.rank] = pickle.dumps(value)
        barrier.wait(10)
        gathered = [pickle.loads(content) for content in values]
        barrier.wait(10)
        return gathered


def on_every_rank(action, size=SIZE):
    """What each rank gives, or raises."""
    meeting = ([b""] * size, threading.Barrier(size))
    outcomes = [None] * size

    def work(rank):
        try:
            outcomes[rank] = action(ThreadWorld(rank, size, torch.device("cpu"), meeting))
        except ExgrpoError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return outcomes


def test_each_rank_gets_what_its_own_action_gives():
    assert on_every_rank(lambda world: agree(world, lambda: 10 * world.rank)) == [0, 10, 20]


def test_one_rank_that_fails_ends_all_with_its_error():
    def act(world):
        def action():
            if world.rank:
                raise ConfigError(f"rank {world.rank} has no room")

        return agree(world, action)

    outcomes = on_every_rank(act)
    assert [type(outcome) for outcome in outcomes] == [ConfigError] * SIZE
    assert {str(outcome) for outcome in outcomes} == {"rank 1 has no room"}


def test_what_the_first_rank_does_alone_ends_all_too():
    assert on_every_rank(lambda world: on_main(world, lambda: "done")) == ["done", None, None]

    def refuse():
        raise DataError("no such file")

    assert [str(outcome) for outcome in on_every_rank(lambda world: on_main(world, refuse))] == ["no such file"] * SIZE


def test_a_defect_is_not_told_to_other_ranks():
    def broken():
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect") as caught:
        agree(ALONE, broken)
    assert not isinstance(caught.value, ExgrpoError)


@pytest.mark.parametrize(
    "kind",
    [
        NoServerError,
        *(kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__name__[-5:] == "Error"),
    ],
)
def test_every_error_of_the_family_reaches_other_ranks_whole(kind):
    for outcome in on_every_rank(lambda world: fail_together(world, kind("what to do") if world.rank == 2 else None)):
        assert type(outcome) is kind
        assert str(outcome) == "what to do"


def test_half_of_what_a_launcher_sets_is_named(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(errors.ConfigError, match="RANK is set and LOCAL_RANK is not"):
        distributed.start(timeout_minutes=1)


def test_a_port_in_use_is_named(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        launched = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": taken.getsockname()[1]}
        for name, value in {**launched, "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(errors.ConfigError, match="cannot join their group: .* address already in use.*master_port"):
            distributed.start(timeout_minutes=0.1)


def test_more_processes_than_gpus_are_refused():
    check_devices(2, 2)
    with pytest.raises(errors.ConfigError, match="3 processes .* torch sees 2 GPUs: start one process for each GPU"):
        check_devices(3, 2)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23 GiB"),
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:77\nCuda failure 2 'out of memory'"),
    ],
)
def test_a_gpu_without_memory_is_one_line(monkeypatch, capsys, error):
    monkeypatch.delenv("RANK", raising=False)

    def work():
        raise error

    assert _status(work, "") == ConfigError.status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: a GPU has no memory left (")
    assert "lower optimizer.micro_batch_tokens" in line


def test_several_ranks_or_a_driver_without_a_gpu_are_told(monkeypatch, tmp_path):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(distributed, "DRIVER", tmp_path / "version")
    two = World(0, 2, torch.device("cpu"), control=None)
    assert missing_gpu(ALONE) is None
    assert f"torch {torch.__version__} sees no GPU" in missing_gpu(two)
    assert missing_gpu(World(0, 2, torch.device("cuda"), control=None)) is None
    (tmp_path / "version").touch()
    assert "this machine has an NVIDIA driver, but torch" in missing_gpu(ALONE)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # somebody asks for CPUs
    assert missing_gpu(two) is None
