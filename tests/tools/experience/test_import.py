"""Answers in files of other projects, written by hand as those projects write them, and what a run makes of them."""

import json
from math import nan
from typing import get_args

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exgrpo.tools.experience.convert import import_answers
from exgrpo.tools.experience.forms import FORMS
from exgrpo.tools.experience.program import ImportOptions, main
from exgrpo.train.common.errors import ConfigError, DataError
from exgrpo.train.data.prompts import PROMPTS, PromptFormat
from tests.tools.experience.runs import ids, pretrained, questions, rows_of, write_parquet
from tests.tools.experience.test_start import arithmetic, stored

MODEL = "builtin:arithmetic"


def write_lines(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def user(text):
    return [{"content": text, "role": "user"}]


def verl(question, output, score, **more):
    asked = questions()[question]
    uid = f"0b9c-{question}_0_0"
    return {"input": asked.text, "output": output, "gts": asked.gold, "score": score, "step": 7, "uid": uid, **more}


def of_verl(question, **more):
    asked = questions()[question]
    row = {"data_source": "arithmetic", "prompt": user(asked.text), "ability": "math"}
    return {**row, "reward_model": {"ground_truth": asked.gold, "style": "rule"}, "extra_info": {"index": 9}, **more}


def prime_rl(question, *turns, log_prob=-0.25, **more):
    """An episode of one trace; turns of an assistant and of a user alternate, the last one ends as the model ends."""
    asked = questions()[question]
    prompt = list(asked.prompt)
    # The generation prompt is a part of the assistant's node.
    nodes = [{"message": user(asked.text)[0], "token_ids": prompt[:-1], "mask": [False] * (len(prompt) - 1)}]
    for number, turn in enumerate(turns):
        own, scaffold = number % 2 == 0, [prompt[-1]] if number == 0 else []
        said = ids(turn, eos=own).tolist()
        node = {
            "parent": number,
            "sampled": own,
            "token_ids": scaffold + said,
            "logprobs": [log_prob] * own * len(said),
        }
        node |= {"mask": [False] * len(scaffold) + [own] * len(said)}
        nodes.append({**node, "message": {"role": "assistant" if own else "user", "content": turn}})
    data = {"idx": 0, "prompt": asked.text, "answer": asked.gold}
    trace = {
        "task": {"type": "T", "data": data},
        "agent": {"name": "agent", "trainable": True},
        "nodes": nodes,
        "calls": [{"node": 1, "model": MODEL, "finish_reason": "stop"}],
        "rewards": {"correct": {"score": 1.0, "weight": 1.0}, "form": {"score": 0.5, "weight": 0.2}, "judge": None},
        "ok": True,
        "stop_condition": "agent_completed",
        **more,
    }
    run = {"type": "train", "id": "r", "work": {"type": "train", "step": 4}}
    return {
        "id": "e",
        "env": {"id": "x"},
        "task": trace["task"],
        "run": run,
        "ok": True,
        "errors": [],
        "traces": [trace],
    }


def said(trainer):
    """What a run has stored: question, text, whether it ended, reward."""
    decode = pretrained().tokenizer.decode
    return [(one.question, decode(one.response), one.finished, one.reward) for one in stored(trainer)]


END = "<|end|>"
GRADED = 0.0
"""What the scripted grader gives these texts."""


def _trl(path, form=str):
    texts = [(0, "\\boxed{1}", 1.0, 0.5), (1, "\\boxed{2}", nan, nan)]
    rows = [
        {
            "step": 3,
            "prompt": questions()[i].text if form is str else user(questions()[i].text),
            "completion": text if form is str else [{"role": "assistant", "content": text}],
            "accuracy_reward": first,
            "format_reward": second,
            "advantage": 0.7,
            "note": "of the user",
        }
        for i, text, first, second in texts
    ]
    return write_parquet(path, rows)


FILES = {
    "verl": (
        "verl rollout dump",
        lambda folder: write_lines(folder / "7.jsonl", verl(0, "\\boxed{1}", 0.5), verl(0, "\\boxed{2}", None)),
        [(0, "\\boxed{1}" + END, True, 0.5), (0, "\\boxed{2}" + END, True, GRADED)],
    ),
    "trl": (
        "TRL completions",
        lambda folder: _trl(folder / "completions_00003.parquet"),
        [(0, "\\boxed{1}" + END, True, 1.5), (1, "\\boxed{2}" + END, True, GRADED)],
    ),
    "trl messages": (
        "TRL completions",
        lambda folder: _trl(folder / "completions_00003.parquet", list),
        [(0, "\\boxed{1}" + END, True, 1.5), (1, "\\boxed{2}" + END, True, GRADED)],
    ),
    "oapl": (
        "OAPL data",
        lambda folder: write_parquet(
            folder / "train.parquet",
            [
                of_verl(2, response=f"\\boxed{{{i}}}", precomputed_reward=float(i), response_rewards=[0.0, 1.0])
                for i in range(2)
            ],
        ),
        [(2, "\\boxed{0}" + END, True, 0.0), (2, "\\boxed{1}" + END, True, 1.0)],
    ),
    "luffy": (
        "LUFFY data",
        lambda folder: write_parquet(
            folder / "openr1.parquet",
            [
                of_verl(1, target=[{"role": "assistant", "content": "\\boxed{1}"}], target_lst=["\\boxed{1}", "2"]),
                of_verl(2, target=None, target_lst=None),
            ],
        ),
        [(1, "\\boxed{1}" + END, True, GRADED), (1, "2" + END, True, GRADED)],
    ),
    "open_r1": (
        "open-r1 generations",
        lambda folder: write_lines(
            folder / "r1.jsonl",
            {
                "problem": questions()[3].text,
                "solution": f"so \\boxed{{{questions()[3].gold}}}",
                "uuid": "u",
                "generations": ["\\boxed{1}", "7 +"],
                "finish_reasons": ["stop", "length"],
                "api_metadata": [{}, {}],
            },
        ),
        [(3, "\\boxed{1}" + END, True, GRADED), (3, "7 +", False, GRADED)],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_run_begins_with_what_a_file_of_each_form_says(tmp_path, name):
    title, write, expected = FILES[name]
    told = import_answers(str(write(tmp_path)), tmp_path / "set")
    assert f"{title}, {len(expected)} answers" in str(told)
    trainer = arithmetic(tmp_path, tmp_path / "set")
    assert said(trainer) == expected
    # None of them has log-probs: they are those of the policy at the start.
    assert {one.behaviour for one in stored(trainer)} == {"trainer"}
    assert sum(len(batch) for batch, _ in trainer.policy.scored) == len(expected)


def test_token_ids_and_log_probs_of_prime_rl_come_as_they_are(tmp_path):
    turns = ("7 + 8 = ?", "7 + 8 = 15", "\\boxed{15}")
    cut = prime_rl(2, "7 +", log_prob=-0.0001)
    cut["traces"][0]["calls"][0]["finish_reason"] = "length"
    cut["traces"][0]["nodes"][1]["advantages"] = [0.25] * 4
    others = prime_rl(3, "x", ok=False), prime_rl(3, "x", agent={"name": "judge", "trainable": False})
    path = write_lines(tmp_path / "traces.jsonl", prime_rl(0, "\\boxed{1}"), prime_rl(1, *turns), cut, *others)
    told = import_answers(str(path), tmp_path / "set", tokenizer=MODEL)
    assert (told.answers, told.empty, told.unscored, told.ungraded) == (3, 2, 0, 0)
    trainer = arithmetic(tmp_path, tmp_path / "set")
    assert not trainer.policy.scored
    first, several, _ = stored(trainer)
    assert [one.question for one in stored(trainer)] == [0, 1, 2]
    np.testing.assert_array_equal(first.response, ids("\\boxed{1}"))
    np.testing.assert_array_equal(first.log_prob, np.full(len(first.response), -0.25, np.float32))
    parts = [ids(turns[0]), ids(turns[1], eos=False), ids(turns[2])]
    own = np.repeat([True, False, True], [len(part) for part in parts])
    np.testing.assert_array_equal(several.response, np.concatenate(parts))
    np.testing.assert_array_equal(several.written, own)
    np.testing.assert_array_equal(several.log_prob, np.where(own, np.float32(-0.25), np.float32(0)))
    assert [one.behaviour for one in stored(trainer)] == ["engine"] * 3
    assert [one.finished for one in stored(trainer)] == [True, True, False]
    assert [one.reward for one in stored(trainer)] == pytest.approx([1.1] * 3)
    rows = rows_of(tmp_path / "set")
    assert [(row.step, row.advantage) for row in rows] == [(4, None), (4, None), (4, 0.25)]


def test_token_ids_are_read_by_the_tokenizer_of_their_model_alone(tmp_path):
    episode = prime_rl(0, "\\boxed{1}")
    path = write_lines(tmp_path / "traces.jsonl", episode)
    with pytest.raises(ConfigError, match="prime-rl traces holds token ids: --tokenizer must name the model"):
        import_answers(str(path), tmp_path / "set")
    episode["traces"][0]["nodes"][1]["message"]["content"] = "something else"
    path = write_lines(tmp_path / "traces.jsonl", episode)
    with pytest.raises(DataError, match=r"line 1: its token_ids say .* in this tokenizer, and its message 'something"):
        import_answers(str(path), tmp_path / "set", tokenizer=MODEL)
    dump = write_lines(tmp_path / "7.jsonl", verl(0, "1", 1.0))
    with pytest.raises(ConfigError, match="verl rollout dump holds no token ids"):
        import_answers(str(dump), tmp_path / "set", tokenizer=MODEL)


def test_a_question_is_what_stands_in_its_place_in_the_prompt(tmp_path):
    asked = "system\nBe short.\nuser\n{}\nassistant\n"
    row = verl(0, "\\boxed{1}", 1.0, input=asked.format(questions()[0].text))
    path = str(write_lines(tmp_path / "7.jsonl", row))
    import_answers(path, tmp_path / "set", prompt_format=asked.format("{question}"))
    assert rows_of(tmp_path / "set")[0].question == questions()[0].text
    with pytest.raises(DataError, match="line 1: its question does not have the form of --prompt_format: 'system"):
        import_answers(path, tmp_path / "other", prompt_format="verl_math")


@given(st.text(), st.sampled_from(["{question}", "a{{b {question} c}}", *(one.text for one in PROMPTS.values())]))
def test_the_question_in_a_prompt_is_the_inverse_of_its_format(question, text):
    assert PromptFormat(1, prompt_format=text).question_in(text.format(question=question)) == question


def test_rewards_are_those_that_are_named(tmp_path):
    path = str(_trl(tmp_path / "completions.parquet"))
    assert "reward: accuracy_reward + format_reward" in str(import_answers(path, tmp_path / "all"))
    import_answers(path, tmp_path / "one", rewards=["accuracy_reward"])
    assert [row.reward for row in rows_of(tmp_path / "one")] == [1.0, None]
    assert main(["import", path, str(tmp_path / "none"), "--rewards"]) == 0
    assert [row.reward for row in rows_of(tmp_path / "none")] == [None, None]
    with pytest.raises(DataError, match=r"row 1: has no reward 'other'; there is accuracy_reward, format_reward"):
        import_answers(path, tmp_path / "other", rewards=["other"])


BAD = [
    ('{"input"', "not valid JSON"),
    ("[1]", "expected an object, got list"),
    (verl(0, 3, 1.0), "output: Input should be a valid string (got 3)"),
    (verl(0, "1", nan), "score: Input should be a finite number (got nan)"),
    ({"input": "1", "score": 1.0}, "output is missing"),
    (verl(0, "1", 1.0, step=-1), "step: Input should be greater than or equal to 0 (got -1)"),
]


def test_a_row_that_cannot_be_right_is_named_and_the_rest_is_kept_on_request(tmp_path):
    good = verl(0, "\\boxed{1}", 1.0)
    for number, (row, message) in enumerate(BAD):
        path = write_lines(tmp_path / f"{number}.jsonl", good, "", row)
        with pytest.raises(DataError) as error:
            import_answers(str(path), tmp_path / "set")
        assert str(error.value).startswith(f"{path} line 3: ")
        assert message in str(error.value)
        assert "--skip_bad" in str(error.value)
        assert not (tmp_path / "set").exists()
    write_lines(tmp_path / "all.jsonl", *(row for row, _ in BAD), good)
    told = import_answers(f"{tmp_path}/*.jsonl", tmp_path / "set", skip_bad=True)
    assert (told.answers, len(told.questions), told.bad, len(told.problems)) == (7, 1, 12, 5)
    assert f"left out: {tmp_path}/0.jsonl line 3: not valid JSON" in str(told)
    assert len(rows_of(tmp_path / "set")) == 7


BAD_TRACES = [
    (lambda trace: trace["nodes"][1].update(logprobs=[-1.0]), "1 logprobs for 4 sampled token_ids"),
    (lambda trace: trace["nodes"][1].update(mask=[True]), "1 mask for 5 token_ids"),
    (lambda trace: trace["nodes"][1].update(parent=None), "a trace has several branches"),
    (lambda trace: trace["nodes"][1]["token_ids"].append(-1), "greater than or equal to 0 (got -1)"),
    (lambda trace: trace["nodes"][1].update(logprobs=[1.0] * 4), "log_prob must be finite numbers up to 0"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TRACES)
def test_a_trace_that_cannot_be_right_is_named(tmp_path, change, message):
    episode = prime_rl(0, "\\boxed{1}")
    change(episode["traces"][0])
    path = write_lines(tmp_path / "traces.jsonl", episode)
    with pytest.raises(DataError) as error:
        import_answers(str(path), tmp_path / "set", tokenizer=MODEL)
    assert str(error.value).startswith(f"{path} line 1: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "1 + 1", "response": "2"}, "line 1: a run reads this as it is: name the file in --experience"),
        ({"text": "1 + 1"}, "its columns 'text' are those of no form that is known: --form names one of verl, trl"),
        ({**verl(0, "1", 1.0), "generations": []}, "are those of verl and of open_r1: --form names one of"),
        ("", "no row is an object"),
    ],
)
def test_files_of_no_form_and_of_several_are_told(tmp_path, row, message):
    path = write_lines(tmp_path / "some.jsonl", row)
    with pytest.raises(DataError, match=message):
        import_answers(str(path), tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_a_tokenizer_that_cannot_be_loaded_is_one_line(tmp_path, capsys):
    path = write_lines(tmp_path / "traces.jsonl", prime_rl(0, "1"))
    assert main(["import", str(path), str(tmp_path / "set"), "--tokenizer", str(tmp_path / "none")]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: --tokenizer {tmp_path}/none: ")
    assert told.count("\n") == 1
    assert not (tmp_path / "set").exists()


def test_a_form_that_is_named_is_taken_and_files_without_answers_leave_no_folder(tmp_path):
    (names, _) = get_args(ImportOptions.model_fields["form"].annotation)
    assert get_args(names) == tuple(FORMS)
    both = {**verl(0, "1", 1.0), "problem": "1 + 1", "generations": []}
    path = str(write_lines(tmp_path / "some.json", both))
    assert import_answers(path, tmp_path / "set", form="verl").answers == 1
    with pytest.raises(DataError, match="there is no answer in this open-r1 generations: 1 of its rows hold none"):
        import_answers(path, tmp_path / "other", form="open_r1")
    (tmp_path / "list.json").write_text(json.dumps([both], indent=1))
    assert import_answers(str(tmp_path / "list.json"), tmp_path / "again", form="verl").answers == 1
    assert {path.name for path in tmp_path.iterdir()} == {"some.json", "list.json", "set", "again"}


@settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8")), min_size=1, max_size=5),
    rewards=st.lists(st.none() | st.floats(-1, 1), min_size=5, max_size=5),
    steps=st.lists(st.none() | st.integers(0, 2**31 - 1), min_size=5, max_size=5),
)
def test_any_texts_and_numbers_of_a_dump_are_kept(tmp_path_factory, texts, rewards, steps):
    folder = tmp_path_factory.mktemp("dump")
    lines = zip(texts, rewards, steps, strict=False)
    rows = [{**verl(0, text, reward), "input": text, "step": step} for text, reward, step in lines]
    import_answers(str(write_lines(folder / "1.jsonl", *rows)), folder / "set")
    found = [(row.question, row.response, row.gold, row.reward, row.step) for row in rows_of(folder / "set")]
    assert found == [(row["input"], row["output"], row["gts"], row["score"], row["step"]) for row in rows]


TEXTS = st.text(st.characters(codec="utf-8"))
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
SOUND = {
    "verl": verl(0, "1", 1.0),
    "trl": {"step": 1, "prompt": user("1"), "completion": user("1"), "reward": 1.0, "advantage": 0.5},
    "prime_rl": prime_rl(0, "1", "2", "3"),
    "oapl": of_verl(0, response="1", precomputed_reward=1.0),
    "luffy": of_verl(0, target=user("1"), target_lst=["2"]),
    "open_r1": {"problem": "1", "answer": "2", "generations": ["1"], "finish_reasons": ["stop"]},
}


def changed(draw, value):
    """The value with anything at one place in it."""
    if isinstance(value, dict) and value and draw(st.booleans() | st.just(True)):
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: changed(draw, value[key])}
    if isinstance(value, list) and value and draw(st.booleans() | st.just(True)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], changed(draw, value[place]), *value[place + 1 :]]
    return draw(ANYTHING)


@settings(max_examples=100, deadline=None)
@given(form=st.sampled_from(sorted(FORMS)), data=st.data())
def test_whatever_stands_in_a_row_is_read_or_named(tmp_path_factory, form, data):
    folder = tmp_path_factory.mktemp("any")
    path = write_lines(folder / "any.jsonl", changed(data.draw, SOUND[form]), SOUND[form])
    tokenizer = MODEL if FORMS[form].tokens else None
    told = import_answers(str(path), folder / "set", form=form, skip_bad=True, tokenizer=tokenizer)
    assert told.answers >= 1
    assert len(rows_of(folder / "set")) == told.answers


def test_long_files_are_written_some_rows_at_a_time_and_the_card_tells_of_them(tmp_path):
    rows = [verl(i % 6, f"\\boxed{{{i}}}", i / 3000) for i in range(3000)]
    told = import_answers(str(write_lines(tmp_path / "1.jsonl", *rows)), tmp_path / "set")
    assert str(told).splitlines()[0].endswith("1.jsonl: verl rollout dump, 3,000 answers to 6 questions")
    (file,) = (tmp_path / "set" / "data").iterdir()
    assert pq.ParquetFile(file).metadata.num_row_groups == 3
    assert [row.reward for row in rows_of(tmp_path / "set")] == [row["score"] for row in rows]
    text = (tmp_path / "set" / "README.md").read_text()
    assert "from files of another project (verl rollout dump)" in text
    assert "- answers: 3,000" in text
