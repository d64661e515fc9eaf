"""The program as a user starts it: `deepspeed exgrpo/train/main.py`."""

import json
import math
import os
import shutil
import signal

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from exgrpo.train.checkpoint.listing import find
from exgrpo.train.checkpoint.resume import FINISHED
from exgrpo.train.common.durable import claim
from exgrpo.train.common.functions import ASSETS
from exgrpo.train.config.recipe import DEFAULT_RUN, load_recipe
from exgrpo.train.metrics.log_files import read_samples
from tests.programs import wait_for
from tests.train.checkpoint.parts import flip
from tests.train.launch import MAIN, Ranks, completed, launch, launch_by_deepspeed

SMALL = (
    *("--steps=4", "--questions=8", "--rollout.samples=4", "--data.train_limit=40", "--data.test_limit=16"),
    *("--experience.start_pass_rate=0", "--rollout.engine=transformers", "--output.name=small"),
)
SAVED = (*SMALL, "--checkpoint.every=1", "--checkpoint.keep=3", "--evaluation.every=3")


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def continued(folder, *arguments, ranks, vllm=False):
    """A copy of a run of four steps that goes on from its middle."""
    copy = shutil.copytree(folder, folder.with_name("resumed"))
    shutil.rmtree(copy / "checkpoints" / "step_00000004")
    completed(MAIN, f"--resume={copy}", *arguments, ranks=ranks, vllm=vllm)
    return copy


def untimed(folder):
    """Records without what is measured in time."""
    return [
        {key: value for key, value in record.items() if "second" not in key and not key.startswith("mfu")}
        for record in records(folder)
    ]


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    # By its launcher each rank imports everything anew: half a minute of a processor.
    start = launch_by_deepspeed if request.param == 2 and request.config.getoption("--long") else launch
    done = completed(MAIN, *SAVED, f"--output.folder={folder}", ranks=request.param, by=start)
    assert "gemm_4bit_forward" not in done.stdout + done.stderr
    return folder / "small", done.stdout


two_ranks = pytest.mark.parametrize("run", [2], ids=["2 ranks"], indirect=True)


def test_the_console_tells_the_story(run):
    folder, printed = run
    assert "rollout engine and trainer agree" in printed
    assert "TFLOP/s here; mfu is the share of that rate that training reaches" in printed
    assert printed.count("held-out Pass@1 after") == 3
    assert "step 4  reward" in printed
    for column in ("Pass@1", "entropy", "replayed", "buffer", "retired", "tokens/s"):
        assert column in printed
    assert "held-out Pass@1: before" in printed
    assert f"results in {folder}" in printed
    assert "1 thread in each process: OMP_NUM_THREADS\n" in printed


