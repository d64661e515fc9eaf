"""Partial rollouts against a model of the queue and the policies that wrote."""

import dataclasses
import json
from collections import defaultdict
from itertools import count, pairwise

import numpy as np
import pytest
import torch

from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import ConfigError, RolloutError
from exgrpo.train.common.records import AllowedTokens, Rollout
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.config.rollout import RolloutConfig
from exgrpo.train.replay import PlannedGroup
from exgrpo.train.rollout.answers import RolloutWorker
from exgrpo.train.rollout.engine import Finished, Sampling
from exgrpo.train.rollout.partial import PartialRollouts
from exgrpo.train.rollout.transformers.engine import TransformersEngine
from exgrpo.train.trainer import Trainer
from tests.train import tiny
from tests.train.batches import sets
from tests.train.common.test_distributed import on_every_rank
from tests.train.configs import configured
from tests.train.fakes import (
    EOS,
    RecordingPolicy,
    ScriptedEngine,
    ScriptedGrader,
    fake_score,
    question_set,
)
from tests.train.replay.test_methods import untimed
from tests.train.run.test_weight_check import FullLogitPolicy

LONGEST = 40


class Lengths:
    """Log-normal lengths of the answers to each question, one after the other as answers begin."""

    def __init__(self):
        self._rng = defaultdict(lambda: None)

    def next(self, question):
        self._rng[question] = self._rng[question] or np.random.default_rng(question)
        return 2 + int(self._rng[question].lognormal(2, 1))


class LockstepEngine(ScriptedEngine):
    """Writes a token of each answer at a time: first its length + 100, then noise and EOS; scores as `fake_score`."""

    def __init__(self):
        super().__init__({})
        self.lengths, self.version, self.times = Lengths(), 0, []

    def generate(self, requests, enough=None):
        self.log.append("generate")
        open_ = []
        for i, request in enumerate(requests):
            rng = np.random.default_rng(request.seed)
            for sample in range(request.count):
                question, _, *before = request.prompt.tolist()
                length = before[0] - 100 if before else self.lengths.next(question)
                noise = rng.integers(10, 90, length)
                tokens = [*(before or [length + 100]), *noise]
                tokens[length - 1 :] = [EOS]
                open_.append((i, sample, tokens[len(before) :][: request.sampling.max_tokens], request))
        time = 0
        while open_ and not (enough and enough()):
            time += 1
            done = [one for one in open_ if len(one[2]) == time]
            open_ = [one for one in open_ if len(one[2]) > time]
            yield from (self._finished(*one, time) for one in reversed(done))
        self.times.append(time)
        if time:
            yield from (self._finished(*one, time) for one in open_)

    def _finished(self, i, sample, tokens, request, time):
        response = np.array(tokens[:time], np.int32)
        score = fake_score(response, self.version)
        allowed = AllowedTokens.from_lists(sets(response)) if request.sampling.allowed_tokens else None
        finished = bool(response[-1] == EOS)
        return Finished(i, sample, Rollout(response, finished, score.log_prob, score.entropy, allowed_tokens=allowed))

    def push_weights(self, weights):
        super().push_weights(weights)
        self.version += 1


def model_of_the_queue(samples, needed, under_way, oldest, steps, ranks):
    """Return for each step the groups that are trained on: question, and the step of each token of each answer."""
    lengths, queue, found, asked = [Lengths() for _ in range(ranks)], [], [], 0
    for step in range(1, steps + 1):
        for _ in range(under_way - len(queue)):
            queue.append((asked, [(0, []) for _ in range(samples)]))
            asked += 1
        queue = [(q, [(0, []) if a[1] and a[1][0] < step - oldest else a for a in group]) for q, group in queue]
        left = lambda answer: min(answer[0], LONGEST) - len(answer[1])  # noqa: E731
        waited = [all(length and not left((length, steps)) for length, steps in group) for _, group in queue]
        end = [0] * len(queue)
        for rank in range(ranks):
            mine = range(rank, len(queue), ranks)
            for number in mine:
                question, group = queue[number]
                group = [(length or lengths[rank].next(question), steps) for length, steps in group]
                queue[number] = question, group
                end[number] = max(map(left, group))
            time = sorted(end[number] for number in mine)[len(range(rank, needed, ranks)) - 1]
            for number in mine:
                question, group = queue[number]
                group = [(n, [*steps, *[step] * min(time, left((n, steps)))]) for n, steps in group]
                queue[number] = question, group
        whole = [n for n, (_, group) in enumerate(queue) if not any(map(left, group))]
        chosen = sorted(whole, key=lambda n: not waited[n])[:needed]
        found.append([(queue[n][0], [steps for _, steps in queue[n][1]]) for n in chosen])
        queue = [one for n, one in enumerate(queue) if n not in chosen]
    return found


