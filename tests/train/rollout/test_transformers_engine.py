"""The transformers engine: draws, ends, cuts, log-probs, weights and random state; and on the policy's own module."""

import dataclasses
import inspect

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import RolloutError
from exgrpo.train.common.records import SHARED, Rollout
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.config.objective import ObjectiveConfig
from exgrpo.train.policy.attention import ONE_TOKEN, PACKED
from exgrpo.train.policy.policy import Policy
from exgrpo.train.policy.source import find_model
from exgrpo.train.rollout.engine import Request, Sampling, collect, generate
from exgrpo.train.rollout.transformers.decode import CACHE_ARGUMENTS
from exgrpo.train.rollout.transformers.draws import Noise, draw, invert
from exgrpo.train.rollout.transformers.engine import SharedEngine, TransformersEngine, shares_policy
from tests.integrations import tiny as models
from tests.train import tiny
from tests.train.asking import check_ends, in_two_parts, requests_for
from tests.train.configs import configured
from tests.train.run.test_weight_check import FullLogitPolicy

pytestmark = pytest.mark.usefixtures("one_thread")
EOS = (2, 5)
PROMPTS = [tiny.prompt(question) for question in range(6)]


@pytest.fixture
def engine(folder):
    return TransformersEngine(tiny.engine_settings(folder, eos=EOS, batch_tokens=100), ALONE)


def ids(answers):
    return [[rollout.response.tolist() for rollout in of_prompt] for of_prompt in answers]


def test_finished_answers_end_with_their_first_eos_and_cut_ones_have_none(engine):
    counts = [40, 1, 0, 3, 40, 40]
    answers = tiny.rollouts(engine, PROMPTS, counts, Sampling(max_tokens=12), seed=0)
    assert [len(of_prompt) for of_prompt in answers] == counts
    everything = [rollout for of_prompt in answers for rollout in of_prompt]
    check_ends([(rollout.response, rollout.finished, None) for rollout in everything], EOS, 12)
    # A pad that the model says itself stays in the response.
    assert any(0 in rollout.response[:-1] for rollout in everything)


def test_the_seed_decides_and_the_callers_random_state_stays(engine):
    sampling = Sampling(max_tokens=8)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first = ids(tiny.rollouts(engine, PROMPTS, [2] * 6, sampling, seed=1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert ids(tiny.rollouts(engine, PROMPTS, [2] * 6, sampling, seed=1)) == first
    assert ids(tiny.rollouts(engine, PROMPTS, [2] * 6, sampling, seed=2)) != first


def test_log_probs_are_those_of_a_full_forward_at_the_temperature_before_and_after_a_push(engine, folder):
    policy, sampling = FullLogitPolicy(folder), Sampling(max_tokens=12, temperature=0.7, log_prob=True)
    torch.manual_seed(1)
    for changed in (False, True):
        if changed:
            for _, weight in policy.weights():
                weight.add_(torch.randn_like(weight), alpha=0.1)
            engine.push_weights(policy.weights())
        assert policy.gap(PROMPTS, tiny.rollouts(engine, PROMPTS, [3] * 6, sampling, seed=0), 0.7)[0] < 1e-4


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9, "top_k": 30, "min_p": 0.01, "allowed_tokens": True}])
def test_begun_answers_go_on_as_the_policy_does_after_prompt_and_beginning(engine, folder, cut):
    sampling = Sampling(max_tokens=12, temperature=0.7, log_prob=True, **cut)
    asked = requests_for(PROMPTS, [5, 1, 0, 3, 5, 5], sampling, range(6))
    answers = in_two_parts(engine, asked, 4)
    for rollout in (rollout for of_prompt in answers for rollout in of_prompt):
        ends = np.flatnonzero(np.isin(rollout.response, EOS)).tolist()
        assert ends == ([len(rollout.response) - 1] if rollout.finished else [])
        assert rollout.finished or len(rollout.response) == 12
    assert FullLogitPolicy(folder).gap(PROMPTS, answers, 0.7)[0] < 1e-4


