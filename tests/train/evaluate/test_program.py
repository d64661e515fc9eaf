"""Scores against enumeration, and the command as a user starts it: finished, interrupted, refused."""

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from exgrpo.train.builtin import ASSETS
from exgrpo.train.checkpoint.folder_lock import claim
from exgrpo.train.config import Config, RewardConfig
from exgrpo.train.data.questions import QuestionSet
from exgrpo.train.dotted import known_keys
from exgrpo.train.errors import ConfigError
from exgrpo.train.evaluate.evaluation import answers_per_row, engine_settings
from exgrpo.train.evaluate.held_out import evaluate
from exgrpo.train.evaluate.options import AS_TRAINED, Options, defaults, parse_options
from exgrpo.train.evaluate.scores import LeftOut, Verdict, average, distinct_at_k, pass_at_k, score, score_all
from exgrpo.train.pretrained.tokenizer import load_pretrained
from exgrpo.train.recipe import DEFAULT_RUN, to_yaml
from exgrpo.train.rollout import Sampling
from tests.train.configs import configured
from tests.train.fakes import ScriptedEngine, ScriptedGrader, answerer, marked, question_set
from tests.train.launch import ROOT, environment, launch_module
from tests.train.rollout.vllm.installed import real

PLAIN = RewardConfig(function="tests.train.fakes:marked")
"""Has no functions beside it."""
VERDICTS = st.lists(st.booleans(), min_size=1, max_size=7)


@given(VERDICTS, st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(verdicts, data):
    k = data.draw(st.integers(1, len(verdicts)))
    subsets = list(itertools.combinations(verdicts, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(verdicts), sum(verdicts), k) == pytest.approx(expected)


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=8), st.data())
def test_distinct_at_k_is_the_mean_number_of_right_solutions_over_subsets(keys, data):
    """-1: a wrong answer."""
    k = data.draw(st.integers(1, len(keys)))
    subsets = list(itertools.combinations(keys, k))
    expected = sum(len(set(subset) - {-1}) for subset in subsets) / len(subsets)
    counts = [keys.count(key) for key in set(keys) - {-1}]
    assert distinct_at_k(len(keys), counts, k) == pytest.approx(expected)


@given(st.lists(st.lists(st.integers(-1, 3), min_size=4, max_size=9), min_size=1, max_size=6))
def test_scores_at_k_are_means_over_questions_with_their_standard_errors(questions):
    verdicts = [Verdict("s", str(i), key >= 0, key=abs(key)) for i, keys in enumerate(questions) for key in keys]
    found = score(verdicts)["s"]
    assert list(found.distinct_at) == list(found.pass_at)
    for k in found.distinct_at:
        subsets = [list(itertools.combinations(keys, k)) for keys in questions]
        distinct = [np.mean([len(set(subset) - {-1}) for subset in of_question]) for of_question in subsets]
        one = [np.mean([max(subset) >= 0 for subset in of_question]) for of_question in subsets]
        for values, mean, error in (
            (distinct, found.distinct_at[k], found.distinct_at_error[k]),
            (one, found.pass_at[k], found.pass_at_error[k]),
        ):
            assert mean == pytest.approx(np.mean(values))
            expected = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else None
            assert error == (expected if expected is None else pytest.approx(expected, abs=1e-12))
        assert found.distinct_at[k] >= found.pass_at[k] - 1e-12


@pytest.mark.parametrize("k", [0, 4])
def test_pass_at_k_needs_enough_answers(k):
    with pytest.raises(ValueError, match=f"k: {k} is not between 1 and the 3 answers"):
        pass_at_k(3, 1, k)