def test_metrics_have_every_step_and_replay_is_active(run):
    folder, _ = run
    steps = [record for record in records(folder) if "reward" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert steps[0]["replayed"] == 0
    assert steps[-1]["replayed"] > 0
    assert all(record["replayed"] <= 4 for record in steps)
    for record in steps:
        assert record["groups"] == 8
        assert record["skipped_updates"] == 0
        assert all(math.isfinite(record[key]) for key in ("loss", "grad_norm", "entropy", "seconds"))
        for phase in ("generate", "score", "update"):
            assert record[f"tokens_per_second/{phase}"] > 0
            assert record[f"mfu/{phase}"] > 0
        assert record["mfu"] > 0
        assert record["matrix_flops_per_second"] == steps[0]["matrix_flops_per_second"] > 0
        assert record["buffer_questions"] == sum(record[f"bucket/{k}"] for k in (1, 2, 3))
        # Behaviour log-probs come from the policy before the update: the first step's first ratios are 1.
        assert record["fresh_ratio"] == pytest.approx(1, abs=0.05)


def test_results_can_be_used(run):
    folder, _ = run
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    trained, start = model.state_dict(), AutoModelForCausalLM.from_pretrained(ASSETS / "arithmetic").state_dict()
    assert set(trained) == set(start)
    assert not any((trained[name] == start[name]).all() for name in start)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert model.config.vocab_size >= len(tokenizer)
    assert load_recipe(folder / "config.yaml").questions == 8
    samples = list(read_samples(folder / "samples.jsonl"))
    assert {sample.step for sample in samples} == {1, 2, 3, 4}
    answers = [answer for sample in samples for answer in sample.answers]
    replayed = [answer for answer in answers if answer.replayed_from is not None]
    assert all(answer.entropy is not None and answer.entropy > 0 for answer in replayed)
    assert 0 < len(replayed) < len(answers)
    assert not any("<|end|>" in text for answer in answers for _, text in answer.parts)
    assert list((folder / "tensorboard").iterdir())
    assert "Plotly.newPlot" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    "run", [pytest.param(1, id="1 rank"), pytest.param(2, id="2 ranks", marks=pytest.mark.long)], indirect=True
)
def test_the_same_seed_gives_the_same_run(run, request):
    folder, _ = run
    ranks = int(request.node.callspec.id[0])
    completed(MAIN, *SAVED, f"--output.folder={folder.parent}", "--output.name=again", ranks=ranks)
    again = folder.with_name("again")
    assert untimed(again) == untimed(folder)
    assert (again / "samples.jsonl").read_text() == (folder / "samples.jsonl").read_text()


def test_rewards_that_do_not_fit_and_held_out_questions_that_are_too_long_are_told(tmp_path):
    (tmp_path / "rewards.py").write_text("def score(response, gold):\n    return 0.9 if gold[-1] in '13579' else 0.1\n")
    rows = [{"question": "1 + 1", "answer": "2"}, {"question": "1 + " * 40 + "1", "answer": "41"}]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = (f"--reward.function={tmp_path / 'rewards.py'}:score", f"--data.test={tmp_path / 'held_out.jsonl'}")
    options = ("--steps=1", "--rollout.max_tokens=4", f"--output.folder={tmp_path / 'runs'}")
    done = completed(MAIN, *SMALL, *own, *options)
    printed = " ".join(done.stdout.split())
    assert "no answer is a success: the rewards of 32 answers lie between 0.1 and 0.9" in printed
    assert "on 2 questions, 1 of them over-long and so wrong" in printed
    test = [record for record in records(tmp_path / "runs" / "small") if "test/pass_rate" in record]
    assert [record["test/held_out"] for record in test] == [0.0, 0.0]


def test_sources_are_mixed_by_weight_and_each_is_graded_by_its_own_reward(tmp_path):
    """All answers end before "</think>": the task's reward, math, is 0 then, and the file's, the default, is not."""
    rows = [("What is 1 + 1?", "2")] * 18 + [("2 [/b]?", "2"), ("2 [/b]?", "3")]
    lines = [json.dumps({"question": question, "final": answer}) for question, answer in rows]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    sources = ["builtin:arithmetic", str(tmp_path / "mine.jsonl")]
    done = completed(
        MAIN,
        *(*SMALL, f"--recipe={DEFAULT_RUN}", "--rollout.stop", "</think>", "--preflight=warn"),
        *("--steps=2", "--questions=16", "--data.train", *sources, "--data.train_weights", "1", "3"),
        *("--data.test", *sources, "--data.columns", "answer", "final"),
        *("--experience.ratio=0", "--evaluation.samples=2"),
        f"--output.folder={tmp_path / 'runs'}",
    )
    printed = " ".join(done.stdout.split())
    assert f"60 rows, 43 questions from {', '.join(sources)}" in printed
    assert printed.count("1 question has different answers in different rows, such as '2 [/b]?' of 'mine': '2'") == 1
    training = [record for record in records(tmp_path / "runs" / "small") if "reward" in record]
    held_out = [record for record in records(tmp_path / "runs" / "small") if "test/pass_rate" in record]
    for source, some in (("arithmetic", False), ("mine", True)):
        assert any(record[f"reward/{source}"] > 0 for record in training) == some
        assert any(record[f"test/{source}"] > 0 for record in held_out) == some
    for record in held_out:
        assert record["distinct_at/2"] >= record["pass_at/2"] >= record["test/pass_rate"]
        assert {"distinct_at/2/error", "pass_at/2/error"} <= record.keys()