def test_beginnings_may_lack_log_probs_differ_by_answer_or_be_the_whole(engine, folder):
    begun, whole = Rollout(np.array([7, 8], np.int32), False), Rollout(np.array([9, 2], np.int32), True)
    longest = Rollout(np.arange(10, 22, dtype=np.int32), False)
    sampling = Sampling(max_tokens=12, log_prob=True)
    asked = [Request(PROMPTS[0], 6, sampling, 3, begun=(begun, whole, None, longest, begun, None))]
    (answers,) = collect(asked, generate(engine, asked))
    assert answers[1] is whole
    assert answers[3] is longest
    for at in (0, 4):
        assert answers[at].response[:2].tolist() == [7, 8]
        assert np.isnan(answers[at].log_prob).tolist() == [True] * 2 + [False] * (len(answers[at].response) - 2)
    assert answers[0].response.tolist() != answers[4].response.tolist()
    assert answers[2].response.tolist() != answers[5].response.tolist()
    assert FullLogitPolicy(folder).gap(PROMPTS[:1], [[answers[2], answers[5]]], 1.0)[0] < 1e-4


def test_weights_that_are_missing_or_unknown_are_named(engine):
    weights = [(name, p.data) for name, p in engine.model.named_parameters()]
    with pytest.raises(ValueError, match=f"nothing came for {weights[0][0]}"):
        engine.push_weights(weights[1:])
    with pytest.raises(ValueError, match=r"no parameter 'lm_head\.extra'"):
        engine.push_weights([*weights, ("lm_head.extra", weights[0][1])])


UNLIKE = ("llama", "gemma3_text", "mamba")
"""Architectures that read a prompt each in its own way: the others are tried in `make test-long`."""
OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in models.ARCHITECTURES if name not in (*UNLIKE, "bert")]