@pytest.mark.parametrize(("ranks", "oldest"), [(1, 2), (1, 1), (2, 2)])
def test_tokens_order_and_staleness_are_those_of_a_model_of_the_queue(ranks, oldest):
    samples, needed, steps, questions = 4, 5, 30, question_set(400).questions

    def run(world):
        engine = LockstepEngine()
        worker = RolloutWorker(engine, ScriptedGrader(), str, world)
        options = RolloutConfig(behaviour="engine", partial=True, oversample=1.6, max_staleness=oldest)
        partial = PartialRollouts(options, worker, questions.__getitem__, Sampling(LONGEST, log_prob=True))
        ask, found, answers = count(), [], []

        def more(wanted, without=()):
            return [PlannedGroup(next(ask), samples) for _ in range(wanted)]

        for step in range(1, steps + 1):
            engine.version = step
            whole = partial.advance(more(needed), more, step, step)
            found.append([(one.group.question, [of.tolist() for of in one.steps]) for one in whole])
            answers += [pair for one in whole for pair in zip(one.answers, one.steps, strict=True)]
        return found, answers

    results = on_every_rank(run, ranks)
    expected = model_of_the_queue(samples, needed, 8, oldest, steps, ranks)
    assert all(found == expected for found, _ in results)
    ages = [step - steps[0] for step, of in enumerate(expected, 1) for _, group in of for steps in group]
    assert max(ages) == oldest
    assert any(question > later for of in expected for (question, _), (later, _) in pairwise(of))
    for answer, steps_of in results[0][1]:
        length = min(int(answer.response[0]) - 100, LONGEST)
        assert len(answer.response) == len(answer.log_prob) == len(answer.entropy) == length
        assert answer.finished == (answer.response[-1] == EOS)
        for step in np.unique(steps_of):
            at = steps_of == step
            np.testing.assert_array_equal(answer.log_prob[at], fake_score(answer.response[at], int(step)).log_prob)


def test_an_answer_that_is_too_old_begins_anew_with_other_numbers():
    engine = LockstepEngine()
    engine.lengths.next = lambda question: 30 if question == 0 else 3
    worker = RolloutWorker(engine, ScriptedGrader(), str, ALONE)
    options = RolloutConfig(behaviour="engine", partial=True, oversample=2, max_staleness=1)
    partial = PartialRollouts(options, worker, question_set(9).questions.__getitem__, Sampling(LONGEST, log_prob=True))

    def advance(step, *questions):
        partial.advance(
            [PlannedGroup(questions[0], 1)], lambda *_: [PlannedGroup(q, 1) for q in questions[1:]], step, 5
        )
        (long,) = (one for one in partial.underway if one.group.question == 0)
        return long.answers[0].response.tolist(), long.steps[0].tolist()

    first, _ = advance(1, 0, 1)
    second, steps = advance(2, 2)
    assert steps == [1, 1, 1, 2, 2, 2]
    assert second[:3] == first
    anew, steps = advance(3, 3)
    assert steps == [3, 3, 3]
    assert anew[0] == first[0]  # the same length
    assert anew[1:] != first[1:]


