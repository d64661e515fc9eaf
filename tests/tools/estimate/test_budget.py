"""Memory, disk and time: whole allocations as they really happen, and what must hold for any recipe."""

import dataclasses
import re
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.kernels import linear_policy_loss
from exgrpo.kernels.chunks import chunking
from exgrpo.tools.estimate import budget
from exgrpo.tools.estimate.budget import phases
from exgrpo.tools.estimate.parts import Hardware
from exgrpo.tools.estimate.tables import advise
from exgrpo.train.common.records import Rollout, Trajectory
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.config.objective import ObjectiveConfig
from exgrpo.train.config.policy import LoraConfig
from exgrpo.train.config.recipe import changed
from exgrpo.train.policy.layout import Padded
from exgrpo.train.policy.loss import LossSettings, LossTerms
from exgrpo.train.policy.model import PolicyModel
from exgrpo.train.policy.tokenizer import DTYPES
from exgrpo.train.rollout.engine import Sampling
from exgrpo.train.rollout.transformers.engine import TransformersEngine
from exgrpo.train.run.memory import MOMENTS, gpu_memory, peak
from tests.kernels.test_memory import PeakMemory
from tests.tools.estimate.shapes import (
    ASSUMED,
    HARDWARE,
    HARDWARE_OF_ONE,
    ROWS,
    SMALL,
    VOCABULARY,
    llama,
    recipe,
    shape_like,
    sizes,
)
from tests.train import tiny
from tests.train.fakes import LoneWorld


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
    batch = StepBatch.of_answers([ids[0]] * ROWS, [Rollout(ids[1], True)] * ROWS)
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
    with PeakMemory() as measured:
        wrapped(batch, LossTerms(LossSettings(ObjectiveConfig()), 400.0, bounded=False)).loss.backward()
    gradients = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    config = recipe(
        policy={"dtype": dtype, "gradient_checkpointing": checkpointing},
        optimizer={"micro_batch_tokens": batch.tokens.numel()},
    )
    shape = shape_like(model)
    found = sizes(gpu_memory(config, shape, HARDWARE_OF_ONE.gpus))
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
    with PeakMemory() as measured:
        linear_policy_loss(hidden, weight, target, old, advantage, clip=None, entropy_coef=0.01).loss.backward()
    shape = dataclasses.replace(SMALL, width=width, vocabulary=vocabulary)
    assert measured.peak <= shape.head_bytes(dtype.itemsize, 600, "cpu", frozen=frozen) <= 1.6 * measured.peak


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_the_peak_of_real_generation(dtype, kv_heads, tmp_path):
    """Padded prompts; the EOS is a token that cannot be sampled. Prompts and cache peak apart: an upper bound."""
    model = llama(num_key_value_heads=kv_heads)
    model.save_pretrained(tmp_path)
    settings = tiny.engine_settings(tmp_path, dtype, eos=(VOCABULARY,), batch_tokens=8 * 220)
    engine = TransformersEngine(settings, LoneWorld())
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in (20, 17)]
    with PeakMemory() as measured:
        answers = tiny.rollouts(engine, prompts, [4, 4], Sampling(200), seed=0)
    assert max(len(rollout.response) for of_prompt in answers for rollout in of_prompt) == 200
    config = recipe(
        questions=2,
        policy={"dtype": dtype},
        data={"max_prompt_tokens": 20},
        rollout={"samples": 4, "max_tokens": 200, "batch_tokens": 8 * 220},
    )
    found = sizes(gpu_memory(config, shape_like(model), HARDWARE_OF_ONE.gpus))
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


def test_offloaded_states_leave_the_gpu():
    shape = shape_like(llama())
    on, off = (recipe(policy={"dtype": "bf16"}, distributed={"offload_optimizer": o}) for o in (False, True))
    moved = peak(gpu_memory(on, shape, HARDWARE.gpus), "step") - peak(gpu_memory(off, shape, HARDWARE.gpus), "step")
    copies = sizes(gpu_memory(on, shape, HARDWARE.gpus))["AdamW's own copies"]["step"]
    shard = shape.sharded(HARDWARE.gpus)
    assert moved == 16 * shard + copies
    in_cpu = [sum(a.bytes for a in budget.cpu_memory(c, shape, HARDWARE.gpus, ASSUMED)) for c in (on, off)]
    assert in_cpu[1] - in_cpu[0] == 20 * shard * HARDWARE.gpus


