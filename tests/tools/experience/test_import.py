"""Tables of answers as other projects write them, by hand, and what a run makes of them."""

import json
from math import nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.tools.experience.__main__ import main
from exgrpo.tools.experience.convert import ANSWERS, BAD, EMPTY, UNGRADED, UNSCORED, answers_of, cell, import_answers
from exgrpo.train.common.errors import ConfigError, DataError
from exgrpo.train.common.step_batch import ENGINE, TRAINER
from tests.tools.experience.runs import ids, pretrained, questions, rows_of
from tests.tools.experience.test_start import arithmetic, stored
from tests.train.files import write_rows

MODEL = "builtin:arithmetic"


def user(text):
    return [{"content": text, "role": "user"}]


def verl(question, output, score, **more):
    asked = questions()[question]
    uid = f"0b9c-{question}_0_0"
    return {"input": asked.text, "output": output, "gts": asked.gold, "score": score, "step": 7, "uid": uid, **more}


def prime_rl(question, text):
    """An episode of one trace, of an answer of one turn."""
    asked = questions()[question]
    nodes = [{"message": user(asked.text)[0]}, {"parent": 0, "message": {"role": "assistant", "content": text}}]
    trace = {"nodes": nodes, "rewards": {"correct": {"score": 1.0, "weight": 1.0}}, "ok": True}
    task = {"type": "T", "data": {"idx": 0, "prompt": asked.text, "answer": asked.gold}}
    return {"id": "e", "task": task, "run": {"type": "train", "work": {"step": 4}}, "traces": [trace]}


def said(trainer):
    """What a run has stored: question, text, whether it ended, reward."""
    decode = pretrained().tokenizer.decode
    return [(one.question, decode(one.response), one.finished, one.reward) for one in stored(trainer)]


END = "<|end|>"
ONE, TWO = "\\boxed{1}", "\\boxed{2}"
GRADED = 0.0
"""What the scripted grader gives these texts."""


def trl():
    rows = []
    for i, text, first, second in ((0, ONE, 1.0, 0.5), (1, TWO, nan, nan)):
        row = {"step": 3, "prompt": user(questions()[i].text), "accuracy_reward": first, "format_reward": second}
        rows.append({**row, "completion": [{"role": "assistant", "content": text}], "note": "of the user"})
    return rows


def open_r1():
    row = {"problem": questions()[3].text, "solution": f"so \\boxed{{{questions()[3].gold}}}", "uuid": "u"}
    return [
        {**row, "generations": ["\\boxed{1}", "7 +"], "is_reasoning_complete": [True, False], "api_metadata": [{}, {}]}
    ]


VERL = {"question": "input", "answer": "gts", "response": "output", "reward": "score"}
TRL = {"question": "prompt", "response": "completion", "reward": "accuracy_reward+format_reward"}
PRIME_RL = {"question": "task.data.prompt", "answer": "task.data.answer", "step": "run.work.step"}
PRIME_RL |= {"response": "traces.0.nodes.-1.message.content", "reward": "traces.0.rewards.correct.score"}
OPEN_R1 = {"question": "problem", "response": "generations", "finished": "is_reasoning_complete"}


def ended(question, text, reward=GRADED):
    return question, text + END, True, reward


FILES = {
    "verl": (VERL, "7.jsonl", lambda: [verl(0, ONE, 0.5), verl(0, TWO, None)], [ended(0, ONE, 0.5), ended(0, TWO)]),
    "trl": (TRL, "completions_00003.parquet", trl, [ended(0, ONE, 1.5), ended(1, TWO)]),
    "open_r1": (OPEN_R1, "r1.jsonl", open_r1, [ended(3, ONE), (3, "7 +", False, GRADED)]),
    "prime_rl": (PRIME_RL, "traces.jsonl", lambda: [prime_rl(2, ONE)], [ended(2, ONE, 1.0)]),
}


@pytest.mark.parametrize("name", FILES)
def test_a_run_begins_with_what_the_files_of_a_project_say(tmp_path, name):
    columns, file, rows, expected = FILES[name]
    told = import_answers(write_rows(tmp_path / file, rows()), tmp_path / "set", columns)
    assert f"answers: {len(expected)}" in str(told)
    trainer = arithmetic(tmp_path, tmp_path / "set")
    assert said(trainer) == expected
    # None of them has log-probs: they are those of the policy at the start.
    assert {one.old_log_probs_from for one in stored(trainer)} == {TRAINER}
    assert sum(len(batch) for batch, _ in trainer.policy.scored) == len(expected)


def test_token_ids_and_log_probs_come_as_they_are_and_their_text_by_a_tokenizer(tmp_path):
    response = ids("7 + 8 = 15")
    row = {"question": questions()[0].text, "response_ids": response.tolist(), "reward": 1, "weights_of": MODEL}
    row |= {"log_prob": [-0.25] * len(response), "prompt_ids": list(questions()[0].prompt)}
    path = write_rows(tmp_path / "ids.jsonl", [row])
    with pytest.raises(DataError, match="line 1: has response_ids and no response: --tokenizer must name the model"):
        import_answers(path, tmp_path / "set")
    told = import_answers(path, tmp_path / "set", {"model": "weights_of"}, tokenizer=MODEL)
    assert told.counts == {ANSWERS: 1, UNSCORED: 0, UNGRADED: 0, EMPTY: 0}
    (found,) = rows_of(tmp_path / "set")
    assert (found.response, found.model) == ("7 + 8 = 15", MODEL)
    trainer = arithmetic(tmp_path, tmp_path / "set")
    (one,) = stored(trainer)
    np.testing.assert_array_equal(one.response, response)
    np.testing.assert_array_equal(one.log_prob, np.full(len(response), -0.25, np.float32))
    assert (one.old_log_probs_from, one.reward) == (ENGINE, 1.0)
    assert not trainer.policy.scored


