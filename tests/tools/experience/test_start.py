"""A new run begins with traces: which become trajectories, with which tokens, log-probs and counts."""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from exgrpo.tools.experience.export import export
from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import ConfigError, DataError
from exgrpo.train.common.records import AllowedTokens
from exgrpo.train.common.step_batch import LOG_PROB_SOURCES, TRAINER
from exgrpo.train.policy.policy import Policy
from exgrpo.train.rollout.answers import RolloutWorker
from exgrpo.train.run.start_experience import Beginning, Encoding, start_experience
from exgrpo.train.run.traces import read_traces
from exgrpo.train.trainer import Trainer
from tests.tools.experience import runs
from tests.tools.experience.runs import K, config, make_run, pretrained, some, with_reply
from tests.train.batches import Row, same, stored_rows
from tests.train.fakes import EOS, RecordingPolicy, ScriptedEngine, ScriptedGrader, fake_score, question_set
from tests.train.files import write_rows
from tests.train.run.test_weight_check import among
from tests.train.trainers import half


class Printed:
    """A tokenizer of texts that are the token ids themselves."""

    eos_token_id = EOS

    def __call__(self, texts, add_special_tokens):
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}

    def decode(self, tokens, skip_special_tokens=False):
        return ("reads " if skip_special_tokens else "") + " ".join(map(str, tokens))


PRINTED = Encoding(Printed(), eos=(3, EOS), vocabulary=200)


def encoding_of(model) -> Encoding:
    return Encoding(model.tokenizer, model.eos, model.model.config.get_text_config().vocab_size)


def right(text: str) -> float:
    """1 where the second word is 7, which is what the scripted engine's successes have there."""
    return float(text.split()[1:2] == ["7"])


def trainer_of(of_run, questions, encoding) -> Trainer:
    rollout_worker = RolloutWorker(
        ScriptedEngine(half(len(questions))), ScriptedGrader(right), encoding.tokenizer.decode, ALONE
    )
    return Trainer(of_run, questions, RecordingPolicy(), rollout_worker)


def begin(source, count: int = 8, **values):
    """A trainer of scripted questions with what a file or folder holds, and what was said of it."""
    of_run = config({"experience.start": str(source), "rollout.max_tokens": 8}, values)
    trainer = trainer_of(of_run, question_set(count), PRINTED)
    return trainer, start_experience(Beginning.from_trainer(trainer), PRINTED)


def write(path, *rows):
    return write_rows(path, rows)


def trace(question: int, response: str, **more):
    return {"question": f"question {question}", "answer": "gold", "response": response, **more}


def written_by(trainer) -> list[str]:
    """Who computed the log-probs of each stored answer."""
    return [LOG_PROB_SOURCES[one.old_log_probs_from] for one in stored(trainer)]


def stored(trainer) -> list[Row]:
    return stored_rows(trainer.replay.memory.table.stored())


def arithmetic(tmp_path, source, **values) -> Trainer:
    """A trainer of the default task, with the trajectories of a source; its policy is no real one."""
    encoding = encoding_of(pretrained())
    trainer = trainer_of(config({"experience.start": str(source)}, values), runs.questions(), encoding)
    start_experience(Beginning.from_trainer(trainer), encoding)
    return trainer


@pytest.fixture
def exported(tmp_path):
    export(make_run(tmp_path / "run", some()), tmp_path / "set")
    return tmp_path / "set"


def test_answers_with_replies_come_back_as_they_were_and_in_no_other_tokens(tmp_path):
    """The text of such an answer does not say who wrote what, so another model cannot learn from it."""
    export(make_run(tmp_path / "run", [*some(), with_reply()]), tmp_path / "set")
    assert same(stored(arithmetic(tmp_path, tmp_path / "set"))[-1], with_reply(), besides=["step"])
    (file,) = (tmp_path / "set" / "data").iterdir()
    rows = pq.read_table(file).to_pylist()
    assert [row["response_mask"] is None for row in rows] == [*[True] * 7, False]
    others = [{**row, "response_ids": [*row["response_ids"][:-1], 999_999], "allowed_tokens": None} for row in rows]
    write(tmp_path / "other.jsonl", *others)
    trainer = arithmetic(tmp_path, tmp_path / "other.jsonl")
    assert len(stored(trainer)) == 7
    assert all(one.response_mask is True for one in stored(trainer))


def test_what_the_prompt_ends_with_does_not_come_twice(tmp_path):
    """Expert answers begin with "<think>", which data.answer_prefix has put at the end of the prompt."""
    rows = read_traces(Path(write(tmp_path / "expert.jsonl", trace(0, "5 6 7"), trace(0, "7 5 6"))))
    found = dataclasses.replace(PRINTED, prefix="5 6 ").tokens(list(rows))
    assert [tokens.tolist() for tokens, _ in found] == [[7, EOS], [7, 5, 6, EOS]]