@given(st.lists(st.tuples(st.sampled_from("ab"), VERDICTS), min_size=1, max_size=8))
def test_scores_are_means_over_questions(questions):
    verdicts = [Verdict(source, str(i), right) for i, (source, rights) in enumerate(questions) for right in rights]
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
    verdicts = [Verdict("aime", "q1", i < 8) for i in range(32)] + [Verdict("aime", "q2", False)] * 32
    scores = score(verdicts)["aime"]
    assert (scores.questions, scores.answers, scores.pass_rate) == (2, 64, 0.125)
    assert list(scores.pass_at) == [2, 4, 8, 16, 32]
    assert scores.pass_at[32] == 0.5


def test_in_training_all_questions_count_alike():
    skill = {0: 1.0, 1: 0.5, 2: 0.0, 3: 0.5}
    overall, by_source = evaluate(
        answerer(ScriptedEngine(skill)), question_set(4), 2, Sampling(8), seed=0, reward=PLAIN
    )
    assert overall.pass_rate == 0.5
    assert overall.pass_at == {2: 0.75}
    # The answers are different texts: two solutions where both are right, one where one is.
    assert overall.distinct_at == {2: 1.0}
    assert by_source == {"fake": overall}


@pytest.mark.parametrize(("success", "pass_rate"), [(0.4, 1.0), (0.9, 0.5), (1.0, 0.0)])
def test_in_training_an_answer_is_right_by_the_threshold(success, pass_rate):
    asked = answerer(ScriptedEngine({0: 1.0, 1: 0.0}))
    asked.grader = ScriptedGrader(lambda text: 0.9 if marked(text) else 0.5)
    reward = PLAIN.model_copy(update={"success": success})
    overall, _ = evaluate(asked, question_set(2), 2, Sampling(8), seed=0, reward=reward)
    assert overall.pass_rate == pass_rate


def test_in_training_questions_that_were_left_out_are_wrong():
    asked = question_set(3)
    left_out = tuple(
        dataclasses.replace(q, text=f"long {q.index}", source=s) for q, s in zip(asked, "abb", strict=True)
    )
    overall, by_source = evaluate(
        answerer(ScriptedEngine({0: 1.0, 1: 0.5, 2: 0.5})),
        QuestionSet(asked.questions, left_out),
        2,
        Sampling(8),
        seed=0,
        reward=PLAIN,
    )
    assert (overall.questions, overall.left_out) == (6, 3)
    assert overall.pass_rate == pytest.approx(2 / 6)
    assert overall.pass_at == {2: 0.5}
    assert {name: (s.questions, s.left_out, s.pass_rate) for name, s in by_source.items()} == {
        "a": (1, 1, 0.0),
        "b": (2, 2, 0.0),
        "fake": (3, 0, pytest.approx(2 / 3)),
    }


@given(st.lists(st.tuples(st.sampled_from("ab"), VERDICTS, st.booleans()), min_size=1, max_size=8))
def test_left_out_questions_score_as_if_all_their_answers_were_wrong(questions):
    asked = [Verdict(s, str(i), right) for i, (s, rights, left) in enumerate(questions) if not left for right in rights]
    left_out = [LeftOut(s, str(i), len(rights)) for i, (s, rights, left) in enumerate(questions) if left]
    wrong = [Verdict(s, name, False) for s, name, count in left_out for _ in range(count)]
    for ours, expected in (
        (score(asked, left_out), score([*asked, *wrong])),
        ({"all": score_all(asked, left_out)}, {"all": score_all([*asked, *wrong])}),
    ):
        assert ours.keys() == expected.keys()
        for name, of_source in ours.items():
            assert of_source.left_out == sum(name in ("all", s) for s, _, _ in left_out)
            same = dataclasses.replace(of_source, left_out=0, truncated=expected[name].truncated)
            assert same == expected[name]


