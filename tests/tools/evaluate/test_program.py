"""The command as a user starts it: finished, interrupted, refused."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from exgrpo.tools.evaluate import __main__ as program
from exgrpo.tools.evaluate.evaluation import engine_settings, fitted
from exgrpo.tools.evaluate.options import parse_options
from exgrpo.train.common import distributed, process
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.functions import ASSETS
from exgrpo.train.config.recipe import DEFAULT_RUN, to_yaml
from exgrpo.train.policy.tokenizer import load_pretrained
from tests.train.configs import configured
from tests.train.fakes import question_set
from tests.train.files import write_rows
from tests.train.launch import ROOT, launch_module
from tests.train.rollout.vllm.installed import real


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "missing: MODEL, --data.test"),
        (["m", "--data.test", "d", "--max-tokens=5"], "did you mean --rollout.max_tokens?"),
        (["m", "--data.test=d", "--rollout.top-p=2"], "rollout.top_p: "),
        (["m", "--data.test=d", "--recipe=key.yaml"], "'rollout.temperatur'; did you mean 'rollout.temperature'?"),
        (["m", "--data.test=d", "--recipe=avg.yaml"], "rollout.avg.aime: "),
    ],
)
def test_wrong_options_are_named_in_a_line(tmp_path, monkeypatch, words, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key.yaml").write_text("rollout.temperatur: 1")
    (tmp_path / "avg.yaml").write_text("rollout.avg: {aime: 0}")
    with pytest.raises(ConfigError, match=re.escape(named)) as error:
        parse_options(words)
    assert "\n" not in str(error.value)


def arguments(folder, *more):
    asked = ["builtin:arithmetic", "--data.test", "builtin:arithmetic", "--data.test_limit=20"]
    drawn = ["--rollout.samples=2", "--chunk=6"]
    # As the default run asks its model, which knows no other prompts.
    fixed = [f"--recipe={DEFAULT_RUN}", "--rollout.engine=transformers", f"--output.folder={folder}"]
    return [*asked, *drawn, *fixed, *map(str, more)]


@pytest.fixture
def command(capsys, monkeypatch):
    """The program in this process, which ends with a status; gives what it prints and its errors."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(process, "stop_on_signals", lambda: None)  # the signals of this process are pytest's
    monkeypatch.setattr(distributed, "start", lambda **_: distributed.ALONE)  # a group would stay in this process

    def run(folder, *more, status=0):
        ended, printed = program.main(arguments(folder, *more)), capsys.readouterr()
        assert ended == status, printed.err
        return SimpleNamespace(stdout=printed.out, stderr=printed.err)

    return run


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """The folder of an evaluation in a process of its own."""
    folder = tmp_path_factory.mktemp("evaluated")
    done = launch_module("exgrpo.tools.evaluate", *arguments(folder))
    assert done.returncode == 0, done.stderr
    assert "arithmetic" in done.stdout
    return folder


def records(folder):
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def average(folder):
    return json.loads((folder / "scores.json").read_text())["average"]


