"""Memory of a rank: whole allocations and states as they really are, and what must hold for any recipe."""

import dataclasses
import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.kernels import linear_policy_loss
from exgrpo.kernels.chunks import chunking
from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.records import Rollout
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.config.options import ObjectiveConfig
from exgrpo.train.config.policy import LoraConfig
from exgrpo.train.policy.layout import Padded
from exgrpo.train.policy.loss import LossTerms
from exgrpo.train.policy.model import PolicyModel
from exgrpo.train.policy.policy import Policy
from exgrpo.train.policy.shape import shape_of
from exgrpo.train.policy.source import find_model
from exgrpo.train.policy.tokenizer import DTYPES
from exgrpo.train.rollout.engine import Sampling
from exgrpo.train.rollout.transformers.engine import TransformersEngine
from exgrpo.train.run.memory import MOMENTS, NF4_BYTES, gpu_memory, peak, rollout_memory
from tests.kernels.test_memory import PeakMemory
from tests.train import tiny
from tests.train.launch import completed
from tests.train.shapes import ROWS, SMALL, VOCABULARY, llama, recipe, shape_like, sizes


@pytest.fixture
def small_chunks(monkeypatch):
    """Sets chunks to 32 tokens and scratch and tiles to 8, so that the head's buffers have the proportions of a run."""

    def set_for(vocabulary):
        for kind in ("cpu", "cuda"):
            monkeypatch.setitem(chunking.CHUNK_BYTES, kind, 32 * vocabulary * 4)
            monkeypatch.setitem(chunking.BLOCK_BYTES, kind, 8 * vocabulary * 4)
        monkeypatch.setattr(chunking, "GPU_MEMORY", 32 * vocabulary * 4)
        monkeypatch.setattr(chunking, "TILE_BYTES", 8 * vocabulary * 4)
        monkeypatch.setattr(chunking, "LEAST_ROWS", 1)

    return set_for


def micro_batch(length: int, prompt: int):
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, VOCABULARY, n).astype(np.int32) for n in (prompt, length - prompt + 1)]
    batch = StepBatch.from_answers([ids[0]] * ROWS, [Rollout(ids[1], True)] * ROWS)
    batch.fill(advantage=np.ones(ROWS), ratio_log_prob=np.full(len(batch.token), -4.5))
    return Padded().rows(batch, torch.device("cpu"))


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_peak_of_a_real_micro_batch(dtype, checkpointing, small_chunks):
    """Forward, fused head and backward of one micro-batch, counted operation by operation.

    The estimate is meant to be an upper bound that is not wasteful. Beside it the measured peak holds the weights'
    gradients, which ZeRO-3 takes away into its bucket as they come.
    """
    model = llama(dtype=DTYPES[dtype], intermediate_size=320)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    wrapped = PolicyModel(model)
    small_chunks(VOCABULARY)
    batch = micro_batch(length=200, prompt=4)
    wrapped(micro_batch(length=8, prompt=4), LossTerms(MethodOptions(), 400.0, bounded=False))  # tests the kernels once
    with PeakMemory() as measured:
        wrapped(batch, LossTerms(MethodOptions(), 400.0, bounded=False)).loss.backward()
    gradients = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    config = recipe(
        policy={"dtype": dtype, "gradient_checkpointing": checkpointing},
        optimizer={"micro_batch_tokens": batch.tokens.numel()},
    )
    shape = shape_like(model)
    found = sizes(gpu_memory(config, shape, 1))
    layers = found["saved activations"]["backward"] + found["backward of one layer"]["backward"]
    head = found["saved activations"]["loss"] + shape.head_bytes(DTYPES[dtype].itemsize, batch.tokens.numel(), "cpu")
    counted = max(layers, head)
    assert measured.peak - gradients <= counted <= 1.2 * measured.peak


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "vocabulary"), [(16, 3000), (64, 3000), (256, 500)])
def test_the_peak_of_the_head(dtype, width, vocabulary, frozen, small_chunks):
    """An upper bound, whether the chunk of logits is largest or the gradients are."""
    small_chunks(vocabulary)
    hidden = torch.randn(600, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=not frozen)
    target = torch.randint(0, vocabulary, (600,))
    old, advantage = torch.full((600,), -8.0), torch.ones(600)
    linear_policy_loss(hidden[:2], weight, target[:2], old[:2], advantage[:2], clip=None)  # tests the kernels once
    with PeakMemory() as measured:
        linear_policy_loss(hidden, weight, target, old, advantage, clip=None, entropy_coef=0.01).loss.backward()
    shape = dataclasses.replace(SMALL, width=width, vocabulary=vocabulary)
    assert measured.peak <= shape.head_bytes(dtype.itemsize, 600, "cpu", frozen=frozen) <= 1.6 * measured.peak


