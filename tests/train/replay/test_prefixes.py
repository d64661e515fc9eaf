"""Answers that begin with a part of a stored one: their gradient, what they count in, how the share is steered."""

import copy
import dataclasses
import json
import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from exgrpo.train.common.columns import columns_of
from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.records import Rollout
from exgrpo.train.policy.layout import Packed, Padded
from exgrpo.train.policy.loss import LossTerms
from exgrpo.train.policy.model import PolicyModel, load_model
from exgrpo.train.policy.policy import Policy
from exgrpo.train.policy.scores import make_reference
from exgrpo.train.policy.source import find_model
from exgrpo.train.policy.surrogate import clipped
from exgrpo.train.replay import ExperienceConfig, MethodOptions, Replay, numbers_of, planned_from
from exgrpo.train.rollout.answers import RolloutWorker
from exgrpo.train.rollout.engine import Finished
from exgrpo.train.rollout.stops import text_of
from exgrpo.train.rollout.transformers.engine import TransformersEngine
from exgrpo.train.trainer import Trainer
from tests.train import tiny
from tests.train.batches import Row, make_batch, rows_of, trajectories
from tests.train.configs import configured
from tests.train.fakes import EOS, RecordingPolicy, ScriptedEngine, ScriptedGrader, question_set
from tests.train.replay.test_compose import COMPOSES, graded, replaying
from tests.train.replay.test_methods import same, untimed

K = 4
STEERED = {"prefix": "steered", "repeat": 0.5, "cooldown": 1, "band": (0.0, 1.0), "ratio": 0.0}
STEERED |= {"admit": "all", "prioritise": "random", "expire": (), "start_pass_rate": 0.0}


def odd(text):
    """1 where the last word is odd."""
    return float(int((text.split() or ["0"])[-1]) % 2)


def words(ids):
    return " ".join(map(str, ids))


class NoisyEngine(ScriptedEngine):
    """Answers of 2 to 6 random tokens and EOS, whatever comes before."""

    def generate(self, requests):
        for i, request in enumerate(requests):
            for sample in range(request.count):
                rng = np.random.default_rng([request.seed, sample])
                ids = np.array([*rng.integers(10, 90, rng.integers(2, 7)), EOS], np.int32)
                ids = ids[: request.sampling.max_tokens]
                log_prob = (-(ids % 7 + 1) / 10).astype(np.float32) if request.sampling.log_prob else None
                yield Finished(i, sample, Rollout(ids, ids[-1] == EOS, log_prob=log_prob))


def trainer(experience=STEERED, questions=12, **sections):
    values = {"questions": 6, "rollout": {"samples": K, "max_tokens": 12}, "data": {"max_prompt_tokens": 8}}
    config = configured(values, {"experience": experience, "optimizer": {"minibatches": 2}}, sections)
    worker = RolloutWorker(NoisyEngine({}), ScriptedGrader(odd), words, ALONE)
    return Trainer(config, question_set(questions), RecordingPolicy(), worker)


def given(groups, step, right):
    """The graded groups of a plan, of each of which as many answers are right as `right` says by question."""
    batch = graded({group.question: right[group.question] for group in groups}, step)
    batch.fill(given=np.repeat([group.given for group in groups], K))
    return batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.save_model(folder, tied=False)
    return folder


