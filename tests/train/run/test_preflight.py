"""Before training: answers that cannot earn a reward stop the run, all others do not."""

import dataclasses
import re
import shutil

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from exgrpo.train.common.errors import RewardError
from exgrpo.train.common.functions import ASSETS
from exgrpo.train.config.recipe import DEFAULT_RUN, load_recipe
from exgrpo.train.reward.pool import Grader
from exgrpo.train.rollout.engine import Finished, Sampling
from exgrpo.train.run.preflight import preflight
from tests.train.configs import configured
from tests.train.fakes import ScriptedEngine, ScriptedGrader, question_set, rollout_worker
from tests.train.launch import MAIN, completed, launch
from tests.train.policy.test_ends import END, PAD, with_another_end
from tests.train.run.test_run import SMALL, records

REWARD = """
def score(response, gold):
    return 0.0

def score_form(response, gold):
    return float("boxed" in response)

def formless(response, gold):
    return 0.0
"""


BROKEN = """
import asyncio, json, os, time

def raises(response, gold):
    return json.loads("{")["score"]

def slow(response, gold):
    time.sleep(60)

def dies(response, gold):
    os._exit(3)

async def refused(response, gold):
    raise ConnectionRefusedError("no judge")

def some(response, gold):
    return 1.0 if response[2] in "02468" else nothing

def several(response, gold):
    if response[2] in "02468":
        raise KeyError(gold)
    time.sleep(60)

def text(response, gold):
    return "1.0"
"""


class CuttingEngine(ScriptedEngine):
    """Cuts all answers but those to the first `whole` questions."""

    whole = 0

    def generate(self, requests):
        for answer in super().generate(requests):
            rollout = dataclasses.replace(answer.rollout, finished=answer.request < self.whole)
            yield Finished(answer.request, answer.sample, rollout)


def result(tmp_path, *, rewards=None, form=None, whole=40, count=40, name="score", sources=(), end=None):
    """A preflight on scripted answers: rewards and texts by the number of the question."""
    (tmp_path / "reward.py").write_text(REWARD)
    engine = CuttingEngine(dict.fromkeys(range(count), 0.0))
    engine.whole = whole
    asked = rollout_worker(engine)
    rewards = rewards or {}
    asked.grader = ScriptedGrader(lambda text: rewards.get(int(text.split()[0]) - 100, 0.0))
    if form:
        asked.decode = lambda ids: f"{ids[0]} " + ("boxed" if ids[0] - 100 in form else "plain")
    config = configured({"reward": {"function": f"{tmp_path}/reward.py:{name}"}, "data": {"sources": sources}})
    return preflight(config, asked, question_set(count, config.reward.function).questions, Sampling(max_tokens=8), end)


def test_it_counts_what_became_of_one_answer_to_each_of_the_first_questions(tmp_path):
    found, problem = result(tmp_path, rewards={0: 1.0, 5: 1.0, 39: 1.0}, form={0, 1, 5, 39}, whole=30)
    assert found == "preflight: of 32 answers 30 are finished, 3 have the form that the reward needs, 2 are right"
    assert problem is None


def test_fewer_questions_are_no_problem_and_a_reward_without_a_form_is_not_judged_by_one(tmp_path):
    found, problem = result(tmp_path, count=3, name="formless")
    assert found == "preflight: of 3 answers 3 are finished, 0 are right"
    assert problem is None, "hard questions may need more answers than one"
    _, problem = result(tmp_path, rewards={3: 0.2}, form={-1}, whole=0)
    assert problem is None, "an answer has earned something"


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"whole": 0, "form": {0}}, r"all 32 answers were cut at .* \(80\), .*raise rollout.max_tokens"),
        ({"form": {-1}}, r"none of 32 answers has the form .*reward.py:score needs: ask for it in data.prompt_format"),
    ],
)
def test_what_cannot_earn_a_reward_is_named_with_the_remedy(tmp_path, options, cause):
    _, problem = result(tmp_path, **options)
    assert re.search(cause, problem)
    assert re.search(r"One answer ends: '100 \w+'", problem)