@pytest.mark.parametrize("name", [*UNLIKE, *OTHERS])
@pytest.mark.parametrize("shared", [0, SHARED])
def test_answers_depend_on_nothing_that_is_generated_beside_them(name, shared, tmp_path):
    """Whatever the batch is, the answers are the same, and their scores those of a full forward."""
    models.model(name).save_pretrained(tmp_path)
    begin = np.random.default_rng(0).integers(3, models.VOCABULARY, shared).astype(np.int32)
    prompts = [np.concatenate([begin, prompt % models.VOCABULARY]) for prompt in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    sampling, seeds = Sampling(max_tokens=12, temperature=0.8, log_prob=True), list(range(6))
    found = {}
    for batch_tokens in (20, 100 + 8 * shared, 5000):
        settings = tiny.engine_settings(tmp_path, eos=EOS, batch_tokens=batch_tokens)
        attention = "eager" if name in ("gemma2", "gptj", "mamba") else "sdpa"
        engine = TransformersEngine(dataclasses.replace(settings, attention=attention), ALONE)
        asked = requests_for(prompts, [5] * 6, sampling, seeds)
        answers = collect(asked, engine.generate(asked))
        found[batch_tokens] = ids(answers)
    (alone,) = collect(asked[3:4], engine.generate(asked[3:4]))
    assert all(answers == found[20] for answers in found.values())
    assert ids([alone]) == found[20][3:4]
    assert len({len(response) for of_prompt in found[20] for response in of_prompt}) >= 3
    for prompt, of_prompt in zip(prompts, answers, strict=True):
        for rollout in of_prompt:
            tokens = torch.tensor([*prompt, *rollout.response])
            with torch.no_grad():
                full = (model(tokens[None, :-1]).logits[0, len(prompt) - 1 :] / 0.8).log_softmax(-1)
            log_prob = full[torch.arange(len(rollout.response)), torch.from_numpy(rollout.response).long()]
            torch.testing.assert_close(torch.from_numpy(rollout.log_prob), log_prob, atol=1e-4, rtol=0)
            entropy = -(full.exp() * full).sum(-1)
            torch.testing.assert_close(torch.from_numpy(rollout.entropy), entropy, atol=1e-4, rtol=0)


def test_a_prompt_is_read_once_for_all_its_answers(engine):
    tiny.rollouts(engine, PROMPTS[:2], [4, 1], Sampling(max_tokens=3), seed=0)
    counts = engine.counts()
    lengths = [len(prompt) for prompt in PROMPTS[:2]]
    assert counts.prompt_tokens == 4 * lengths[0] + lengths[1]
    assert counts.cached_tokens == 3 * lengths[0]


def test_what_prompts_begin_with_is_read_once(engine):
    prompts = [np.concatenate([np.full(SHARED, 7, np.int32), prompt]) for prompt in PROMPTS[:2]]
    tiny.rollouts(engine, prompts, [1, 1], Sampling(max_tokens=3), seed=0)
    assert engine.counts().cached_tokens == SHARED


def forward_by(model, name, *, hand_on):
    """The forward of a model, which takes its cache by a name or not at all, and hands it on or loses it."""
    own = model.forward
    accepted = inspect.signature(own).parameters
    (taken,) = [argument for argument in CACHE_ARGUMENTS if argument in accepted]

    def forward(**options):
        cache = options.pop(name, None)
        return own(**options, **({taken: cache} if hand_on else {}))

    names = [argument for argument in accepted if argument != taken] + [name] * bool(name)
    forward.__signature__ = inspect.Signature(
        [inspect.Parameter(argument, inspect.Parameter.KEYWORD_ONLY) for argument in names]
    )
    return forward


@pytest.mark.parametrize("name", CACHE_ARGUMENTS)
def test_a_model_gets_its_cache_by_the_name_that_it_takes_it_by(name, engine, monkeypatch):
    sampling = Sampling(max_tokens=8)
    expected = ids(tiny.rollouts(engine, PROMPTS, [2] * 6, sampling, seed=1))
    monkeypatch.setattr(engine.model, "forward", forward_by(engine.model, name, hand_on=True))
    assert ids(tiny.rollouts(engine, PROMPTS, [2] * 6, sampling, seed=1)) == expected


@pytest.mark.parametrize("name", ["", "cache", "past_key_values"])
def test_a_model_that_loses_its_cache_is_refused(name, engine, monkeypatch):
    monkeypatch.setattr(engine.model, "forward", forward_by(engine.model, name, hand_on=False))
    with pytest.raises(RolloutError, match=r"LlamaForCausalLM of transformers 5\..* does not use the given cache"):
        tiny.rollouts(engine, PROMPTS, [2] * 6, Sampling(max_tokens=8), seed=1)


def by_running_sum(probability, uniform):
    """The plain rule, token by token in float64."""
    reached = np.cumsum(np.asarray(probability, np.float64))
    return int(np.searchsorted(reached, uniform * reached[-1], side="right"))


@given(st.integers(1, 700), st.integers(0, 2**32 - 1), st.floats(0, 1, exclude_max=True))
def test_a_token_is_where_the_running_sum_passes_the_number(vocabulary, seed, uniform):
    probability = np.random.default_rng(seed).dirichlet(np.full(vocabulary, 0.2)).astype(np.float32)
    found = int(invert(torch.from_numpy(probability)[None], torch.tensor([uniform], dtype=torch.float64)))
    expected = by_running_sum(probability, uniform)
    # At the edge of a token, rounding may decide for its neighbour that has a probability.
    reached = np.cumsum(probability.astype(np.float64)) / probability.sum(dtype=np.float64)
    near = {expected} | {i for i in np.flatnonzero(probability) if abs(reached[i] - uniform) < 1e-12}
    near |= {int(np.flatnonzero(probability[i + 1 :])[0]) + i + 1 for i in near if probability[i + 1 :].any()}
    assert found == expected or (found in near and min(abs(reached - uniform)) < 1e-12)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("vocabulary", [3, 256, 257, 5000])
def test_a_token_without_probability_is_never_drawn(uniform, vocabulary):
    for only in {0, 1, vocabulary // 2, vocabulary - 1}:
        probability = torch.zeros(1, vocabulary)
        probability[0, only] = 1.0
        assert invert(probability, torch.tensor([uniform])).item() == only


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 0.8, 0), (9, 1, 0), (0, 1, 0.1), (12, 0.9, 0.02), (40, 1, 0)]
)
def test_draws_at_a_temperature_from_the_words_that_are_left(top_k, top_p, min_p):
    torch.manual_seed(0)
    logits = 2 * torch.randn(1, 40)
    uniform = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    sampling = Sampling(1, temperature=0.7, top_p=top_p, top_k=top_k, min_p=min_p, allowed_tokens=True)
    drawn = draw(logits.expand(20000, -1), uniform, sampling)
    order = logits[0].argsort(descending=True)
    ordered = (logits[0].double() / 0.7).softmax(-1)[order]
    ordered[top_k or 40 :] = 0
    ordered /= ordered.sum()
    ordered *= (ordered.cumsum(0) - ordered < top_p) & (ordered >= min_p * ordered[0])  # the least set that reaches it
    nucleus = torch.zeros_like(ordered)
    nucleus[order] = ordered / ordered.sum()
    left = nucleus.nonzero().flatten().tolist()
    assert all(words.tolist() == (left if len(left) < 40 else []) for words in drawn.allowed_tokens.lists())
    # Evenly spaced numbers give each token its share of them, but for one at each of its edges.
    counts = torch.bincount(drawn.token, minlength=40)
    assert ((counts - 20000 * nucleus).abs() <= 1).all()
    torch.testing.assert_close(drawn.log_prob.double(), nucleus.log()[drawn.token], atol=1e-5, rtol=0)
    entropy = -(nucleus[nucleus > 0] * nucleus[nucleus > 0].log()).sum()
    torch.testing.assert_close(drawn.entropy.double(), entropy.expand(20000), atol=1e-5, rtol=0)