def updates(folder, objective):
    """Mini-batches of a run of a tiny model, each with the weights before it, and the plan of each step."""
    values = {"policy": {"path": str(folder), "dtype": "fp32", "compile": "none"}, "data": {"max_prompt_tokens": 8}}
    values |= {"rollout": {"max_tokens": 24, "samples": K}, "objective": {"entropy_coef": 0.05, **objective}}
    values |= {"optimizer": {"lr": 1e-3, "minibatches": 2}}
    config, source = configured(values, questions=4, experience=STEERED), find_model(str(folder))
    policy = Policy(config, source, ALONE)
    engine = TransformersEngine(tiny.engine_settings(folder, max_tokens=24), ALONE)
    worker = RolloutWorker(engine, ScriptedGrader(odd), words, ALONE)
    run = Trainer(config, question_set(6), policy, worker, make_reference(config, source, policy))
    take, plan, seen, prefixes = policy.update, run.replay.plan, [], {}

    def update(minibatch, **how):
        seen.append((minibatch, {name: weight.clone() for name, weight in policy.weights()}))
        return take(minibatch, **how)

    def planning(size, step):
        groups = plan(size, step)
        prefixes[step] = {group.question: group.prefix for group in groups}
        return groups

    policy.update, run.replay.plan = update, planning
    for step in range(1, 5):
        run.step(step)
    return config, seen, prefixes


def written_out(model, minibatch, prefixes, objective, start):
    """The objective on full answers by full logits in float64: only what comes after a prefix counts."""
    terms, entropy, divergence, tokens, rows = [], [], [], 0, rows_of(minibatch.batch)
    rewards = defaultdict(list)
    for row in rows:
        rewards[row.question].append(row.reward)
    for row in rows:
        advantage = row.reward - np.mean(rewards[row.question])
        prefix = prefixes[int(row.step)][int(row.question)]
        assert tuple(row.token[: len(prefix)]) == prefix
        ids, first = torch.tensor([*row.prompt, *row.token]).long(), len(row.prompt) + len(prefix)
        log_probs, before = (of(ids[None, :-1]).logits[0, first - 1 :].log_softmax(-1) for of in (model, start))
        log_prob, reference = (of.gather(1, ids[first:, None])[:, 0] for of in (log_probs, before.detach()))
        old = torch.from_numpy(row.ratio_log_prob[len(prefix) :]).double()
        ratio = (log_prob - torch.where(old.isinf(), log_prob.detach(), old)).exp()
        terms.append(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean())
        entropy.append(-(log_probs.exp() * log_probs).sum())
        gap = reference - log_prob
        divergence.append(((gap.exp() - 1 - gap) * ratio).sum())
        tokens += len(log_prob)
    of_kl = objective.kl_coef * sum(divergence) / tokens
    return -sum(terms) / len(rows) - objective.entropy_coef * sum(entropy) / tokens + of_kl


@pytest.mark.parametrize("kl_coef", [0.0, 0.5], ids=["fused", "composed"])
def test_a_prefix_has_no_gradient_and_the_rest_that_of_the_objective_written_out(folder, kl_coef):
    config, seen, prefixes = updates(folder, {"normalize": "sequence", "kl_coef": kl_coef})
    start = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    aided = [(one, weights) for one, weights in seen if (one.batch.given != 0).any()]
    assert len(aided) >= 4
    for (minibatch, weights), layout in [(one, layout) for one in aided for layout in (Padded(), Packed())]:
        model = PolicyModel(load_model(config, find_model(str(folder))))
        model.model.load_state_dict(weights)
        hidden, keep = [], model._hidden
        model._hidden = lambda batch, keep=keep, hidden=hidden: hidden.append(keep(batch)) or hidden[0]
        terms = LossTerms.from_minibatch(minibatch, config.method, clipped, ranks=1, clip=True, term="shaped")
        loss = model(layout.rows(minibatch.batch, torch.device("cpu")), terms).loss
        hidden[0].retain_grad()
        loss.backward()
        of_tokens = hidden[0].grad.flatten(0, -2)[layout.places(minibatch.batch)]
        length = [len(prefixes[int(row.step)][int(row.question)]) for row in rows_of(minibatch.batch)]
        at = np.arange(len(minibatch.batch.token)) - np.repeat(minibatch.batch.start[:-1], minibatch.batch.length)
        inside = at < np.repeat(length, minibatch.batch.length)
        assert inside.any()
        assert (of_tokens[inside] == 0).all()
        assert (of_tokens[~inside] != 0).any(1).all()
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        plain.load_state_dict(weights)
        expected = written_out(plain, minibatch, prefixes, config.objective, start)
        expected.backward()
        # fp32 against float64: sums of some hundred terms, of which the largest is near 1.
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
        for ours, theirs in zip(model.model.parameters(), plain.parameters(), strict=True):
            assert (ours.grad - theirs.grad).norm() <= 1e-4 * theirs.grad.norm() + 1e-7