@pytest.mark.parametrize("rule", ["recompute", "keep"])
def test_an_export_of_the_same_model_comes_back_as_it_was(tmp_path, exported, rule):
    trainer = arithmetic(tmp_path, exported, **{"experience.start_log_prob": rule})
    assert not trainer.policy.scored
    for one, origin in zip(stored(trainer), some(), strict=True):
        assert same(one, origin, besides=["step"])
        assert one.step == 0
    table = trainer.replay.memory.table
    origins = zip(
        *(table.column(name).tolist() for name in ("advantage", "successes", "answers", "replays")), strict=True
    )
    assert list(origins) == [(0.25 + i, 1 + i % 2, 3, 0) for i in range(7)]
    # The latest known group of each question: rows 6, 3 and 5.
    assert trainer.replay.memory.count.tolist() == pytest.approx([K / 3, K * 2 / 3, K * 2 / 3, 0, 0, 0])


def test_log_probs_of_another_model_are_those_of_the_policy_unless_they_are_kept(tmp_path):
    own_path = "builtin:arithmetic"
    rows = []
    written = [(own_path, "engine"), ("other", "engine"), (None, "trainer"), (own_path, "unknown")]
    for number, (model, writer) in enumerate(written):
        row = trace(0, f"5 {number} 9", reward=1, model=model, old_log_probs_from=writer)
        rows.append({**row, "prompt_ids": [0, 2], "response_ids": [5, number, 9, EOS], "log_prob": [-1, -2, -3, -4.0]})
    path = write(tmp_path / "traces.jsonl", *rows)
    temperature = {"rollout.temperature": 0.5}
    own = [fake_score(np.array(row["response_ids"], np.int32), 0, 0.5).log_prob for row in rows]
    given = np.array([-1, -2, -3, -4], np.float32)

    trainer, started = begin(path, **temperature)
    assert written_by(trainer) == ["engine", "trainer", "trainer", "trainer"]
    np.testing.assert_array_equal([one.log_prob for one in stored(trainer)], [given, *own[1:]])
    assert "3 with log-probs of this run's policy" in str(started)
    trainer, _ = begin(path, **temperature, **{"experience.start_log_prob": "keep"})
    assert written_by(trainer) == ["engine", "engine", "trainer", "trainer"]
    np.testing.assert_array_equal([one.log_prob for one in stored(trainer)], [given, given, given, own[3]])
    trainer, started = begin(path, **temperature, **{"experience.start_log_prob": "unknown"})
    assert set(written_by(trainer)) == {"unknown"}
    assert not np.any([one.log_prob for one in stored(trainer)])
    assert str(started).endswith("; 4 without log-probs: their writer counts as certain")


@pytest.mark.parametrize("cuts", [True, False])
def test_recomputed_log_probs_are_those_of_the_model(tmp_path, exported, one_thread, cuts):
    """RLEP: another run's successes, with old log-probs of this run's policy, among the allowed tokens."""
    encoding = encoding_of(pretrained())
    rows = pq.read_table(exported / "data").to_pylist()
    source = write_rows(tmp_path / "other.parquet", [{**row, "model": "another"} for row in rows])
    of_run = config({"experience.start": str(source), "rollout.temperature": 0.7})
    rollout_worker = RolloutWorker(ScriptedEngine({}), ScriptedGrader(), encoding.tokenizer.decode, ALONE)
    trainer = Trainer(of_run, runs.questions(), Policy(of_run, pretrained().model, ALONE), rollout_worker)
    run = dataclasses.replace(Beginning.from_trainer(trainer), cuts=cuts)
    assert f"; {len(some())} with log-probs" in str(start_experience(run, encoding))
    assert sum(one.allowed_tokens is not None for one in stored(trainer)) == (1 if cuts else 0)
    model = AutoModelForCausalLM.from_pretrained(pretrained().model.path, dtype=torch.float32)
    for one in stored(trainer):
        prompt = runs.questions()[one.question].prompt
        tokens = torch.tensor([[*prompt, *one.response.tolist()]])
        with torch.no_grad():
            logits = model(tokens).logits[0, len(prompt) - 1 : -1].double() / 0.7
        logits = logits if one.allowed_tokens is None else among(logits, AllowedTokens.from_lists(one.allowed_tokens))
        expected = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(one.log_prob, expected, atol=2e-4)
        assert one.old_log_probs_from == TRAINER


def test_texts_are_encoded_and_end_with_one_eos(tmp_path):
    path = write(
        tmp_path / "traces.jsonl",
        trace(0, "5 7"),
        trace(1, f"5 7 {EOS}"),
        trace(2, "5 7 3 8 9"),
        trace(3, "5 7", finished=False),
        # Tokens of another model: of another prompt, of another text, beyond the vocabulary, and those that are right.
        trace(4, "5 7", prompt_ids=[4, 9], response_ids=[5, 7, EOS], log_prob=[-1, -1, -1]),
        trace(5, "5 7", prompt_ids=[5, 2], response_ids=[5, 8, EOS], log_prob=[-1, -1, -1]),
        trace(6, "5 999", prompt_ids=[6, 2], response_ids=[5, 999, EOS]),
        trace(7, "5 7", prompt_ids=[7, 2], response_ids=[5, 7, 3]),
    )
    trainer, started = begin(path, **{"experience.start_log_prob": "keep"})
    found = [(one.question, one.response.tolist(), one.finished) for one in stored(trainer)]
    assert found == [
        *((0, [5, 7, EOS], True), (1, [5, 7, EOS], True), (2, [5, 7, 3], True), (3, [5, 7], False)),
        *((4, [5, 7, EOS], True), (5, [5, 7, EOS], True), (6, [5, 999, EOS], True), (7, [5, 7, 3], True)),
    ]
    assert "7 encoded from text" in str(started)
    for one in stored(trainer):
        np.testing.assert_array_equal(one.log_prob, fake_score(one.response, 0).log_prob)