def test_the_recipe_of_a_run_asks_and_grades_as_the_run_does(tmp_path, evaluated):
    """The default run's model solves about four in ten of its problems asked like that, and none asked otherwise."""
    # Of 40 answers: 0.4, give or take four standard errors of 0.08.
    assert 0.1 < average(evaluated) < 0.75
    config = configured(
        {"policy": {"overrides": {"rope_theta": 5.0}}, "data": {"answer_prefix": "<think>", "max_prompt_tokens": 61}},
        {"reward": {"success": 0.5, "form": "tags", "memory_gib": 8.0, "network": False}},
        {"rollout": {"stop": ("Q:",), "temperature": 0.9}},
        {"evaluation": {"temperature": 0.7, "top_p": 0.95, "samples": 3}},
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    options = parse_options(["m", "--data.test=d", "--recipe", str(tmp_path / "config.yaml"), "--rollout.samples=5"])
    data, rollout = options.data, options.rollout
    assert (data.answer_prefix, data.prompt_format, data.max_prompt_tokens) == ("<think>", "{question}", 61)
    assert options.reward == config.reward
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


@pytest.mark.parametrize(
    ("positions", "given", "longest"),
    [(512, [], 512 - 5), (512, ["--rollout.max_tokens=9"], 9), (1 << 15, [], 8192)],  # the paper's, where there is room
)
def test_answers_are_as_long_as_the_model_has_positions_where_no_length_is_asked_for(positions, given, longest):
    pretrained = load_pretrained("builtin:arithmetic", {"max_position_embeddings": positions})
    questions = [
        dataclasses.replace(question, prompt=(1,) * length)
        for question, length in zip(question_set(2).questions, (5, 3), strict=True)
    ]
    options = fitted(parse_options(["builtin:arithmetic", "--data.test=d", *given]), pretrained, questions)
    settings = engine_settings(options, pretrained, questions)
    assert settings.rollout.max_tokens == longest
    assert settings.length <= pretrained.model.positions


def test_adapters_are_evaluated_beside_their_model(tmp_path, command):
    """Such large ones that the model solves nothing any more."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "arithmetic")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["o_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=3.0, generator=torch.Generator().manual_seed(0))
    adapted.save_pretrained(tmp_path / "adapters")
    command(tmp_path / "scores", f"--lora.path={tmp_path / 'adapters'}")
    # Without them 0.4, give or take four standard errors of 0.08.
    assert average(tmp_path / "scores") < 0.08


@real
@pytest.mark.long
def test_the_real_vllm_answers(tmp_path):
    told = arguments(tmp_path, "--rollout.engine=vllm", "--rollout.kv_cache_gib=0.1")
    done = launch_module("exgrpo.tools.evaluate", *told, vllm=True)
    assert done.returncode == 0, done.stderr
    assert "answers by vllm" in done.stdout
    assert len(records(tmp_path)) == 40
    # Solved about as often as by the other engine: half of the problems, give or take four standard errors.
    assert 0.1 < average(tmp_path) < 0.9


def test_an_interrupted_evaluation_ends_like_one_that_was_not(tmp_path, evaluated, command):
    scores, written = (evaluated / "scores.json").read_text(), (evaluated / "answers.jsonl").read_text()
    lines = written.splitlines()
    right = np.mean([record["reward"] for record in records(evaluated)])
    assert json.loads(scores)["sources"]["arithmetic"]["pass_rate"] == pytest.approx(right)
    assert average(evaluated) == pytest.approx(right)
    # Killed while it wrote the third chunk of twelve answers.
    again = shutil.copytree(evaluated, tmp_path / "again")
    (again / "answers.jsonl").write_text("\n".join(lines[:27]) + "\n" + lines[27][:30])
    (again / "scores.json").unlink()
    (again / "options.yaml").write_text((again / "options.yaml").read_text().replace(str(evaluated), str(again)))
    done = command(again, "--distributed.threads=1")  # how it is computed may be otherwise
    assert "2 of 4 chunks done" in done.stdout
    assert (again / "answers.jsonl").read_text() == written
    assert len(lines) == 40
    assert (again / "scores.json").read_text() == scores


def test_an_evaluation_whose_reward_fails_ends_without_scores_and_goes_on(tmp_path, command):
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def score(response, gold):\n    return 1 / (int(gold) - int(gold))\n")
    asked = (tmp_path / "out", f"--reward.function={rewards}:score")
    done = command(*asked, status=1)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: 100% of 12 answers could not be graded: reward '{rewards}:score': ZeroDivision")
    assert "rewards.py, line 2" in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "scores.json").exists()
    rewards.write_text("def score(response, gold):\n    return 1\n")
    assert "0 of 4 chunks done" in command(*asked).stdout
    assert average(tmp_path / "out") == 1


def rewarded_by_gold(folder):
    """Options of an evaluation: two sources in one file and one in another, long questions and rewards of 0.1 and 0.4.

    Each question has two rows. Its answers get 0.4 where its gold answer, 0 to 5, is odd.
    """
    rows = []
    for i, source in enumerate(["mixed"] * 4 + ["long"] * 2):
        text = f"What is {i} + 1?" if i < 3 else "What is " + "1 + " * 90 + f"{i}?"
        row = {"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": str(i)}}
        rows += [{**row, "data_source": source}] * 2
    data = write_rows(folder / "data.jsonl", rows)
    write_rows(folder / "only_long.jsonl", [{"question": "1 + " * 90, "answer": "1"}])
    (folder / "rewards.py").write_text("def score(response, gold):\n    return 0.4 if int(gold) % 2 else 0.1\n")
    return [
        *("--data.test", data, str(folder / "only_long.jsonl"), "--data.max_prompt_tokens=60"),
        *("--reward.function", f"{folder / 'rewards.py'}:score", "--rollout.avg", "long", "8"),
    ]


def test_questions_that_are_too_long_are_wrong_and_rewards_that_do_not_fit_are_named(tmp_path, command):
    options = rewarded_by_gold(tmp_path)
    done = command(tmp_path / "strict", *options)
    printed = " ".join(done.stdout.split())
    assert "mixed: 2 rows have prompts of more than 60 tokens and count as wrong" in printed
    assert "no answer is a success: the rewards of 12 answers lie between 0.1 and 0.4, and reward.success is" in printed
    done = command(tmp_path / "fitting", *options, "--reward.success=0.4")
    assert "is a success" not in done.stdout
    result = json.loads((tmp_path / "fitting" / "scores.json").read_text())
    found = {n: (s["questions"], s["left_out"], s["answers"], s["pass_rate"]) for n, s in result["sources"].items()}
    # Of the four questions of `mixed` three were asked, and the answers to one of them are right.
    assert found == {"mixed": (4, 1, 16, 0.25), "long": (2, 2, 16, 0.0), "only_long": (1, 1, 2, 0.0)}
    assert result["average"] == pytest.approx(0.25 / 3)
    assert result["sources"]["mixed"]["pass_at"] == {"2": 0.25, "4": 0.25}
    assert result["sources"]["long"]["pass_at"] == {"2": 0.0, "4": 0.0, "8": 0.0}
    assert len(records(tmp_path / "fitting")) == 12


def test_gold_answers_that_cannot_be_earned_are_counted_and_stay(tmp_path, command):
    rows = [{"question": f"What is {i} + 1?", "answer": gold} for i, gold in enumerate(["1", None, "proof", "1"])]
    done = command(tmp_path / "of_rows", "--data.test", write_rows(tmp_path / "mine.jsonl", rows))
    assert "2 of 4 gold answers cannot be read or can never be earned" in " ".join(done.stdout.split())
    assert json.loads((tmp_path / "of_rows" / "scores.json").read_text())["sources"]["mine"]["questions"] == 4


def test_what_is_written_down_and_graded_ends_before_a_stop_string(tmp_path, evaluated, command):
    command(tmp_path, "--rollout.stop", "</think>", "never")
    free, stopped = records(evaluated), records(tmp_path)
    texts = [record["response"] for record in free]
    assert [record["response"] for record in stopped] == [text.partition("</think>")[0] for text in texts]
    assert [record["finished"] for record in stopped] == [
        record["finished"] or "</think>" in record["response"] for record in free
    ]
    assert sum(record["reward"] for record in stopped) < sum(record["reward"] for record in free)


@contextmanager
def held(folder):
    """A folder that another process has claimed; gives its number."""
    program = "import sys; from exgrpo.train.common.durable import claim\n"
    program += f"with claim(__import__('pathlib').Path({str(folder)!r})): print('held', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdout.readline() == "held\n"
        yield other.pid


def test_what_cannot_be_is_refused_in_one_line(tmp_path, command):
    (tmp_path / "options.yaml").write_text("model: other\n")
    (tmp_path / "busy").mkdir()
    rewarded_by_gold(tmp_path)
    too_long = ("--data.test", tmp_path / "only_long.jsonl", "--data.max_prompt_tokens=60")
    with held(tmp_path / "busy") as holder:
        for asked, message in (
            ((tmp_path,), f"output: {tmp_path} holds an evaluation with other options"),
            ((tmp_path / "busy",), f"{tmp_path / 'busy'} is in use by another process (process {holder} on "),
            ((tmp_path / "new", *too_long), "all 1 prompts are longer than max_prompt_tokens = 60"),
            ((tmp_path / "new", f"--lora.path={tmp_path}"), f"lora.path: {tmp_path} is no folder with an adapter"),
        ):
            refused = command(*asked, status=2)
            (told,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
            assert message in told