def test_what_takes_disk_is_weights_and_moments_in_fp32_or_those_of_adapters():
    shape = shape_like(llama())

    def bytes_of(name, **sections):
        return {amount.name: amount.bytes for amount in budget.disk(recipe(**sections), shape, ASSUMED)}[name]

    assert bytes_of("checkpoints, 3 kept and one being written", checkpoint={"keep": 3}) == 4 * 12 * shape.total
    assert budget.disk(recipe(checkpoint={"every": None}), shape, ASSUMED)[0].bytes == 0
    one = budget.disk(recipe(), shape, ASSUMED)[-1].bytes
    config = recipe(steps=95, checkpoint={"best": "test/pass_rate"}, output={"export_every": 10})
    assert budget.disk(config, shape, ASSUMED)[-1].bytes == one * (1 + 2 + 9), "of the best model and exported ones"
    options = {"rank": 4, "targets": ["q_proj", "down_proj"], "head": True}
    elements = 4 * (3 * (64 + 64) + 3 * (160 + 64) + 64 + VOCABULARY)
    assert bytes_of("checkpoints, 2 kept and one being written", lora=options) == 3 * 12 * elements
    assert bytes_of("trained model", lora=options) == 4 * elements
    merged = budget.disk(recipe(lora={**options, "result": "merged"}), shape, ASSUMED)
    assert merged[-1].bytes == 4 * shape.total


@pytest.mark.parametrize("tokens", [20, 2000])
def test_stored_trajectories_take_what_the_estimate_says(tokens):
    """Measured by Python's own count of its allocations; the overhead is what is estimated."""
    count = 200
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        stored = [
            Trajectory(i + 1000, np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), True, 1.0, i + 1000)
            for i in range(count)
        ]
        real = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    config = recipe(steps=count, questions=1, rollout={"samples": 2}, optimizer={"minibatches": 1})
    assumed = dataclasses.replace(ASSUMED, response_tokens=tokens, success_rate=0.5)
    assert len(stored) == count
    assert real <= budget.buffer_bytes(config, assumed) <= real + 500 * count


def test_seconds_are_flops_over_speed():
    config = recipe(questions=4, rollout={"samples": 4}, policy={"gradient_checkpointing": True})
    shape = shape_like(llama())
    found = {phase.name: phase for phase in phases(config, shape, HARDWARE, ASSUMED)}
    assert list(found) == ["select", "rollout", "score", "update", "push"]
    forward = shape.decoder_flops(36) + shape.head_flops(20)
    # Half of four questions are replayed: 14 fresh answers, two of 16 rows come from the buffer. The first of the two
    # optimiser steps scores its half itself.
    assert found["score"].flops == 7 * forward
    assert found["select"].flops == 2 * 4 * forward
    assert found["update"].flops == 16 * (4 * shape.decoder_flops(36) + 3 * shape.head_flops(20))
    assert found["update"].seconds == pytest.approx(found["update"].flops / (2 * 1e12 * 0.4))
    plain = {
        phase.name: phase for phase in phases(recipe(questions=4, rollout={"samples": 4}), shape, HARDWARE, ASSUMED)
    }
    assert found["update"].flops - plain["update"].flops == 16 * shape.decoder_flops(36)
    adapted = config.model_copy(update={"lora": LoraConfig(rank=8)})
    (update,) = (phase for phase in phases(adapted, shape, HARDWARE, ASSUMED) if phase.name == "update")
    assert update.flops == 16 * (3 * shape.decoder_flops(36) + 2 * shape.head_flops(20))


@pytest.mark.parametrize(
    ("sections", "scored"),
    [
        ({"optimizer": {"minibatches": 1}}, 0),
        ({"optimizer": {"minibatches": 4, "passes": 2}}, 12),
        ({"optimizer": {"minibatches": 4}, "objective": {"kl_coef": 0.1}}, 12 + 16),
        ({"optimizer": {"minibatches": 4}, "objective": {"anchor": "start", "surrogate": "oapl"}}, 12 + 16),
        ({"optimizer": {"minibatches": 1}, "rollout": {"samples": 4, "behaviour": "engine"}}, 16),
        ({"optimizer": {"minibatches": 1}, "objective": {"train_on": "hard"}}, 16),
        ({"optimizer": {"minibatches": 1}, "experience": {"compose": "in_place", "ratio": 0.5}}, 16),
    ],
)
def test_the_first_optimiser_step_scores_its_own_answers(sections, scored):
    shape = shape_like(llama())
    values = {"questions": 4, "rollout": {"samples": 4}, "experience": {"ratio": 0}, **sections}
    found = {phase.name: phase for phase in phases(recipe(**values), shape, HARDWARE, ASSUMED)}
    assert found["score"].flops == scored * (shape.decoder_flops(36) + shape.head_flops(20))