@pytest.mark.parametrize("behaviour", ["trainer", "engine"])
def test_the_whole_answer_is_graded_and_only_the_rest_is_counted(behaviour):
    run = trainer(rollout={"behaviour": behaviour})
    total, aided = 0, 0
    for step in range(1, 6):
        plan, planned = run.replay.plan, []
        run.replay.plan = lambda *args, plan=plan, planned=planned: planned.extend(plan(*args)) or planned
        result = run.step(step)
        run.replay.plan = plan
        batch, own, without = result.batch, 0, []
        for group, one in enumerate(planned):
            begun = len(one.prefix)
            for row in batch.rows_of([group]).tolist():
                tokens = batch.token[batch.at(row)].tolist()
                assert tuple(tokens[:begun]) == one.prefix
                assert batch.response_mask[batch.at(row)].tolist() == [i >= begun for i in range(len(tokens))]
                assert batch.given[row] == one.given
                assert batch.text[row] == words(tokens[:-1] if batch.finished[row] else tokens)
                assert len(tokens) <= 12
                own += len(tokens) - begun
                if behaviour == "engine":
                    assert (batch.old_log_prob[batch.at(row)][:begun] == 0).all()
                without += [] if begun else [batch.reward[row]]
        total += own
        assert result.metrics["generated_tokens"] == run.rollout_worker.tokens == total
        assert result.metrics["response_tokens"] == pytest.approx(own / len(batch))
        assert result.metrics["reward"] == result.metrics["pass_rate"] == pytest.approx(np.mean(without))
        assert result.metrics.get("prefixed_groups", 0) == sum(bool(one.prefix) for one in planned)
        aided += sum(bool(one.prefix) for one in planned)
        for minibatch, _ in run.policy.updates:
            assert minibatch.tokens == minibatch.batch.num_tokens.sum()
    assert aided >= 5
    assert not np.isnan(run.replay.memory.table.stored().old_log_prob).any()


def test_a_prefix_is_of_a_success_or_a_failure_by_the_sign_of_its_share_and_leaves_a_token():
    replay = replaying("mixed", 8, dict.fromkeys(range(8), 2), **{**STEERED, "repeat": 1.0})
    replay.memory.given[:] = [1, 0.5, 0.01, 0, -0.01, -0.5, -1, 0.5]
    replay.memory.table.remove(
        [row for row in replay.memory.table.rows_of_question(7) if replay.memory.table.value("reward", row)]
    )
    groups = sorted(replay.plan(8, 2), key=lambda group: group.question)
    # Answers have three tokens: (step, number, question), and the first two of four are right.
    assert [len(group.prefix) for group in groups] == [2, 1, 1, 0, 1, 1, 2, 0]
    assert groups[0].prefix[1] in (0, 1)
    assert groups[6].prefix[1] in (2, 3)
    assert [group.given for group in groups] == [1, 0.5, 0.01, 0, -0.01, -0.5, -1, 0]
    assert planned_from(json.loads(json.dumps(numbers_of(groups, replay.memory.table.rows())))) == groups


def test_lengths_of_random_shares_are_uniform_and_of_successes_alone():
    options = ExperienceConfig(**{**STEERED, "prefix": "success", "repeat": 1.0})
    replay = Replay(MethodOptions(options, 2), 1, 0)
    replay.store(make_batch([(0, [Row(1.0, range(10, 21), step=1), Row(0.0, range(30, 41), step=1)])]), 1)
    sizes = []
    for _ in range(2000):
        (group,) = replay.plan(1, 2)
        assert group.prefix == tuple(range(10, 10 + len(group.prefix)))
        sizes.append(len(group.prefix))
    assert set(sizes) == set(range(1, 11))
    # A count of 200 has a deviation of 13.4: by chance one of ten is off by 4.5 of them once in 15,000 runs.
    assert np.abs(np.bincount(sizes)[1:] - 200).max() < 60