def test_missing_rewards_and_keys_are_the_graders(tmp_path):
    path = write(
        tmp_path / "traces.jsonl",
        *(trace(question, text) for question, text in ((0, "5 7 9"), (0, "5 8 9"), (0, "5 8 8"), (1, "5 7 9"))),
        trace(2, "5 8", reward=0.75, key=4),
    )
    trainer, started = begin(path)
    assert [one.reward for one in stored(trainer)] == [1, 0, 0, 1, 0.75]
    assert all(one.key for one in stored(trainer))
    assert stored(trainer)[-1].key == 4
    assert "4 graded" in str(started)
    # K times the share of successes among what is stored, inside [1, K-1].
    assert trainer.replay.memory.count.tolist() == pytest.approx([K / 3, K - 1, 1, *[0] * 5])


OF_RATE = {
    "mean": ({}, lambda r: r - r.mean()),
    "scaled": ({"objective.scale_by_std": True, "reward.success": 2.0}, lambda r: (r - r.mean()) / r.std(ddof=1)),
    "regression": (
        {"objective.baseline": "log_mean_exp", "objective.beta1": 0.5},
        lambda r: r - 0.5 * np.log(np.exp(r / 0.5).mean()),
    ),
}


@pytest.mark.parametrize("name", OF_RATE)
def test_an_advantage_that_is_not_known_is_that_of_a_group_of_the_same_pass_rate(tmp_path, name):
    given, expected = OF_RATE[name]
    rewards = given.get("reward.success", 1.0) * np.array([1, 1, 1, 0])
    rows = (trace(0, f"{i} 7", reward=reward) for i, reward in enumerate(rewards, 5))
    trainer, _ = begin(write(tmp_path / "traces.jsonl", *rows), **given)
    assert trainer.replay.memory.table.column("advantage").tolist() == pytest.approx(expected(rewards))


def test_questions_are_found_by_text_and_gold_and_else_by_their_prompt_or_what_it_reads(tmp_path):
    path = write(
        tmp_path / "traces.jsonl",
        trace(0, "5"),
        {"problem": "question 1", "response": "5"},
        {"prompt_ids": [2, 2], "response": "5"},
        {"question": "worded otherwise", "prompt_ids": [3, 2], "response": "5"},
        {"question": "worded otherwise", "answer": "gold", "prompt_ids": [4, 2], "response": "5"},
        {"question": "question 5", "answer": "other", "prompt_ids": [5, 2], "response": "5"},
        {"question": "unheard of", "response": "5"},
        {"prompt_ids": [6, 3], "response": "5"},
        {"question": "reads 6 2", "answer": "gold", "response": "5"},
        {"question": "reads 6 2", "answer": "other", "response": "5"},
    )
    trainer, started = begin(path)
    assert [one.question for one in stored(trainer)] == [0, 1, 2, 3, 4, 6]
    assert started.stored == 6
    assert "4 to questions that are not trained on" in str(started)


def test_what_does_not_fit_and_what_comes_again_is_left_out_and_told(tmp_path):
    of_first = trace(0, "5", reward=0.5), trace(0, "6"), trace(0, "5", reward=0.25)
    of_others = trace(1, "5 5 5 5 5 5 5 5"), trace(1, "5 5 5 5 5 5 5"), trace(2, "")
    path = write(tmp_path / "traces.jsonl", *of_first, *of_others)
    trainer, started = begin(path)
    assert [(one.question, len(one.response)) for one in stored(trainer)] == [(0, 2), (0, 2), (1, 8)]
    assert [one.reward for one in stored(trainer)][1] == 0.25
    told = str(started)
    assert told.startswith(f"the experience starts with 3 answers to 2 questions from {path}; ")
    assert told.endswith("left out: 1 longer than an answer may be, 1 without a token, 1 repeated")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([trace(99, "5"), trace(0, "")], "1 to questions that are not trained on, 1 without a token"),
        ([], "it has no rows"),
    ],
)
def test_a_file_without_a_usable_row_is_an_error(tmp_path, rows, message):
    with pytest.raises(DataError, match=f"nothing in .*traces.jsonl can be used: {message}"):
        begin(write(tmp_path / "traces.jsonl", *rows))


def test_a_start_that_is_never_replayed_is_refused():
    with pytest.raises(ConfigError, match=r"experience.start fills a buffer that experience.ratio=0 never replays"):
        config({"experience": {"start": "x", "ratio": 0}})
