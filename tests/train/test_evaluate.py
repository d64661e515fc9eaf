"""Scores against enumeration, and the command as a user starts it: finished, interrupted, refused."""

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.config import ConfigError
from exgrpo.train.evaluate import Options, answers_per_row, defaults, evaluate, parse_options
from exgrpo.train.folder_lock import claim
from exgrpo.train.rollout import Sampling
from exgrpo.train.scores import average, pass_at_k, score, score_all
from tests.train.fakes import ScriptedEngine, answerer, question_set
from tests.train.launch import ROOT, environment
from tests.train.vllm_installed import real

VERDICTS = st.lists(st.booleans(), min_size=1, max_size=7)


@given(VERDICTS, st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(verdicts, data):
    k = data.draw(st.integers(1, len(verdicts)))
    subsets = list(itertools.combinations(verdicts, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(verdicts), sum(verdicts), k) == pytest.approx(expected)


@pytest.mark.parametrize("k", [0, 4])
def test_pass_at_k_needs_enough_answers(k):
    with pytest.raises(ValueError, match=f"k: {k} is not between 1 and the 3 answers"):
        pass_at_k(3, 1, k)


@given(st.lists(st.tuples(st.sampled_from("ab"), VERDICTS), min_size=1, max_size=8))
def test_scores_are_means_over_questions(questions):
    verdicts = [(source, str(i), right) for i, (source, rights) in enumerate(questions) for right in rights]
    scores = score(verdicts)
    for source in {source for source, _ in questions}:
        rates = [np.mean(rights) for name, rights in questions if name == source]
        assert scores[source].questions == len(rates)
        assert scores[source].pass_rate == pytest.approx(np.mean(rates))
        if len(rates) > 1:
            assert scores[source].standard_error == pytest.approx(np.std(rates, ddof=1) / len(rates) ** 0.5)
    assert score_all(verdicts).pass_rate == pytest.approx(np.mean([np.mean(rights) for _, rights in questions]))
    assert average(scores) == pytest.approx(np.mean([s.pass_rate for s in scores.values()]))


def test_repeated_rows_are_more_answers_to_one_question():
    verdicts = [("aime", "q1", i < 8) for i in range(32)] + [("aime", "q2", False)] * 32
    scores = score(verdicts)["aime"]
    assert (scores.questions, scores.answers, scores.pass_rate) == (2, 64, 0.125)
    assert list(scores.pass_at) == [2, 4, 8, 16, 32]
    assert scores.pass_at[32] == 0.5


def test_in_training_all_questions_count_alike():
    skill = {0: 1.0, 1: 0.5, 2: 0.0, 3: 0.5}
    overall, by_source = evaluate(answerer(ScriptedEngine(skill)), question_set(4).questions, 2, Sampling(8), seed=0)
    assert overall.pass_rate == 0.5
    assert overall.pass_at == {2: 0.75}
    assert by_source == {"fake": overall}


@pytest.mark.parametrize(("repeats", "per_row"), [(1, 32), (8, 4), (32, 1), (5, 7)])
def test_avg_counts_the_answers_to_a_question_over_its_rows(repeats, per_row):
    rows = [
        dataclasses.replace(question, source="aime" if i == 0 else "math")
        for i, question in enumerate(question_set(2).questions)
        for _ in range(repeats)
    ]
    options = Options(model="m", data=("d",), samples=3, avg={"aime": 32})
    assert answers_per_row(rows, options) == [per_row] * repeats + [3] * repeats


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temperatur: 1", "unknown key 'temperatur'; did you mean 'temperature'?"),
        ("avg: {aime: 0}", "avg.aime: Input should be greater than 0"),
        ("samples: many", "samples: Input should be a valid integer"),
    ],
)
def test_bad_recipes_are_named(tmp_path, text, message):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        defaults(tmp_path / "r.yaml")


def test_the_command_line_beats_the_recipe(tmp_path):
    (tmp_path / "r.yaml").write_text("data: [a.jsonl]\ntemperature: 0.7\nsamples: 4\n")
    options = parse_options(["some/model", f"--recipe={tmp_path / 'r.yaml'}", "--samples", "2"])
    assert (options.model, options.data, options.temperature, options.samples) == ("some/model", ("a.jsonl",), 0.7, 2)


def command(folder, *more):
    arguments = ["builtin:arithmetic", "--data", "builtin:arithmetic", "--limit=20", "--samples=2", "--chunk=6"]
    fixed = ["--temperature=1", "--max_tokens=80", "--dtype=fp32", "--engine=transformers", f"--output={folder}"]
    return subprocess.run(
        [sys.executable, "-m", "exgrpo.train.evaluate", *arguments, *fixed, *more],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
        timeout=200,
        check=False,
    )


@real
def test_the_real_vllm_answers(tmp_path):
    done = command(tmp_path, "--engine=vllm", "--kv_cache_gib=0.1")
    assert done.returncode == 0, done.stderr
    assert "answers by vllm" in done.stdout
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 40
    # Solved about as often as by the other engine: half of the problems, give or take four standard errors.
    assert 0.1 < json.loads((tmp_path / "scores.json").read_text())["average"] < 0.9


def test_an_interrupted_evaluation_ends_like_one_that_was_not(tmp_path):
    done = command(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "arithmetic" in done.stdout
    answers, scores = tmp_path / "answers.jsonl", (tmp_path / "scores.json").read_text()
    lines = answers.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == 40
    right = np.mean([record["reward"] for record in records])
    assert json.loads(scores)["sources"]["arithmetic"]["pass_rate"] == pytest.approx(right)
    assert json.loads(scores)["average"] == pytest.approx(right)
    # Killed while it wrote the third chunk of twelve answers.
    answers.write_text("\n".join(lines[:27]) + "\n" + lines[27][:30])
    done = command(tmp_path)
    assert "2 of 4 chunks done" in done.stdout
    assert answers.read_text().splitlines() == lines
    assert (tmp_path / "scores.json").read_text() == scores


def test_other_options_and_bad_input_are_refused(tmp_path):
    (tmp_path / "options.yaml").write_text("model: other\n")
    refused = command(tmp_path)
    assert refused.returncode == 2
    assert f"error: output: {tmp_path} holds an evaluation with other options" in refused.stderr
    (tmp_path / "busy").mkdir()
    with claim(tmp_path / "busy"):
        busy = command(tmp_path / "busy")
    assert busy.returncode == 2
    assert f"error: {tmp_path / 'busy'} is in use by another process (process {os.getpid()} on " in busy.stderr
    missing = command(tmp_path / "new", "--data", "missing.jsonl")
    assert missing.returncode == 2
    assert "error: " in missing.stderr
    assert "missing.jsonl" in missing.stderr