@pytest.mark.parametrize("run", [1], ids=["1 rank"], indirect=True)
def test_a_run_in_use_is_not_continued_by_another_process(run):
    folder, _ = run
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "in_use_by"}
    with claim(folder):
        done = launch(MAIN, f"--resume={folder}", "--steps=5")
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"{folder} is in use by another process (process {os.getpid()} on" in error
    assert {path: path.stat().st_mtime_ns for path in before} == before


DECISIONS = ("step", "reward", "pass_rate", "generated_tokens", "replayed", "buffer_trajectories", "retired")
ROUNDED = {"entropy": 1e-4, "loss": 1e-3, "grad_norm": 1e-3}
"""Of these the order of sums is visible, as between one and two processes that are not interrupted."""


def assert_same_but_for_rounding(records, rights):
    for mine, right in zip(records, rights, strict=True):
        assert {key: mine.get(key) for key in DECISIONS} == {key: right.get(key) for key in DECISIONS}
        for key, bound in ROUNDED.items():
            if right.get(key) is None:  # an evaluation, or a step without an update
                assert mine.get(key) is None
            else:
                assert mine[key] == pytest.approx(right[key], rel=bound, abs=1e-6), (key, right["step"])


@two_ranks
def test_a_killed_run_goes_on_with_another_number_of_processes(tmp_path, run):
    """With more, which are killed behind a checkpoint, and then with fewer."""
    whole, _ = run
    copy = shutil.copytree(whole, tmp_path / "small")
    for step in (3, 4):
        shutil.rmtree(copy / "checkpoints" / f"step_{step:08}")
    running = Ranks(MAIN, f"--resume={copy}", ranks=3)
    wait_for(lambda: not running.running() or find(copy)[0].step > 2)
    running.ranks[-1].send(signal.SIGKILL)
    running.finish()
    assert find(copy)[0].step == 3
    done = completed(MAIN, f"--resume={copy}")
    assert "going on with" in done.stdout
    assert_same_but_for_rounding(untimed(copy), untimed(whole))


@two_ranks
def test_a_run_of_two_ranks_with_damaged_files_gives_the_same_metrics(tmp_path, run):
    whole, _ = run
    copy = shutil.copytree(whole, tmp_path / "damaged")
    (copy / FINISHED).unlink()
    shard = sorted((copy / "checkpoints" / "step_00000004" / "policy").glob("rank_00001_*.safetensors"))[0]
    flip(shard)
    (copy / "config.yaml").write_text("")
    done = completed(MAIN, f"--resume={copy}", ranks=2)
    assert f"going on with {copy} after step 3" in done.stdout
    assert done.stderr.count(f"{shard} is damaged") == 1
    assert done.stderr.count(f"{copy / 'config.yaml'} is empty") == 1
    assert untimed(copy) == untimed(whole)
    assert (copy / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    config = (whole / "config.yaml").read_text().replace("resume: null", f"resume: {copy}")
    assert (copy / "config.yaml").read_text() == config
    assert [found.step for found in find(copy)] == [4, 3, 2]


@two_ranks
def test_the_last_checkpoint_has_the_last_evaluation(run):
    """A run that goes on with more steps keeps it in its log, and knows which model is the best one."""
    whole, _ = run
    progress = find(whole)[0].manifest.progress
    assert progress["evaluations"]["latest"]["step"] == 4
    assert progress["log"]["metrics"] == (whole / "metrics.jsonl").stat().st_size