def test_noise_belongs_to_the_answer_and_the_position():
    keys = [(7, 0), (7, 1), (8, 0)]
    noise = Noise(keys)
    everyone = np.arange(3)
    together = np.stack([noise.at(position, everyone) for position in range(130)])
    for number, key in enumerate(keys):
        own = Noise([key])
        alone = [own.at(position, np.array([0]))[0] for position in range(130)]
        np.testing.assert_array_equal(together[:, number], alone)
    assert len(np.unique(together)) == together.size
    assert abs(together.mean() - 0.5) < 4 * (12 * together.size) ** -0.5


OBJECTIVE = ObjectiveConfig(entropy_coef=0.01)
SAMPLING = Sampling(max_tokens=12, log_prob=True)
ADAPTERS = {"rank": 4, "alpha": 8}
CASES = {
    "all weights": {},
    "bf16": {"dtype": "bf16"},
    "adapters": {"lora": ADAPTERS},
    "4 bits": {"lora": {**ADAPTERS, "quantised": "nf4"}},
    "compiled": {"compile": "inductor"},  # of which a copy knows nothing
}


def make(folder, dtype="fp32", **options):
    """A policy after a step, and the engine that shares it."""
    policy = Policy(tiny.config(folder, OBJECTIVE, dtype=dtype, **options), find_model(str(folder)), ALONE)
    update(policy, 0)
    return policy, SharedEngine(tiny.engine_settings(folder, dtype, batch_tokens=100), ALONE, policy)


def update(policy, number):
    return policy.update(tiny.minibatches(OBJECTIVE)[number], clip=True)


