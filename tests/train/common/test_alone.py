"""Collectives of one process against those of a gloo group of one."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.comm.torch import TorchBackend

from exgrpo.train.common import alone

GIVEN = torch.arange(6.0)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "into", "call"),
    [
        ("all_reduce", GIVEN, lambda function, out: function(out)),
        ("broadcast", GIVEN, lambda function, out: function(out, 0)),
        ("all_gather", torch.zeros(6), lambda function, out: function([out], GIVEN)),
        ("all_gather_into_tensor", torch.zeros(6), lambda function, out: function(out, GIVEN)),
        ("reduce_scatter_tensor", torch.zeros(6), lambda function, out: function(out, GIVEN)),
        ("reduce_scatter", torch.zeros(6), lambda function, out: function(out, [GIVEN])),
    ],
)
def test_a_collective_of_one_gives_what_gloo_gives(group, name, into, call):
    ours, gloos = into.clone(), into.clone()
    call(getattr(alone, name), ours).wait()
    call(getattr(dist, name), gloos)
    assert torch.equal(ours, gloos)
    assert torch.equal(ours, GIVEN)


def test_several_tensors_are_gathered():
    outputs = [torch.zeros(2), torch.zeros(3)]
    alone.all_gather_coalesced(outputs, [torch.ones(2), torch.full((3,), 2.0)]).wait()
    assert [output.tolist() for output in outputs] == [[1, 1], [2, 2, 2]]


def test_deepspeed_has_them_by_these_names():
    assert all(callable(getattr(TorchBackend, function.__name__)) for function in alone.COLLECTIVES)