def test_groups_with_a_prefix_are_in_no_pass_rate_bucket_or_buffer_and_retire_or_open_nothing():
    options = {**STEERED, "expire": ("retirement",), "ratio": 0.5}
    plain, aided = (replaying("mixed", 8, {q: 1 + q % 2 for q in range(6)}, **options) for _ in range(2))
    fresh, right = graded({6: 1}, 3), {0: K, 1: 0, 2: K}
    report = plain.store(fresh, 3)
    groups = graded(right, 3)
    groups.fill(given=np.repeat([0.5, 0.5, -0.5], K))
    assert not aided.admitted(groups).any()
    mixed = groups.append_groups(graded({6: 1}, 3))
    other = aided.store(mixed, 3)
    assert report.pass_rate == other.pass_rate == 1 / K
    before, after = plain.memory.arrays(), aided.memory.arrays()
    for name in set(before) - {"asked", "times", "given"}:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    assert not aided.memory.retired.any()
    np.testing.assert_array_equal(aided.memory.asked[:3], 3)
    np.testing.assert_array_equal(aided.memory.times[:3], plain.memory.times[:3] + 1)
    np.testing.assert_array_equal(aided.memory.given[:3], [0.25, 0.75, -0.75])
    assert aided.watch.state() == plain.watch.state()
    only = graded({3: 2}, 4)
    only.fill(given=np.full(K, 0.1))
    assert math.isnan(aided.store(only, 4).pass_rate)
    assert aided.in_band(only, "hard").all()
    begun = replaying("mixed", 8, **{**STEERED, "start_pass_rate": 0.5})
    begun.store(mixed, 3)
    assert not begun.open


@pytest.mark.parametrize("compose", COMPOSES)
def test_those_with_a_gradient_are_trained_on_with_each_composition(compose):
    ratio = 1.0 if compose == "appended" else 0.5  # stored answers would join all groups
    replay = replaying(compose, 40, dict.fromkeys(range(8), 2), **{**STEERED, "ratio": ratio, "advantage": "stored"})
    replay.memory.given[:] = 0.5
    groups = replay.plan(8, 2)
    aided = [group for group in groups if group.prefix]
    assert len(aided) >= 2
    assert all(group.choose == 0 and group.fresh == K for group in aided)
    batch = given(groups, 2, {group.question: 2 for group in groups} | {aided[0].question: K})
    replay.store(batch, 2)
    trained = replay.settle(batch, 8, 2).trained.tolist()
    numbers = [number for number, group in enumerate(groups) if group.prefix and group != aided[0]]
    assert set(numbers) <= set(trained)
    assert len(set(trained)) == len(trained)
    only = given(aided, 3, dict.fromkeys((group.question for group in aided), 2))
    assert set(range(len(aided))) <= set(replay.settle(only, len(aided), 3).trained.tolist())


def test_a_hard_prompt_that_has_not_improved_is_none_of_the_first_groups_where_some_of_those_have_a_prefix():
    options = {**STEERED, "hard": 0.25, "ratio": 0.5, "repeat": 0.25}
    replay = replaying("bapo", 40, dict.fromkeys(range(8), 1), **options)
    groups = replay.plan(4, 2)
    assert [bool(group.prefix) for group in groups] == [False, False, False, True, False, False]
    batch = given(groups, 2, {group.question: 1 for group in groups})
    replay.store(batch, 2)
    assert replay.settle(batch, 4, 2).trained.tolist()[:3] == [0, 1, 2]
    assert not {4, 5} & set(replay.settle(batch, 4, 2).trained.tolist())