def test_the_error_of_one_engine_is_raised_on_all_ranks():
    def run(world):
        engine = LockstepEngine()
        if world.rank:
            engine.generate = lambda requests, enough: (_ for _ in ()).throw(RolloutError("no server is left"))
        worker = RolloutWorker(engine, ScriptedGrader(), str, world)
        options = RolloutConfig(behaviour="engine", partial=True, oversample=1)
        partial = PartialRollouts(options, worker, question_set(4).questions.__getitem__, Sampling(8, log_prob=True))
        with pytest.raises(RolloutError, match="no server is left"):
            partial.advance([PlannedGroup(question, 2) for question in range(4)], None, 1, 1)
        return list(engine.log)

    assert [log[-1] for log in on_every_rank(run, 2)] == ["sleep", "sleep"]


def test_log_probs_are_those_of_the_policy_that_wrote_each_segment(folder):
    engine = TransformersEngine(tiny.engine_settings(folder, eos=(2, 5), batch_tokens=5000), ALONE)
    worker = RolloutWorker(engine, ScriptedGrader(), str, ALONE)
    options = RolloutConfig(behaviour="engine", partial=True, oversample=6, temperature=0.7)
    sampling = Sampling(100, temperature=0.7, log_prob=True)
    questions = [
        dataclasses.replace(one, prompt=tuple(tiny.prompt(i).tolist()))
        for i, one in enumerate(question_set(20).questions)
    ]
    partial = PartialRollouts(options, worker, questions.__getitem__, sampling)
    plans = [[PlannedGroup(question, 2) for question in of_step] for of_step in ((0,), (1,), (2, 3, 4, 5))]
    policies, groups = [FullLogitPolicy(folder) for _ in range(3)], []
    for step, (policy, planned) in enumerate(zip(policies, plans, strict=True)):
        generator = torch.Generator().manual_seed(step)
        for _, weight in policy.weights():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.05 * step)
        engine.push_weights(policy.weights())
        groups += partial.advance(
            planned, lambda wanted, _: [PlannedGroup(6 + i, 2) for i in range(min(wanted, 10))], step, step
        )
    assert len(groups) == 6
    prompts = [questions[one.group.question].prompt_ids for one in groups]
    written = np.concatenate([steps for group in groups for steps in group.steps])
    pairs = [(prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group.answers]
    batch = StepBatch.from_answers(*zip(*pairs, strict=True))
    gaps = np.array([np.abs(policy.score(batch, 0.7).log_prob - batch.engine_log_prob) for policy in policies])
    for step in range(3):
        assert (written == step).sum() > 10
        assert gaps[step, written == step].max() < 1e-4
    # The newest policy alone would have other ones.
    assert gaps[2, written == 0].mean() > 1e-2
    mixed = [len(np.unique(steps)) > 1 for group in groups for steps in group.steps]
    assert any(mixed)


OPTIONS = {"questions": 6, "steps": 8, "data": {"max_prompt_tokens": 8}, "optimizer": {"minibatches": 2}}
OPTIONS |= {"experience": {"start_pass_rate": 0.0, "ratio": 0.5}}


def trainer(allowed=False, **rollout):
    cut = {"top_k": 8} if allowed else {}
    options = {"samples": 4, "max_tokens": LONGEST, "behaviour": "engine", **cut, **rollout}
    config = configured(OPTIONS, {"rollout": options})
    grader = ScriptedGrader(lambda text: float(int(text.split()[-1]) % 2))
    worker = RolloutWorker(LockstepEngine(), grader, lambda ids: " ".join(map(str, ids)), ALONE)
    return Trainer(config, question_set(60), RecordingPolicy(), worker)


def same(one, other):
    np.testing.assert_equal(untimed(one), untimed(other))
    for name in ("question", "token", "old_log_prob", "reward", "staleness", "text", "replayed", "log_prob"):
        np.testing.assert_array_equal(one.batch.column(name), other.batch.column(name))


def test_a_step_that_needs_all_groups_is_an_ordinary_step():
    plain, partial = trainer(), trainer(partial=True, oversample=1)
    for step in range(1, 6):
        one, other = plain.step(step), partial.step(step)
        for name in ("earlier_tokens", "continued_answers", "groups_underway"):
            assert other.metrics.pop(name) == 0
        assert len(one.batch.token) == len(other.batch.token)
        same(one, other)


@pytest.mark.parametrize(("allowed", "same_arithmetic"), [(False, True), (True, True), (False, False)])
def test_each_token_keeps_the_log_prob_of_its_writer_and_is_scored_by_the_present_policy(allowed, same_arithmetic):
    this, versions, stale = trainer(allowed, partial=True), {}, 0
    this.scorer.same_arithmetic = same_arithmetic
    for step in range(1, 9):
        versions[step] = this.rollout_worker.engine.version = this.policy.version
        result = this.step(step)
        batch = result.batch
        fresh = batch.take(batch.fresh)
        assert len(np.unique(fresh.group)) == 6
        for row in range(len(fresh)):
            at = fresh.at(row)
            ages = fresh.staleness[at]
            assert (np.diff(ages) <= 0).all()
            for age in np.unique(ages):
                token = fresh.token[at][ages == age]
                expected = fake_score(token, versions[step - age]).log_prob
                np.testing.assert_array_equal(fresh.old_log_prob[at][ages == age], expected)
            known = ~np.isnan(fresh.log_prob[at])
            expected = fake_score(fresh.token[at], versions[step]).log_prob
            np.testing.assert_array_equal(fresh.log_prob[at][known], expected[known])
            assert known.all() or not known.any()
            assert ages.sum() == 0 or (fresh.old_log_prob[at] != expected).any()
        if allowed:
            whole = [fresh.allowed_tokens[fresh.at(row)].lists() for row in range(len(fresh))]
            assert all(
                [of.tolist() for of in got] == [list(of) for of in sets(fresh.token[fresh.at(row)])]
                for row, got in enumerate(whole)
            )
        ages = fresh.staleness
        assert result.metrics["staleness"] == pytest.approx(ages.mean())
        assert result.metrics["earlier_tokens"] == pytest.approx((ages > 0).mean())
        old = np.array([ages[fresh.at(row)].any() for row in range(len(fresh))])
        assert result.metrics["continued_answers"] == old.sum()
        assert result.metrics["groups_underway"] == 3
        assert result.metrics["mismatch/max"] == 0
        stale += old.sum()
    assert stale > 20
    assert batch.replayed.any()


@pytest.mark.parametrize("allowed", [False, True])
def test_a_trainer_that_goes_on_from_the_middle_takes_the_same_steps(allowed):
    whole, first, second = (trainer(allowed, partial=True) for _ in range(3))
    expected = [whole.step(step) for step in range(1, 9)]
    for step in range(1, 5):
        same(first.step(step), expected[step - 1])
    state = first.state()
    assert any(name.startswith("underway.") for name in state.arrays)
    second.restore(dataclasses.replace(state, values=json.loads(json.dumps(state.values))))
    second.policy.version = first.policy.version
    engine, before = second.rollout_worker.engine, first.rollout_worker.engine
    engine.version, engine.lengths = before.version, before.lengths  # lengths are the engine's, not the checkpoint's
    for step in range(5, 9):
        same(second.step(step), expected[step - 1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rollout": {"behaviour": "trainer"}}, "rollout.partial needs rollout.behaviour=engine"),
        ({"rollout": {"refills": 2}}, "rollout.partial excludes rollout.ahead, rollout.refills and rollout.servers"),
        ({"rollout": {"servers": ["http://unused:8000"]}}, "rollout.partial excludes"),
        ({"environment": {"function": "calculator"}}, "rollout.partial and environment.function exclude each other"),
    ],
)
def test_what_it_cannot_be_combined_with_is_named(values, message):
    with pytest.raises(ConfigError, match=message):
        configured({"rollout": {"behaviour": "engine", "partial": True}}, values)