@pytest.mark.parametrize(("kv_heads", "dtype"), [(2, "fp32"), (4, "bf16")])
def test_the_peak_of_real_generation(dtype, kv_heads, tmp_path):
    """Padded prompts; the EOS is a token that cannot be sampled. Prompts and cache peak apart: an upper bound."""
    model = llama(num_key_value_heads=kv_heads)
    model.save_pretrained(tmp_path)
    settings = tiny.engine_settings(tmp_path, dtype, eos=(VOCABULARY,), batch_tokens=8 * 120)
    engine = TransformersEngine(settings, ALONE)
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in (20, 17)]
    with PeakMemory() as measured:
        answers = tiny.rollouts(engine, prompts, [4, 4], Sampling(100), seed=0)
    assert max(len(rollout.response) for of_prompt in answers for rollout in of_prompt) == 100
    config = recipe(
        questions=2,
        policy={"dtype": dtype},
        data={"max_prompt_tokens": 20},
        rollout={"samples": 4, "max_tokens": 100, "batch_tokens": 8 * 120},
    )
    found = sizes(gpu_memory(config, shape_like(model), 1))
    weights = found.pop("rollout engine, weights")["rollout"]
    assert weights == 0  # those of the policy itself
    counted = sum(found[f"rollout engine, {name}"]["rollout"] for name in ("key/value cache", "prompts and sampling"))
    assert measured.peak <= counted <= 1.4 * measured.peak


def test_what_the_head_may_take_is_counted():
    """Of an expected 1 GiB, and of what is set, where the logits of a pass would fill both."""
    passes = {"micro_batch_tokens": 2**22}
    configs = [recipe(policy={"kernel_memory_gib": gib}, optimizer=passes) for gib in (None, 1.0, 0.25)]
    default, same, less = (sizes(gpu_memory(one, SMALL, 1))["fused head"]["loss"] for one in configs)
    assert default == same
    assert default - less == pytest.approx(0.75 * 2**30, rel=1e-6)


def mapping(**values):
    return st.fixed_dictionaries(values)


RECIPE = mapping(
    questions=st.integers(2, 64),
    policy=mapping(dtype=st.sampled_from(["fp32", "bf16"]), gradient_checkpointing=st.booleans()),
    rollout=mapping(
        engine=st.sampled_from(["transformers", "vllm"]),
        samples=st.integers(2, 8),
        batch_tokens=st.integers(40, 4000),
        kv_cache_gib=st.sampled_from([1e-5, 1e-3, 0.1]),
        sleep_level=st.sampled_from([0, 1, 2]),
    ),
    optimizer=mapping(micro_batch_tokens=st.integers(40, 4000)),
    distributed=mapping(offload_optimizer=st.booleans()),
)


def peaks(config, gpus=2) -> list[float]:
    memory = gpu_memory(config, SMALL, gpus)
    return [peak(memory, moment) for moment in MOMENTS]


def never_more(less, more) -> bool:
    return all(a <= b for a, b in zip(less, more, strict=True))


@given(RECIPE, st.integers(1, 64), st.integers(1, 64))
def test_more_gpus_never_take_more_memory_each(sections, gpus, more):
    config = recipe(**sections)
    if gpus > 1:  # what one process does without, as DeepSpeed's buckets, may be more than a model
        assert never_more(peaks(config, gpus + more), peaks(config, gpus))


@given(RECIPE, st.integers(1, 4000))
def test_smaller_batches_checkpointing_and_offloading_never_take_more_memory(sections, more):
    config = recipe(**sections)
    for section, key in (("optimizer", "micro_batch_tokens"), ("rollout", "batch_tokens")):
        larger = recipe(**{**sections, section: {**sections[section], key: sections[section][key] + more}})
        assert never_more(peaks(config), peaks(larger))
    for section, key in (("policy", "gradient_checkpointing"), ("distributed", "offload_optimizer")):
        off, on = (recipe(**{**sections, section: {**sections[section], key: value}}) for value in (False, True))
        assert never_more(peaks(on), peaks(off))


@pytest.mark.parametrize(
    ("lora", "weights", "dequantised"),
    [
        ({}, 4 * SMALL.total, 0),
        ({"rank": 4}, 2 * SMALL.total + 4 * SMALL.adapters(LoraConfig(rank=4)), 0),
        (
            {"rank": 4, "quantised": "nf4"},
            NF4_BYTES * SMALL.linear + 2 * (SMALL.total - SMALL.linear) + 4 * SMALL.adapters(LoraConfig(rank=4)),
            2 * 64 * 160,
        ),
    ],
    ids=["all weights", "adapters", "4 bits"],
)
def test_a_policy_that_generates_has_no_second_model(lora, weights, dequantised):
    """One process has the weights once; two have copies."""
    config = recipe(policy={"dtype": "bf16" if lora else "fp32"}, lora=lora)
    found = sizes(gpu_memory(config, SMALL, 1))
    assert found["weights"]["rollout"] == weights
    assert found["rollout engine, weights"]["rollout"] == 0
    assert found["rollout engine, key/value cache"]["rollout"] > 0
    assert found["gathered weights"]["rollout"] == dequantised
    assert rollout_memory(config, SMALL, 2)[0].rollout > 0


WORKER = """
import json, sys
from pathlib import Path
import torch
from exgrpo.train.common.distributed import start
from exgrpo.train.policy.source import find_model
from exgrpo.train.policy.policy import Policy
from tests.train import tiny
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