@pytest.mark.parametrize("own", [False, True])
def test_an_end_of_the_template_that_ends_no_answer_is_named_with_the_remedy(tmp_path, own):
    sources = [{"source": "builtin:arithmetic", "stop": ["\n"]}] if own else []
    remedy = (
        "the chat template ends an answer with 'boxed', which is no end of sequence of this model: add --rollout.stop "
        f"boxed{', and name it in each stop of data.sources' if own else ''}"
    )
    options = {"form": {0, 5}, "end": "boxed", "sources": sources}
    found, problem = result(tmp_path, whole=0, **options)
    assert found.endswith(f"0 are right; 2 continue after 'boxed': {remedy}")
    assert problem.startswith(f"none of 32 answers has ended, and none is right: {remedy}. One answer ends: ")
    assert "max_tokens" not in problem
    found, problem = result(tmp_path, whole=1, **options)
    assert found.endswith(f"2 continue after 'boxed': {remedy}")
    assert problem is None, "one has ended"
    found, _ = result(tmp_path, form={-1}, end="boxed")
    assert "behind" not in found, "the model does not write it"


def test_a_run_whose_template_has_another_end_than_its_model_stops_and_trains_with_it_as_a_stop(tmp_path):
    """As the models that end an answer with <|im_end|>, and whose end of sequence is <|endoftext|>."""
    model = with_another_end(shutil.copytree(ASSETS / "arithmetic", tmp_path / "model"))
    (tmp_path / "reward.py").write_text(REWARD)
    arguments = (*SMALL, "--steps=1", "--rollout.max_tokens=40", f"--output.folder={tmp_path}")
    arguments += (f"--recipe={DEFAULT_RUN}", f"--policy.path={model}")
    done = launch(MAIN, *arguments, f"--reward.function={tmp_path}/reward.py:formless")
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert "the chat template ends an answer with '<|end|>'" in error
    assert "add --rollout.stop '<|end|>'" in error
    completed(MAIN, *arguments, "--output.name=stopped", "--rollout.stop=<|end|>")
    folder = tmp_path / "stopped" / "model"
    trained = AutoModelForCausalLM.from_pretrained(folder)
    assert trained.generation_config.eos_token_id == [PAD, END]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": "What is 12 + 34?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    (answer,) = trained.generate(**prompt, max_new_tokens=40, do_sample=False)
    assert answer[-1] == END
    assert (answer == END).sum() == 1


@pytest.mark.parametrize("right", [0, 3])
def test_right_values_in_another_form_than_the_one_that_is_read_are_told(tmp_path, right):
    asked = rollout_worker(ScriptedEngine(dict.fromkeys(range(40), 0.0)))
    texts = {100 + i: "<answer>gold</answer>" for i in range(7)} | {107 + i: "\\boxed{gold}" for i in range(right)}
    asked.decode = lambda ids: texts.get(ids[0], "\\boxed{silver}")
    config = configured({"reward": {"function": "math_no_think", "form": "boxed"}})
    questions = question_set(40, config.reward.function).questions
    with Grader.of(["math_no_think"], config.reward) as asked.grader:
        found, problem = preflight(config, asked, questions, Sampling(max_tokens=8))
    told = "7 of 32 answers hold the right value in <answer> tags, .* reward.form=tags"
    assert re.search(f"25 have the form that the reward needs, {right} are right; {told}", found)
    assert (problem is None) if right else re.search(f"none of 32 answers earns a reward, but {told}", problem)