def test_the_question_of_messages_is_what_the_user_says():
    messages = [{"role": "system", "content": "Be short."}, *user([{"type": "text", "text": "1 + 1"}])]
    (one,) = answers_of({"prompt": messages, "response": "2"}, {"question": "prompt"})
    assert one["question"] == "1 + 1"
    turns = [*messages, {"role": "assistant", "content": "2"}, *user("and 2?")]
    (one,) = answers_of({"prompt": turns, "response": "3"}, {"question": "prompt"})
    assert one["question"] == "user: 1 + 1\n\nassistant: 2\n\nuser: and 2?"


@pytest.mark.parametrize(("path", "value"), [("d.-1.e", 4), ("a+b.c", 3), ("n+n", None), ("x.y", 5), ("", None)])
def test_a_column_is_a_name_a_path_or_a_sum(path, value):
    row = {"a": 1, "b": {"c": 2}, "d": [{"e": 3}, {"e": 4}], "n": nan, "x.y": 5, "": 6}
    assert cell(row, path) == value


def test_rewards_are_those_that_are_named(tmp_path, capsys):
    path = write_rows(tmp_path / "completions.parquet", trl())
    for name, reward, expected in (("one", "accuracy_reward", [1.0, None]), ("none", "", [None, None])):
        columns = ["question", "prompt", "response", "completion", "reward", reward]
        assert main(["import", path, str(tmp_path / name), "--columns", *columns]) == 0
        assert [row.reward for row in rows_of(tmp_path / name)] == expected
    assert "reward is left out" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--columns: .*'respnse'"):
        import_answers(path, tmp_path / "other", {"respnse": "completion"})
    with pytest.raises(DataError, match=r"row 1: note\+step cannot be added"):
        import_answers(path, tmp_path / "other", TRL | {"reward": "note+step"})


WRONG = [
    ('{"input"', "not valid JSON"),
    ("[1]", "expected an object, got list"),
    (verl(0, 3, 1.0), "response: Input should be a valid string (got 3)"),
    (verl(0, "1", "good"), "reward: Input should be a valid number (got 'good')"),
    ({"input": "1", "gts": "1", "score": 1.0}, "has no 'output', which --columns names; its columns are 'input, gts"),
    (verl(0, ["1", "2"], [1.0]), "1 reward for 2 answers"),
    (verl(0, user("1") * 2, 1.0), "an answer has 2 messages"),
    (verl(0, "1", 1.0, step=-1), "step: Input should be greater than or equal to 0 (got -1)"),
    (verl(0, "1", 1.0, source=5), "cannot be written: "),
]


def test_a_row_that_cannot_be_right_is_named_and_the_rest_is_kept_on_request(tmp_path):
    good = verl(0, "\\boxed{1}", 1.0)
    for number, (row, message) in enumerate(WRONG):
        path = write_rows(tmp_path / f"{number}.jsonl", [good, "", row])
        with pytest.raises(DataError) as error:
            import_answers(path, tmp_path / "set", VERL)
        assert str(error.value).startswith(f"{path} line 3: ")
        assert message in str(error.value)
        assert "--skip_bad" in str(error.value)
        assert not (tmp_path / "set").exists()
    write_rows(tmp_path / "all.jsonl", [*(row for row, _ in WRONG), good])
    told = import_answers(f"{tmp_path}/*.jsonl", tmp_path / "set", VERL, skip_bad=True)
    assert (told.counts[ANSWERS], told.counts[BAD], len(told.problems)) == (10, 18, 5)
    assert f"left out: {tmp_path}/0.jsonl line 3: not valid JSON" in str(told)
    assert len(rows_of(tmp_path / "set")) == 10


def test_files_without_answers_leave_no_folder(tmp_path):
    row = {"problem": "1 + 1", "response": []}
    path = tmp_path / "list.json"
    path.write_text(json.dumps([row, row], indent=1))
    with pytest.raises(DataError, match=r"no answer in these files: .*list.json:; columns: as they are; .*answer: 2"):
        import_answers(str(path), tmp_path / "set")
    with pytest.raises(DataError, match="there is no such file"):
        import_answers("nobody/nothing", tmp_path / "set")
    assert {path.name for path in tmp_path.iterdir()} == {"list.json"}


TEXTS = st.text(st.characters(codec="utf-8"))
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.just(10**400) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
SOUND = [
    (VERL, verl(0, "1", 1.0)),
    (TRL | {"reward": "a+b"}, {"step": 1, "prompt": user("1"), "completion": user("1"), "a": 1.0, "b": 2}),
    ({"finished": "done"}, {"problem": "1", "answer": "2", "response": ["1"], "done": [True], "source": "s"}),
    ({}, {"question": "1", "response": "2", "response_ids": [1], "log_prob": [-1.0], "allowed_tokens": [[1, 2]]}),
]


def changed(draw, value):
    """The value with anything at one place in it."""
    if isinstance(value, dict) and value and draw(st.booleans() | st.just(True)):
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: changed(draw, value[key])}
    if isinstance(value, list) and value and draw(st.booleans() | st.just(True)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], changed(draw, value[place]), *value[place + 1 :]]
    return draw(ANYTHING)


@given(sound=st.sampled_from(SOUND), data=st.data())
def test_whatever_stands_in_a_row_is_read_or_named(tmp_path_factory, sound, data):
    columns, row = sound
    folder = tmp_path_factory.mktemp("any")
    path = write_rows(folder / "any.jsonl", [json.dumps(changed(data.draw, row)), row])
    told = import_answers(path, folder / "set", columns, skip_bad=True)
    assert told.counts[ANSWERS] == len(rows_of(folder / "set")) >= 1
