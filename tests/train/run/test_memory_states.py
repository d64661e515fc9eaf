"""What training really keeps, under ZeRO-3 and in one process, against the arithmetic."""

import json
from importlib.util import find_spec

import pytest

from exgrpo.train.common.distributed import ALONE
from exgrpo.train.config.options import ObjectiveConfig
from exgrpo.train.policy.policy import Policy
from exgrpo.train.policy.shape import shape_of
from exgrpo.train.policy.source import find_model
from exgrpo.train.run.memory import gpu_memory
from tests.train import tiny
from tests.train.launch import completed
from tests.train.shapes import sizes

WORKER = """
import json, sys
from pathlib import Path
import torch
from exgrpo.train.common.distributed import start
from exgrpo.train.policy.source import find_model
from exgrpo.train.policy.policy import Policy
from tests.train import tiny
from tests.train.fakes import LoneWorld
from exgrpo.train.config.options import ObjectiveConfig

*_, folder, result, cases = sys.argv
world = start(timeout_minutes=2)
tiny.allow_fp16()
held = {}
for case, options in json.loads(cases).items():
    policy = Policy(tiny.config(Path(folder), ObjectiveConfig(), **options), find_model(folder), world)
    policy.update(tiny.minibatches(ObjectiveConfig())[0], clip=True)
    zero = policy.engine.optimizer
    def of(tensors):
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    weights = [p.ds_tensor for p in policy.model.parameters()]
    stored = {tensor.untyped_storage().data_ptr() for tensor in weights}
    masters = [p for p in zero.fp32_partitioned_groups_flat if p.untyped_storage().data_ptr() not in stored]
    held[case] = {
        "weights, sharded": of(weights),
        "fp32 master weights, sharded": of(masters),
        "AdamW moments, sharded": of(v for s in zero.optimizer.state.values() for v in s.values() if v.dim()),
        "gradients, fp32, sharded": of([zero.grad_partitions_flat_buffer]),
        "gradient reduction bucket": of(bucket.buffer for bucket in zero.ipg_buckets.values()),
    }
if world.is_main:
    Path(result).write_text(json.dumps(held))
"""


CASES = {
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
    "adapters": {"dtype": "bf16", "lora": {"rank": 4, "targets": ["q_proj", "down_proj"], "head": True}},
}


@pytest.mark.long
def test_states_are_those_that_zero_3_keeps(tmp_path):
    """To the byte, on two ranks after a step."""
    cases = {name: case for name, case in CASES.items() if name != "adapters" or find_spec("peft")}
    tiny.save_model(tmp_path, tied=False)
    (tmp_path / "worker.py").write_text(WORKER)
    completed(tmp_path / "worker.py", str(tmp_path), str(tmp_path / "held.json"), json.dumps(cases), ranks=2)
    held = json.loads((tmp_path / "held.json").read_text())
    shape = shape_of(find_model(str(tmp_path)).config)
    assert held.keys() == cases.keys()
    for case, real in held.items():
        config = tiny.config(tmp_path, ObjectiveConfig(), **cases[case])
        counted = sizes(gpu_memory(config, shape, 2))
        assert {name: counted[name]["step"] for name in real} == real


class Stopped(Exception):
    """Before the optimiser step."""


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "adapters"])
def test_states_are_those_that_one_process_keeps(name, tmp_path, monkeypatch):
    """To the byte, when the gradients of a step are there: 16 bytes of a parameter in fp32, 18 in bf16."""
    if name == "adapters":
        pytest.importorskip("peft", reason="peft is not installed")
    tiny.save_model(tmp_path, tied=name != "adapters")
    config = tiny.config(tmp_path, ObjectiveConfig(), **CASES[name])
    policy = Policy(config, find_model(str(tmp_path)), ALONE)
    batches = tiny.minibatches(ObjectiveConfig())
    policy.update(batches[0], clip=True)

    def stop():
        raise Stopped

    monkeypatch.setattr(policy.engine, "step", stop)
    with pytest.raises(Stopped):
        policy.update(batches[1], clip=True)
    parameters, masters = list(policy.model.parameters()), list(policy.engine.masters.values())
    own = [master for master in masters if all(master is not parameter for parameter in parameters)]
    gradients = [one.grad for one in (*parameters, *own) if one.grad is not None]
    moments = [v for state in policy.engine.optimizer.state.values() for v in state.values() if v.dim()]
    held = {"weights": parameters, "fp32 master weights": own, "AdamW moments": moments, "gradients, fp32": gradients}
    real = {kind: sum(t.numel() * t.itemsize for t in tensors) for kind, tensors in held.items()}
    shape = shape_of(find_model(str(tmp_path)).config)
    counted = sizes(gpu_memory(config, shape, 1))
    assert {kind: counted[kind]["step"] for kind in real} == real
    if name != "adapters":
        assert sum(real.values()) == {"fp32": 16, "bf16": 18, "fp16": 18}[name] * shape.total