def graded(tmp_path, *names):
    """A preflight on scripted answers to four questions, with rewards of `BROKEN` in turn, which processes grade."""
    (tmp_path / "mine.py").write_text(BROKEN)
    rewards = [f"{tmp_path}/mine.py:{name}" for name in names]
    questions = [dataclasses.replace(one, reward=rewards[one.index % len(names)]) for one in question_set(4).questions]
    config = configured({"reward": {"function": rewards[0], "time_limit": 0.5}})
    asked = rollout_worker(ScriptedEngine(dict.fromkeys(range(4), 0.0)))
    with Grader.of(rewards, config.reward) as asked.grader:
        return *preflight(config, asked, questions, Sampling(max_tokens=8)), asked


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("raises", r"JSONDecodeError: Expecting property name .* \(mine.py, line 5\). Fix the function"),
        ("slow", r"it took longer than .* \(0.5 s\). Make the function faster, or raise --reward.time_l"),
        ("dies", r"the grading process died \(exit code 3\). Fix"),
        ("refused", r"ConnectionRefusedError: no judge \(mine.py, line 14\). Fix"),
        ("several", r"it took longer .* \(0.5 s\); on 2 of them KeyError: 'gold' \(mine.py, line 21\). Make"),
    ],
)
def test_a_reward_that_never_works_is_told_with_its_error_the_answer_and_the_remedy(tmp_path, name, cause):
    found, problem, asked = graded(tmp_path, name)
    assert re.search(rf"the reward .*mine.py:{name} failed on all 4 answers: {cause}", problem)
    assert re.search(r"to 'question (\d)' with the right answer 'gold', ends: '10\1 8 ", problem)
    assert "\n" not in problem
    assert found == "preflight: of 4 answers 4 are finished, 0 are right, on 4 the reward failed"
    assert len(asked.news()) == (2 if name == "several" else 1)
    assert not asked.news(), "each kind is told once"


def test_a_reward_that_is_no_number_is_an_error_with_the_answer(tmp_path):
    with pytest.raises(RewardError, match=r"returned '1.0' \(str\) .*Fix the function.* ends: '10"):
        graded(tmp_path, "text")


def test_a_reward_that_fails_at_times_is_counted_and_told(tmp_path):
    found, problem, asked = graded(tmp_path, "some")
    assert found == "preflight: of 4 answers 4 are finished, 2 are right, on 2 the reward failed"
    assert problem is None
    (news,) = asked.news()
    assert re.search(r"some' failed on an answer to 'question [13]', .*: NameError: .* \(mine.py, line 17\)", news)


def test_one_of_several_rewards_that_never_works_is_enough(tmp_path):
    """Questions of one source are right, those of the other one cannot be graded."""
    found, problem, _ = graded(tmp_path, "some", "raises")
    assert "2 are right" in found
    assert "mine.py:raises failed on all 2 answers: JSONDecodeError" in problem


def test_a_run_whose_reward_fails_while_it_trains_stops_with_a_checkpoint_and_goes_on(tmp_path):
    """With another number of threads, and with the engine that it has chosen."""
    reward = tmp_path / "mine.py"
    reward.write_text("def score(response, gold):\n    raise KeyError('[/b]')\n")
    arguments = (*SMALL, "--preflight=warn", f"--reward.function={reward}:score", f"--output.folder={tmp_path}/runs")
    arguments += ("--rollout.engine=auto", "--distributed.threads=2")
    run = tmp_path / "runs" / "small"
    done = launch(MAIN, *arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    printed, (error,) = " ".join(done.stdout.split()), done.stderr.strip().splitlines()[-1:]
    assert printed.count("KeyError: '[/b]' (mine.py, line 2)") == 1, "the preflight has told it"
    assert printed.count("failed 100%") == 3
    assert "KeyError: '[/b]' (mine.py, line 2). Fix the function, or tolerate more by --reward.max_failed" in error
    assert error.endswith(f" --resume {run}")
    assert "Traceback" not in done.stderr
    assert "2 threads in each process: distributed.threads " in printed
    assert f"rollouts by {load_recipe(run / 'config.yaml').rollout.engine} " in printed
    reward.write_text("def score(response, gold):\n    return float(gold in response)\n")
    done = completed(MAIN, f"--resume={run}", "--distributed.threads=1")
    assert "1 thread in each process: distributed.threads; the run began with 2" in done.stdout
    steps = records(run)
    failed = [record["reward_failed_fraction"] for record in steps if record["kind"] == "training"]
    assert failed == [1, 1, 1, 0]
    assert "failed 0%" not in done.stdout