@pytest.mark.parametrize("compose", ["mixed", "traced", "appended", "buffer", "returning"])
def test_answers_are_generated_however_much_is_replayed(compose):
    """Of three questions with four answers each, all of which are replayed."""
    config = recipe(questions=3, rollout={"samples": 4}, experience={"compose": compose, "ratio": 1, "replayed": 5})
    found = budget.work(config, ASSUMED)
    assert found.fresh == {"mixed": 3, "traced": 3, "appended": 12}.get(compose, 4)
    assert found.rows == {"appended": 12 + 15}.get(compose, 12)


def test_nothing_is_scored_to_choose_at_random():
    shape = shape_like(llama())
    config = recipe(experience={"trajectory": "random"})
    assert phases(config, shape, HARDWARE, ASSUMED)[0].flops == 0
    # The only optimiser step is the policy before the update itself; with more of them its log-probs take a pass.
    for minibatches, passes in ((1, False), (2, True)):
        config = recipe(
            questions=2,
            experience={"trajectory": "random"},
            objective={"weigh": "uncorrected"},
            optimizer={"minibatches": minibatches},
        )
        assert bool(phases(config, shape, HARDWARE, ASSUMED)[0].flops) == passes


def test_the_reference_of_a_run_with_adapters_is_those_of_its_start():
    for kl_coef, expected in ((0.1, 4), (0.0, 0)):
        config = recipe(policy={"dtype": "bf16"}, lora={"rank": 4}, objective={"kl_coef": kl_coef})
        found = sizes(gpu_memory(config, SMALL, HARDWARE_OF_ONE.gpus))
        assert found["reference"]["loss"] == expected * SMALL.adapters(LoraConfig(rank=4))


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


def seconds(config, gpus=2) -> float:
    return sum(phase.seconds for phase in phases(config, SMALL, Hardware(gpus, 1e9, 1e12, 1e12), ASSUMED))


def never_more(less, more) -> bool:
    return all(a <= b for a, b in zip(less, more, strict=True))


@given(RECIPE, st.integers(1, 64), st.integers(1, 64))
def test_more_gpus_never_take_more_memory_each_nor_more_time(sections, gpus, more):
    config = recipe(**sections)
    if gpus > 1:  # what one process does without, as DeepSpeed's buckets, may be more than a model
        assert never_more(peaks(config, gpus + more), peaks(config, gpus))
        assert seconds(config, gpus + more) <= seconds(config, gpus) * (1 + 1e-9)


@given(RECIPE, st.integers(1, 4000))
def test_smaller_batches_checkpointing_and_offloading_never_take_more_memory(sections, more):
    config = recipe(**sections)
    for section, key in (("optimizer", "micro_batch_tokens"), ("rollout", "batch_tokens")):
        larger = recipe(**{**sections, section: {**sections[section], key: sections[section][key] + more}})
        assert never_more(peaks(config), peaks(larger))
    for section, key in (("policy", "gradient_checkpointing"), ("distributed", "offload_optimizer")):
        off, on = (recipe(**{**sections, section: {**sections[section], key: value}}) for value in (False, True))
        assert never_more(peaks(on), peaks(off))


@given(RECIPE, st.floats(1e5, 1e10))
def test_advice_is_true(sections, memory):
    """The change that is named makes the recipe fit, or it is said that none does."""
    config, hardware = recipe(**sections), Hardware(2, memory, 1e12, 1e12)
    if max(peaks(config)) <= memory:
        return
    advice = advise(config, SMALL, hardware)
    if advice.startswith("No option"):
        return
    changes = dict(re.findall(r"--(\S+) ([^\s:]+)", advice))
    on = re.search(r"on (\d+) GPUs", advice)
    gpus = int(on[1]) if on else 2
    assert max(peaks(changed(config, changes), gpus)) <= memory