@pytest.mark.parametrize(("repeats", "per_row"), [(1, 32), (8, 4), (32, 1), (5, 7)])
def test_avg_counts_the_answers_to_a_question_over_its_rows(repeats, per_row):
    rows = [
        dataclasses.replace(question, source="aime" if i == 0 else "math")
        for i, question in enumerate(question_set(2).questions)
        for _ in range(repeats)
    ]
    options = Options(model="m", data={"test": ("d",)}, rollout={"samples": 3, "avg": {"aime": 32}})
    assert answers_per_row(rows, options) == [per_row] * repeats + [3] * repeats


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout.temperatur: 1", "unknown key 'rollout.temperatur'; did you mean 'rollout.temperature'?"),
        ("max_tokens: 5", "unknown key 'max_tokens'; did you mean 'rollout.max_tokens'?"),
        ("rollout.avg: {aime: 0}", "rollout.avg.aime: Input should be greater than 0"),
        ("rollout.samples: many", "rollout.samples: Input should be a valid integer"),
    ],
)
def test_bad_recipes_are_named(tmp_path, text, message):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        defaults([tmp_path / "r.yaml"])


def test_what_an_evaluation_shares_with_a_run_has_the_type_that_it_has_there():
    shared = set(known_keys(Options)) & set(known_keys(Config)) - {"data.test", "rollout.engine"}
    assert {f"{section}.{name}" for section, names in AS_TRAINED.items() for name in names} <= shared
    for key in shared - {"rollout.max_tokens"}:  # which an evaluation may leave open
        section, _, name = key.partition(".")
        if name:
            ours, runs = (of.model_fields[section].annotation.model_fields[name] for of in (Options, Config))
            assert ours.annotation == runs.annotation, key


def test_the_command_line_beats_the_recipe(tmp_path):
    (tmp_path / "r.yaml").write_text("data.test: [a.jsonl]\nrollout: {temperature: 0.7, samples: 4}\n")
    options = parse_options(["some/model", f"--recipe={tmp_path / 'r.yaml'}", "--rollout.samples", "2"])
    asked = options.rollout
    assert (options.model, options.data.test, asked.temperature, asked.samples) == ("some/model", ("a.jsonl",), 0.7, 2)


def command(folder, *more, cold=False, vllm=False):
    """Where it is cold, in a process as a user starts it."""
    arguments = ["builtin:arithmetic", "--data.test", "builtin:arithmetic", "--data.test_limit=20"]
    drawn = ["--rollout.samples=2", "--chunk=6"]
    # As the default run asks its model, which knows no other prompts.
    fixed = [f"--recipe={DEFAULT_RUN}", "--rollout.engine=transformers", f"--output.folder={folder}"]
    told = "exgrpo.train.evaluate", *arguments, *drawn, *fixed, *more
    if not cold:
        return launch_module(*told, vllm=vllm)
    return subprocess.run(
        [sys.executable, "-m", *told],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
        timeout=200,
        check=False,
    )


