"""The plan of a GPU's memory: what fits is the fastest, what is set is kept, and all ranks have the same."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config

from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.limits import RESERVED_GIB
from exgrpo.train.config.options import PLANNED
from exgrpo.train.config.section import flat
from exgrpo.train.policy.source import find_model
from exgrpo.train.rollout.vllm.engine import GIB
from exgrpo.train.run.memory import MOMENTS, gpu_memory, peak
from exgrpo.train.run.plan import ENOUGH_SEQUENCES, ENOUGH_TOKENS, make_plan, plan_run
from tests.train.configs import configured
from tests.train.fakes import one_of_two
from tests.train.shapes import PUBLISHED, SMALL

OPEN = dict.fromkeys(PLANNED)
LENGTHS = {"data.max_prompt_tokens": 1024, "rollout.max_tokens": 2048, "questions": 128, "policy.dtype": "bf16"}


def asked(**values):
    """The default options of a run on GPUs, with some of them set."""
    return configured(OPEN, LENGTHS, {"rollout.engine": "vllm"}, values)


def planned(config, shape, gpus, gib):
    plan = make_plan(config, shape, gpus, gib * GIB)
    assert plan.fits == all(peak(gpu_memory(plan.config, shape, gpus), moment) <= gib * GIB for moment in MOMENTS)
    return plan


@pytest.mark.parametrize(
    ("model", "gpus", "gib", "kept", "tokens", "rows"),
    [
        ("1.5B", 1, 80, True, ENOUGH_TOKENS, ENOUGH_SEQUENCES),
        ("1.5B", 1, 48, False, ENOUGH_TOKENS, ENOUGH_SEQUENCES),
        ("1.5B", 1, 40, False, ENOUGH_TOKENS, 128),
        ("3B", 1, 80, False, ENOUGH_TOKENS, ENOUGH_SEQUENCES),
        ("3B", 1, 141, True, ENOUGH_TOKENS, ENOUGH_SEQUENCES),
        ("7B", 4, 80, False, ENOUGH_TOKENS, 128),
        ("7B", 8, 80, False, ENOUGH_TOKENS, 128),
        ("7B", 8, 141, True, ENOUGH_TOKENS, 128),
    ],
)
@pytest.mark.parametrize("level", [0, 2])
def test_what_is_planned_for_known_models(model, gpus, gib, kept, tokens, rows, level):
    """128 answers are all that one of eight GPUs generates."""
    plan = planned(asked(**{"rollout.sleep_level": level}), PUBLISHED[model](), gpus, gib - RESERVED_GIB)
    assert plan.fits or level == 0
    if level:
        assert plan.config.policy.checkpointing is not kept
        assert plan.config.pass_tokens >= tokens
        assert plan.rows >= rows


SHORT = {"questions": 16, "data.max_prompt_tokens": 128, "rollout.max_tokens": 512}


@pytest.mark.parametrize(
    ("model", "gpus", "gib", "values", "level", "tokens"),
    [
        ("1.5B", 1, 80, SHORT, 0, 13312),
        ("1.5B", 1, 40, SHORT, 0, ENOUGH_TOKENS),
        ("1.5B", 1, 80, {}, 2, 13312),  # a cache of 51 GiB
        ("1.5B", 1, 141, {}, 0, 14336),  # instead of 30,720
        ("7B", 8, 80, {}, 0, ENOUGH_TOKENS),
        ("7B", 8, 80, {"rollout.sleep_level": 1}, 1, ENOUGH_TOKENS),
    ],
)
def test_an_engine_stays_where_that_costs_no_answer_and_no_checkpointing(model, gpus, gib, values, level, tokens):
    shape, room = PUBLISHED[model](), gib - RESERVED_GIB
    plan = planned(asked(**values), shape, gpus, room)
    asleep = planned(asked(**values, **{"rollout.sleep_level": 2} if level == 0 else {}), shape, gpus, room)
    assert (plan.config.rollout.sleep_level, plan.config.pass_tokens) == (level, tokens)
    assert (plan.rows, plan.config.policy.checkpointing) == (asleep.rows, asleep.config.policy.checkpointing)
    assert plan.config.rollout.kv_cache_gib == asleep.config.rollout.kv_cache_gib
    held = sum(item.step for item in plan.items if item.name.startswith("rollout engine"))
    assert (held > plan.config.rollout.kv_cache_gib * GIB) == (level == 0)
    assert ("in an engine that never sleeps" in str(plan)) == (level == 0)


def test_what_does_not_fit_is_one_line_and_what_was_set_is_tried():
    plan = planned(asked(), PUBLISHED["7B"](), 1, 76)
    with pytest.raises(ConfigError, match=r"does not fit into 76.0 GiB of a GPU: .* most of it for AdamW") as raised:
        plan.check()
    assert "\n" not in str(raised.value)
    values = {"policy.gradient_checkpointing": False, "optimizer.micro_batch_tokens": 32768}
    plan = planned(asked(**values), PUBLISHED["1.5B"](), 1, 76)
    plan.check()
    assert str(plan).endswith("this does not fit, and may run out of memory")
    assert plan.rows >= ENOUGH_SEQUENCES  # while the trainer's memory is not there


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "policy.gradient_checkpointing": st.booleans(),
        "optimizer.micro_batch_tokens": st.integers(4000, 50000),
        "rollout.kv_cache_gib": st.sampled_from([0.1, 3.0]),
    },
)
OTHERS = st.fixed_dictionaries(
    {
        "rollout.engine": st.sampled_from(["vllm", "transformers"]),
        "rollout.sleep_level": st.sampled_from([None, 0, 1, 2]),
        "rollout.max_tokens": st.sampled_from([16, 2000, 2976]),
        "policy.dtype": st.sampled_from(["fp32", "bf16"]),
        "policy.kernel_memory_gib": st.sampled_from([None, 0.25, 4.0]),
        "questions": st.sampled_from([64, 1000]),
    }
)


def shaped(width, layers, times):
    parameters = tuple(times * elements for elements in SMALL.parameters)
    sizes = {"width": 64 * width, "mlp": 160 * width, "layers": layers, "vocabulary": 97 * times}
    return dataclasses.replace(SMALL, parameters=parameters, **sizes)


SIZES = st.builds(
    shaped,
    st.integers(1, 60),
    st.integers(2, 60),  # to compute the only layer again saves nothing
    st.integers(1, 20000),
)


@given(VALUES, OTHERS, SIZES, st.integers(1, 8), st.floats(0.5, 150), st.floats(0, 50))
def test_more_memory_never_gives_less_and_nothing_exceeds_it(values, others, shape, gpus, gib, more):
    config = asked(**values, **others)
    small, large = (planned(config, shape, gpus, amount) for amount in (gib, gib + more))
    for plan in (small, large):
        found = flat(plan.config)
        assert {key: found[key] for key in values} == values
        is_open = {key for key in PLANNED if {**values, **others}.get(key) is None}
        if others["rollout.engine"] != "vllm":
            is_open -= {"rollout.kv_cache_gib", "rollout.sleep_level"}
        assert set(plan.chosen) == is_open
        assert all(found[key] is not None for key in plan.chosen)
        # Once more, it finds all it needs: a run that goes on has the same.
        again = planned(plan.config, shape, gpus, gib)
        assert (again.config, again.chosen) == (plan.config, ())
    assert small.fits <= large.fits
    enough = small.config.pass_tokens
    if others["rollout.sleep_level"] is None and large.config.rollout.sleep_level == 0:
        enough = min(enough, max(ENOUGH_TOKENS, small.config.longest))  # the rest is given up for an engine that stays
    assert enough <= large.config.pass_tokens
    assert (small.config.rollout.kv_cache_gib or 0) <= (large.config.rollout.kv_cache_gib or 0)
    assert large.config.policy.checkpointing <= small.config.policy.checkpointing


def test_cpus_have_the_defaults_that_they_always_had():
    config, line = plan_run(asked(), find_model("builtin:arithmetic"), ALONE)
    assert {key: flat(config)[key] for key in PLANNED} == dict(zip(PLANNED, (True, 16384, None, None), strict=True))
    assert line is None
    long = asked(**{"rollout.max_tokens": 30000})
    assert plan_run(long, find_model("builtin:arithmetic"), ALONE)[0].pass_tokens == 31024


@pytest.fixture
def pair(monkeypatch):
    """Two ranks with a GPU each, of which the other one has less free memory: 10 GiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    return one_of_two(lambda value: 10 * GIB if isinstance(value, int) else value, torch.device("cuda", 0))


def test_ranks_plan_with_the_least_memory_that_is_free_on_any(pair):
    source = find_model("builtin:arithmetic")
    config, line = plan_run(asked(), source, pair)
    assert line.startswith(f"memory plan: passes of {config.pass_tokens} tokens without activation checkpointing, a ca")
    assert " of 6.0 GiB are taken" in line
    assert plan_run(config, source, pair) == (config, line)


def test_a_model_that_cannot_be_counted_is_not_planned(pair):
    config, line = plan_run(asked(), SimpleNamespace(config=GPT2Config()), pair)
    assert line.startswith("no memory plan, since model 'gpt2' has no intermediate_size")
    assert (config.policy.checkpointing, config.pass_tokens, config.rollout.kv_cache_gib) == (True, 16384, None)