@pytest.mark.parametrize("slope", [4.0, 8.0])
def test_shares_are_steered_to_where_half_of_the_answers_are_right(slope):
    """Simulated questions: a log-odds of each, to which a share of a success adds, and one of a failure takes away."""
    odds, steps = np.array([-1.5, -0.5, 0.0, 0.5, 1.5]), 150
    replay = replaying("mixed", 5, dict.fromkeys(range(5), 2), **{**STEERED, "repeat": 1.0})
    rng, rates = np.random.default_rng(0), []
    for step in range(2, steps + 2):
        groups = sorted(replay.plan(5, step), key=lambda group: group.question)
        shares = np.array([group.given for group in groups])
        right = rng.binomial(K, 1 / (1 + np.exp(-odds - slope * shares)))
        replay.store(given(groups, step, dict(enumerate(right.tolist()))), step)
        rates.append(right / K)
    # A share changes by half of what a rate is off, in all by at most 1: the means can be off by 1 / (150 / 2).
    # Without a prefix, 0.18 to 0.82 of the answers to these questions would be right.
    np.testing.assert_allclose(np.mean(rates, 0), 0.5, atol=2 / steps + 1e-9)
    # A rate of four answers deviates by 0.25 and moves a share by half of that; then half of it or more goes back.
    # So shares deviate by 0.125 / sqrt(1 - 0.25) = 0.144.
    np.testing.assert_allclose(replay.memory.given, -odds / slope, atol=4 * 0.144)


@pytest.mark.parametrize("prefix", ["success", "steered"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_restored_trainer_goes_on_to_the_bit(prefix, ahead):
    rollout = {"behaviour": "engine", "ahead": True, "servers": ["http://unused:8000"]} if ahead else {}
    run, other = (trainer({**STEERED, "prefix": prefix}, rollout=rollout, steps=8) for _ in range(2))
    for step in (1, 2, 3, 4):
        run.step(step)
    state = run.state()
    other.restore(dataclasses.replace(copy.deepcopy(state), values=json.loads(json.dumps(state.values))))
    other.policy.version = run.policy.version
    aided = 0
    for step in (5, 6, 7, 8):
        expected, again = run.step(step), other.step(step)
        if not ahead:  # what was generated ahead is generated again, with the numbers of the later step
            assert same(untimed(expected), untimed(again))
        for name in (*columns_of("row", "token"), "question", "group", "trained"):
            ours, theirs = (getattr(one.batch, name, None) for one in (expected, again))
            np.testing.assert_array_equal(ours, theirs)
        aided += expected.metrics.get("prefixed_groups", 0)
    assert aided >= 6


def test_experience_of_before_has_no_shares():
    old, new = (replaying("mixed", 4, {0: 1}, **STEERED) for _ in range(2))
    state = old.state()
    del state.arrays["given"]
    new.restore(state)
    assert not new.memory.given.any()
    assert trajectories(new.memory, 0)


def test_a_stop_string_that_begins_in_the_prefix_is_no_part_of_the_text():
    spell = {3: "4</", 4: "ans", 5: "wer>", 6: "x"}
    answer = Rollout(np.array([6, 3, 4, 5]), finished=True, response_mask=np.array([False, False, True, True]))
    assert text_of(answer, lambda ids: "".join(spell[int(i)] for i in ids), ("</answer>",)) == "x4"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"experience": {"prefix": "steered"}}, "experience.prefix=steered begins answers .*set experience.repeat"),
        ({"environment.function": "mine.py:play"}, "experience.prefix excludes environment.function"),
        ({"rollout": {"partial": True, "behaviour": "engine"}}, "experience.prefix excludes .*rollout.partial"),
    ],
)
def test_what_a_prefix_does_not_go_with_is_named(values, message):
    whole = values if "experience" in values else {"experience": STEERED, **values}
    with pytest.raises(ConfigError, match=message):
        configured(whole)