def test_the_recipe_of_a_run_asks_and_grades_as_the_run_does(tmp_path):
    """The default run's model solves about four in ten of its problems asked like that, and none asked otherwise."""
    done = command(tmp_path / "as trained")
    assert done.returncode == 0, done.stderr
    # Of 40 answers: 0.4, give or take four standard errors of 0.08.
    assert 0.1 < json.loads((tmp_path / "as trained" / "scores.json").read_text())["average"] < 0.75
    config = configured(
        {"policy": {"overrides": {"rope_theta": 5.0}}, "data": {"answer_prefix": "<think>", "max_prompt_tokens": 61}},
        {"reward": {"success": 0.5, "time_limit": 3.0}, "rollout": {"stop": ("Q:",), "temperature": 0.9}},
        {"evaluation": {"temperature": 0.7, "top_p": 0.95, "samples": 3}},
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    options = parse_options(["m", "--data.test=d", "--recipe", str(tmp_path / "config.yaml"), "--rollout.samples=5"])
    data, rollout = options.data, options.rollout
    assert (data.answer_prefix, data.prompt_format, data.max_prompt_tokens) == ("<think>", "{question}", 61)
    assert (options.reward.function, options.reward.success, options.reward.time_limit) == (None, 0.5, 3.0)
    assert (rollout.temperature, rollout.top_p, rollout.samples, rollout.max_tokens) == (0.7, 0.95, 5, 80)
    assert rollout.stop == ("Q:",)
    assert (options.policy.dtype, options.policy.overrides) == ("fp32", {"rope_theta": 5.0})


def test_a_run_stands_for_its_trained_model_asked_as_it_asks(tmp_path):
    config = configured(
        {"policy": {"path": "base/model"}, "rollout": {"max_tokens": 33, "samples": 6}},
        {"evaluation": {"temperature": 0.7, "samples": 3}, "seed": 5, "output": {"folder": tmp_path / "elsewhere"}},
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    arguments = [str(tmp_path), "--data.test=d"]
    with pytest.raises(ConfigError, match="is a run without a trained model: let it end, or name another"):
        parse_options(arguments)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "adapter_config.json").touch()
    adapted = parse_options(arguments)
    assert (adapted.model, adapted.lora.path) == ("base/model", str(tmp_path / "model"))
    (tmp_path / "model" / "adapter_config.json").rename(tmp_path / "model" / "config.json")
    options = parse_options([*arguments, "--rollout.temperature=0.2"])
    asked = options.rollout
    assert (options.model, options.lora.path) == (str(tmp_path / "model"), None)
    assert (asked.max_tokens, asked.samples, asked.temperature) == (33, 3, 0.2)
    assert (options.seed, options.output.folder) == (0, Path("evaluation"))
    (tmp_path / "other.yaml").write_text("rollout: {max_tokens: 44}")
    other = parse_options([*arguments, f"--recipe={tmp_path / 'other.yaml'}"])
    assert (other.model, other.rollout.max_tokens, other.rollout.samples) == (options.model, 44, 1)


@pytest.mark.parametrize(("given", "longest"), [([], 512 - 5), (["--rollout.max_tokens=9"], 9)])
def test_answers_are_as_long_as_the_model_has_positions_where_no_length_is_asked_for(given, longest):
    pretrained = load_pretrained("builtin:arithmetic", {})
    questions = [
        dataclasses.replace(question, prompt=(1,) * length)
        for question, length in zip(question_set(2).questions, (5, 3), strict=True)
    ]
    settings = engine_settings(parse_options(["builtin:arithmetic", "--data.test=d", *given]), pretrained, questions)
    assert settings.rollout.max_tokens == longest
    assert settings.length <= pretrained.model.positions


def test_the_default_length_is_that_of_the_paper_where_there_are_positions_enough():
    pretrained = load_pretrained("builtin:arithmetic", {"max_position_embeddings": 1 << 15})
    settings = engine_settings(parse_options(["builtin:arithmetic", "--data.test=d"]), pretrained, [])
    assert settings.rollout.max_tokens == 8192


def test_adapters_are_evaluated_beside_their_model(tmp_path):
    """Such large ones that the model solves nothing any more."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "arithmetic")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["o_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=3.0, generator=torch.Generator().manual_seed(0))
    adapted.save_pretrained(tmp_path / "adapters")
    done = command(tmp_path / "scores", f"--lora.path={tmp_path / 'adapters'}")
    assert done.returncode == 0, done.stderr
    # Without them 0.4, give or take four standard errors of 0.08.
    assert json.loads((tmp_path / "scores" / "scores.json").read_text())["average"] < 0.08
    refused = command(tmp_path / "other", f"--lora.path={tmp_path}")
    assert refused.returncode == 2
    assert f"error: lora.path: {tmp_path} is no folder with an adapter_config.json" in refused.stderr


@real
def test_the_real_vllm_answers(tmp_path):
    done = command(tmp_path, "--rollout.engine=vllm", "--rollout.kv_cache_gib=0.1", vllm=True)
    assert done.returncode == 0, done.stderr
    assert "answers by vllm" in done.stdout
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 40
    # Solved about as often as by the other engine: half of the problems, give or take four standard errors.
    assert 0.1 < json.loads((tmp_path / "scores.json").read_text())["average"] < 0.9


def test_an_interrupted_evaluation_ends_like_one_that_was_not(tmp_path):
    done = command(tmp_path, cold=True)
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


def rewarded_by_gold(folder):
    """Options of an evaluation: two sources in one file and one in another, long questions and rewards of 0.1 and 0.4.

    Each question has two rows. Its answers get 0.4 where its gold answer, 0 to 5, is odd.
    """
    rows = []
    for i, source in enumerate(["mixed"] * 4 + ["long"] * 2):
        text = f"What is {i} + 1?" if i < 3 else "What is " + "1 + " * 90 + f"{i}?"
        row = {"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": str(i)}}
        rows += [{**row, "data_source": source}] * 2
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "only_long.jsonl").write_text(json.dumps({"question": "1 + " * 90, "answer": "1"}) + "\n")
    (folder / "rewards.py").write_text("def score(response, gold):\n    return 0.4 if int(gold) % 2 else 0.1\n")
    return [
        *("--data.test", str(data), str(folder / "only_long.jsonl"), "--data.max_prompt_tokens=60"),
        *("--reward.function", f"{folder / 'rewards.py'}:score", "--rollout.avg", "long", "8"),
    ]


def test_questions_that_are_too_long_are_wrong_and_rewards_that_do_not_fit_are_named(tmp_path):
    options = rewarded_by_gold(tmp_path)
    done = command(tmp_path / "strict", *options)
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    assert "mixed: 2 rows have prompts of more than 60 tokens and count as wrong" in printed
    assert (
        "no answer is a success: the rewards of 12 answers lie between 0.1 and 0.4, and reward.success is 1" in printed
    )
    done = command(tmp_path / "fitting", *options, "--reward.success=0.4")
    assert done.returncode == 0, done.stderr
    assert "is a success" not in done.stdout
    result = json.loads((tmp_path / "fitting" / "scores.json").read_text())
    found = {n: (s["questions"], s["left_out"], s["answers"], s["pass_rate"]) for n, s in result["sources"].items()}
    # Of the four questions of `mixed` three were asked, and the answers to one of them are right.
    assert found == {"mixed": (4, 1, 16, 0.25), "long": (2, 2, 16, 0.0), "only_long": (1, 1, 2, 0.0)}
    assert result["average"] == pytest.approx(0.25 / 3)
    assert result["sources"]["mixed"]["pass_at"] == {"2": 0.25, "4": 0.25}
    assert result["sources"]["long"]["pass_at"] == {"2": 0.0, "4": 0.0, "8": 0.0}
    assert len((tmp_path / "fitting" / "answers.jsonl").read_text().splitlines()) == 12


def test_an_evaluation_in_which_nothing_fits_is_refused(tmp_path):
    rewarded_by_gold(tmp_path)
    refused = command(tmp_path / "new", "--data.test", str(tmp_path / "only_long.jsonl"), "--data.max_prompt_tokens=60")
    assert refused.returncode == 2
    assert "all 1 prompts are longer than max_prompt_tokens = 60" in refused.stderr


def test_what_is_written_down_and_graded_ends_before_a_stop_string(tmp_path):
    of_run = []
    for name, more in (("free", ()), ("stopped", ("--rollout.stop", "</think>", "never"))):
        done = command(tmp_path / name, *more)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / name / "answers.jsonl").read_text().splitlines()
        of_run.append([json.loads(line) for line in lines])
    free, stopped = of_run
    texts = [record["response"] for record in free]
    assert [record["response"] for record in stopped] == [text.partition("</think>")[0] for text in texts]
    assert [record["finished"] for record in stopped] == [
        record["finished"] or "</think>" in record["response"] for record in free
    ]
    assert sum(record["reward"] for record in stopped) < sum(record["reward"] for record in free)


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
    missing = command(tmp_path / "new", "--data.test", "missing.jsonl")
    assert missing.returncode == 2
    assert "error: " in missing.stderr
    assert "missing.jsonl" in missing.stderr