def awake_rollouts(engine):
    engine.wake()
    answers = tiny.rollouts(engine, PROMPTS[:4], [3] * 4, SAMPLING, seed=0)
    engine.sleep()
    return [(prompt, answer) for prompt, of_prompt in zip(PROMPTS[:4], answers, strict=True) for answer in of_prompt]


def log_probs(answers):
    return np.concatenate([answer.log_prob for _, answer in answers])


def scored(policy, answers):
    return policy.score(StepBatch.from_answers(*zip(*answers, strict=True)), 1.0).log_prob


@pytest.mark.parametrize("name", [*list(CASES)[:-1], pytest.param("compiled", marks=pytest.mark.long)])
def test_answers_are_those_of_a_copy_and_their_log_probs_the_trainers(name, folder, monkeypatch):
    if "lora" in CASES[name]:
        pytest.importorskip("peft", reason="peft is not installed")
    if name == "4 bits":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    monkeypatch.setattr("exgrpo.train.policy.model.BACKEND", "aot_eager")  # which needs no compiler
    policy, engine = make(folder, **CASES[name])
    copy = TransformersEngine(tiny.engine_settings(folder, CASES[name].get("dtype", "fp32"), batch_tokens=100), ALONE)
    copy.push_weights(policy.weights())
    graphs = counters["stats"]["unique_graphs"]
    ours, theirs = awake_rollouts(engine), awake_rollouts(copy)
    assert counters["stats"]["unique_graphs"] == graphs
    assert [answer.response.tolist() for _, answer in ours] == [answer.response.tolist() for _, answer in theirs]
    # A copy has the adapters added to its weights, which rounds them once; without adapters nothing differs.
    tolerance = 1e-4 if "lora" in CASES[name] else 0
    np.testing.assert_allclose(log_probs(ours), log_probs(theirs), rtol=0, atol=tolerance)
    # In bf16 a logit of about 4 is off by 2^-7 after each of some roundings.
    trainers = 0.1 if name == "bf16" else 1e-4
    np.testing.assert_allclose(log_probs(ours), scored(policy, ours), rtol=0, atol=trainers)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_generating_changes_nothing_for_the_trainer(dtype, folder):
    """Its state between steps, and the steps themselves, bit for bit, with activations that are computed again."""
    policy, engine = make(folder, dtype, checkpointing=True)
    alone, _ = make(folder, dtype, checkpointing=True)
    policy.engine.train()
    engine.wake()
    assert not policy.model.training
    assert policy.model.config._attn_implementation == ONE_TOKEN
    engine.wake()
    engine.sleep()
    assert policy.model.training
    assert policy.model.config._attn_implementation == PACKED
    for number in (1, 2):
        awake_rollouts(engine)
        ours, theirs = update(policy, number), update(alone, number)
        assert (ours.loss, ours.grad_norm) == (theirs.loss, theirs.grad_norm)
    for (name, ours), (_, theirs) in zip(policy.weights(), alone.weights(), strict=True):
        assert torch.equal(ours, theirs), name


def test_weights_of_another_policy_are_named(folder):
    policy, engine = make(folder)
    other, _ = make(folder, optimizer={"lr": 5e-3})
    assert engine.differing(policy.weights()) == []
    engine.push_weights(other.weights())
    assert "model.layers.0.self_attn.q_proj.weight" in engine.differing(other.weights())


@pytest.mark.parametrize(
    ("options", "ranks", "shared"),
    [
        ({}, 1, True),
        ({}, 2, False),
        ({"policy.dtype": "bf16", "lora.rank": 4, "lora.quantised": "nf4"}, 1, True),
        ({"distributed.offload_optimizer": True}, 1, True),
        ({"rollout.engine": "vllm"}, 1, False),
    ],
)
def test_one_process_that_keeps_the_policy_whole_shares_it(options, ranks, shared):
    assert shares_policy(configured({"rollout.engine": "transformers"}, options), ranks) == shared
