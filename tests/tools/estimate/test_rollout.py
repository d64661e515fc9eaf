"""Generation: its time against simulations, its memory, and an engine that is the policy itself."""

import dataclasses

import numpy as np
import pytest

from exgrpo.tools.estimate.budget import (
    asleep_bytes,
    phases,
    rollout_seconds,
)
from exgrpo.tools.estimate.parts import Hardware
from exgrpo.train.config.policy import LoraConfig
from exgrpo.train.run.memory import NF4_BYTES, gpu_memory, rollout_memory, slots
from tests.tools.estimate.shapes import ASSUMED, HARDWARE, HARDWARE_OF_ONE, SMALL, llama, recipe, shape_like, sizes


def test_decoding_one_answer_reads_the_weights_once_per_token():
    """Without launches, and with memory too slow for anything else to matter."""
    shape = shape_like(llama())
    config = recipe(questions=1, rollout={"samples": 2, "batch_tokens": 40}, optimizer={"minibatches": 1})
    slow = Hardware(1, 0, 1e18, 1e3)
    assumed = dataclasses.replace(ASSUMED, layer_launch=0, bandwidth_use=1)
    bytes_per_token = 4 * shape.read_per_token + (16 + 10) * shape.kv_bytes(4)
    assert rollout_seconds(config, shape, slow, assumed) == pytest.approx(2 * 20 * bytes_per_token / 1e3)


def test_a_batch_lasts_as_long_as_its_longest_answer():
    """Against drawn lengths, where nothing but launches takes time: two batches of four answers of 4 tokens each."""
    longest = np.random.default_rng(0).exponential(4.0, (20000, 4)).max(1).mean()
    config = recipe(questions=2, rollout={"samples": 4, "max_tokens": 84, "batch_tokens": 400})
    assumed = dataclasses.replace(ASSUMED, response_tokens=4, layer_launch=1.0)
    found = rollout_seconds(config, SMALL, HARDWARE_OF_ONE, assumed)
    assert found == pytest.approx(2 * longest * SMALL.layers, rel=0.02)


VLLM = {"engine": "vllm", "samples": 4, "max_tokens": 84, "batch_tokens": 100}


@pytest.mark.parametrize("questions", [1, 2, 16, 200])
def test_vllm_fills_the_places_of_ended_answers(questions):
    """Against a simulation of four places and drawn lengths, where nothing but reading the weights takes time."""
    rng, simulated = np.random.default_rng(0), []
    for _ in range(300):
        ends = np.zeros(4)
        for length in rng.exponential(4.0, 4 * questions):
            ends[ends.argmin()] += length
        simulated.append(ends.max())
    slow = Hardware(1, 0, 1e18, 1e3)
    assumed = dataclasses.replace(ASSUMED, response_tokens=4, bandwidth_use=1, layer_launch=1.0)
    shape = dataclasses.replace(SMALL, heads=1, kv_heads=1, head_width=1)
    places = {"kv_cache_gib": 4 * (16 + 84 / 2) * shape.kv_bytes(4) / 2**30}
    config = recipe(questions=questions, rollout=VLLM | places, optimizer={"minibatches": 1})
    found = rollout_seconds(config, shape, slow, assumed) / (4 * shape.read_per_token / 1e3)
    # Both bounds of the estimate are lower ones; they are met where the places stay full, or one batch is enough.
    assert 0.7 * np.mean(simulated) <= found <= 1.02 * np.mean(simulated)
    own = rollout_seconds(config, shape, slow, dataclasses.replace(assumed, engine_step=1.0))
    assert own - rollout_seconds(config, shape, slow, assumed) == pytest.approx(found, rel=0.01)


def test_vllms_cache_limits_what_it_generates_at_once():
    small = recipe(questions=64, rollout={**VLLM, "kv_cache_gib": 1e-4})
    held = (16 + 84 / 2) * SMALL.kv_bytes(4)
    assert slots(small, SMALL, 1, ASSUMED.prompt_tokens) == int(1e-4 * 2**30 // held) < 64 * 4
    (item,) = [item for item in rollout_memory(small, SMALL, 1) if "cache" in item.name]
    assert item.rollout == 1e-4 * 2**30


def test_where_a_sleeping_engine_keeps_its_weights():
    for level, on_gpu, in_cpu in ((0, True, False), (1, False, True), (2, False, False)):
        config = recipe(rollout={**VLLM, "sleep_level": level})
        weights = rollout_memory(config, SMALL, 2)[0]
        assert weights.rollout == 4 * SMALL.total
        assert weights.backward == (4 * SMALL.total if on_gpu else 0)
        assert asleep_bytes(config, SMALL, 2) == (8 * SMALL.total if in_cpu else 0)
    config = recipe(rollout={**VLLM, "engine": "server", "servers": ["http://elsewhere:8000"]})
    assert (rollout_memory(config, SMALL, 2), asleep_bytes(config, SMALL, 2)) == ((), 0)


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
    """One process has the weights once, and pushes nothing; two have copies, which sleep in CPU memory."""
    config = recipe(policy={"dtype": "bf16" if lora else "fp32"}, lora=lora)
    found = sizes(gpu_memory(config, SMALL, HARDWARE_OF_ONE.gpus))
    assert found["weights"]["rollout"] == weights
    assert found["rollout engine, weights"]["rollout"] == 0
    assert found["rollout engine, key/value cache"]["rollout"] > 0
    assert found["gathered weights"]["rollout"] == dequantised
    assert asleep_bytes(config, SMALL, 1) == 0
    assert phases(config, SMALL, HARDWARE_OF_ONE, ASSUMED)[-1].seconds == 0
    assert rollout_memory(config, SMALL, 2)[0].rollout > 0
    assert asleep_bytes(config, SMALL, 2) > 0
    assert phases(config, SMALL, HARDWARE, ASSUMED)[-1].seconds > 0
