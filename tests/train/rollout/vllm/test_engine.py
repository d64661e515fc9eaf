"""The real vLLM engine in processes of its own: alone, over two ranks, in training, in evaluation."""

import json
import signal
import sys

import numpy as np
import pytest

from exgrpo.train.checkpoint.listing import find
from tests.programs import ran, wait_for
from tests.train import pieces, tiny
from tests.train.asking import check_ends
from tests.train.launch import MAIN, ROOT, Ranks, completed, environment, launch
from tests.train.rollout.vllm.installed import real
from tests.train.rollout.vllm.worker import COUNTS, EOS, LONG_PROMPT, LONG_SAMPLES, MAX_TOKENS, STOPS
from tests.train.run.test_run import SMALL, records, untimed

pytestmark = real
WORKER = ROOT / "tests" / "train" / "rollout" / "vllm" / "worker.py"


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """What was seen of an engine by its name, on each rank; observed when it is first asked for."""
    found = {}

    def observe(ranks, name):
        folder = tmp_path_factory.mktemp("models")
        # Heads as wide as vLLM's attention needs; two of them share keys and values, which two ranks then repeat.
        tiny.save_model(folder / name, tied=name.startswith("tied"), heads=2, head_width=32)
        arguments = (str(folder), str(ranks), name)
        if ranks == 2 or name == "tied,fp32":
            done = launch(WORKER, *arguments, ranks=ranks, vllm=True)
        else:  # cold: this process is to stay as it was when vLLM is imported, too
            done = ran(sys.executable, WORKER, *arguments, env=environment(), cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads((folder / name / f"seen.{rank}.json").read_text()) for rank in range(ranks)]

    def of(ranks, name):
        if (ranks, name) not in found:
            found[ranks, name] = observe(ranks, name)
        return found[ranks, name]

    return of


@pytest.fixture(
    params=[
        pytest.param((1, "tied,fp32")),
        *(
            pytest.param(engine, marks=pytest.mark.long)
            for engine in ((1, "untied,fp32"), (1, "tied,bf16"), (2, "tied,fp32"))
        ),
    ],
    ids=lambda param: f"{param[1]},{param[0]}",
)
def seen(request, observed):
    """Of an engine by the number of ranks that share it, and the model."""
    ranks, name = request.param
    return {"name": name, "world": ranks, **observed(ranks, name)[0]}


def test_the_process_stays_as_it_was_and_the_seed_decides_whatever_it_draws_meanwhile(seen):
    assert seen["untouched by construction"]
    assert seen["untouched by generate"]
    assert seen["untouched by push"]
    assert seen["world after close"] == seen["world"]
    assert seen["same seed"]
    assert seen["other seed"]
    assert seen["streamed"] == seen["answers"]


def test_answers_come_as_they_are_finished_and_a_call_that_is_closed_leaves_nothing(seen):
    unfinished = seen["unfinished at answers"]
    assert unfinished[0] > sum(COUNTS) / 2
    assert unfinished == sorted(unfinished, reverse=True)
    assert unfinished[-1] == 0
    assert seen["left by a closed call"] == 0


def test_answers_to_one_prompt_share_its_blocks(seen):
    assert seen["prompt tokens"] == [len(LONG_PROMPT) * LONG_SAMPLES + len(tiny.prompt(0)), 0]
    assert seen["cached tokens"] == [32 * (LONG_SAMPLES - 1), 0]


def test_finished_answers_end_with_their_first_eos_and_cut_ones_have_none(seen):
    assert [len(of_prompt) for of_prompt in seen["answers"]] == COUNTS
    everything = [answer for of_prompt in seen["answers"] for answer in of_prompt]
    check_ends(everything, EOS, MAX_TOKENS)


def test_stopped_answers_are_the_scan_of_those_that_run_on(seen):
    pairs = [(pieces.ended(*free, STOPS), tuple(stopped)) for free, stopped in seen["stopped"]]
    assert all(expected == stopped for expected, stopped in pairs)
    at_stop = [length for (response, _, _), _ in pairs if (length := pieces.scan(response, STOPS))]
    assert len(set(at_stop)) > 4
    assert any(not finished for _, (_, finished, _) in pairs)
    assert any(response[-1] in EOS for _, (response, _, _) in pairs)
    assert seen["left by stops"] == 0  # a call ends with its last stop string
    assert seen["steps"] < MAX_TOKENS / 2  # each token of theirs holds a stop string


def test_samples_follow_the_models_distribution(seen):
    expected = 3000 * np.array(seen["first probabilities"])
    statistic = ((np.array(seen["first tokens"]) - expected) ** 2 / expected).sum()
    # Chi-square with V - 1 degrees of freedom has mean V - 1 and standard deviation sqrt(2 (V - 1)).
    assert abs(statistic - (tiny.VOCABULARY - 1)) < 4 * (2 * (tiny.VOCABULARY - 1)) ** 0.5


def test_log_probs_are_those_of_a_full_forward_at_the_temperature_among_the_allowed_tokens(seen):
    # bf16: logits of size 4 are rounded to steps of 2^-6 on either side, and divided by 0.7.
    largest, mean = (0.2, 3e-2) if seen["name"].endswith("bf16") else (1e-4, 1e-5)
    gaps = seen["gap at start"], seen["gap after push"], *seen["gaps of cut answers"]
    assert all(found[0] < largest and found[1] < mean for found in gaps)
    sizes = [size for of_answer in seen["words"] for size in of_answer]
    assert 1 <= min(sizes) < max(sizes) <= 30


def test_begun_answers_go_on_as_the_policy_does_after_prompt_and_beginning(seen):
    largest, mean = (0.2, 3e-2) if seen["name"].endswith("bf16") else (1e-4, 1e-5)
    gaps = *seen["gaps of begun answers"], seen["gap of interrupted answers"]
    assert all(found[0] < largest and found[1] < mean for found in gaps)
    assert max(seen["lengths of begun answers"]) == MAX_TOKENS
    pairs = list(zip(*seen["lengths of interrupted answers"], strict=True))
    assert sum(0 < begun < whole for begun, whole in pairs) > 20


def test_the_check_notices_a_tied_head_that_a_push_did_not_reach(seen):
    assert isinstance(seen["with remedy"], float), seen["with remedy"]
    if seen["name"].startswith("tied"):
        assert "other weights on rank 0: lm_head (tied to model.embed_tokens.weight): " in seen["without remedy"]
    else:
        assert isinstance(seen["without remedy"], float)


def test_weights_are_copied_in_place_where_that_gives_what_a_reload_gives_and_named_where_they_differ(seen):
    assert seen["copied"]
    assert not (seen["copies"] and seen["name"].endswith("fp32"))  # the packed matrices of CPUs are reloaded
    assert seen["differing at start"] == seen["differing after push"] == []
    assert seen["differing"] == ["model.layers.0.input_layernorm.weight", "model.layers.1.self_attn.k_proj.weight"]


@pytest.mark.long
def test_ranks_that_share_an_engine_give_the_same_answers(observed):
    first, second = observed(2, "tied,fp32")
    assert first["ranks"] == second["ranks"] == 2
    assert first["answers"] == second["answers"]
    assert first["first tokens"] == second["first tokens"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_what_it_cannot_do_is_named(observed, ranks):
    for seen in observed(ranks, "tied,fp32"):
        assert "kv_cache_gib (1e-05) does not suit sequences of 52 tokens" in seen["small cache"]
        assert "kv_cache_gib (16384) does not suit" in seen["large cache"]
        assert seen["refusal"] is None


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_changed_configuration_is_computed_with(observed, ranks):
    for seen in observed(ranks, "tied,fp32"):
        assert seen["gap to the edited copy"][0] < 1e-4
        assert seen["gap to the model"][0] > 1e-2


def started(folder, *arguments, ranks=2):
    told = (*SMALL, "--rollout.engine=vllm", f"--output.folder={folder}", *arguments)
    done = completed(MAIN, *told, ranks=ranks, vllm=True)
    assert "rollouts by vllm\n" in done.stdout
    return records(folder / "small")


def check_gaps(story, steps):
    assert all(record["skipped_updates"] == 0 for record in story if "reward" in record)
    gaps = {record["step"]: record["weight_gap"] for record in story if "weight_gap" in record}
    assert list(gaps) == steps
    assert max(gaps.values()) < 1e-5


@pytest.mark.long
def test_a_killed_run_goes_on_to_the_same_metrics(tmp_path):
    """With replies of an environment in its answers."""
    arguments = ("--steps=6", "--rollout.check_every=3", "--checkpoint.every=2", "--output.save_model=False")
    arguments = (*arguments, "--environment.function=calculator")
    whole = started(tmp_path / "whole", *arguments)
    check_gaps(whole, [0, 3, 6])
    steps = [record for record in whole if "reward" in record]
    assert all(record["turns"] > 1 and record["mismatch/mean"] < 1e-5 for record in steps)
    killed = (*SMALL, *arguments, "--rollout.engine=vllm", f"--output.folder={tmp_path / 'killed'}", "--resume=auto")
    running = Ranks(MAIN, *killed, ranks=2, vllm=True)
    wait_for(lambda: not running.running() or find(tmp_path / "killed" / "small"))
    running.ranks[1].send(signal.SIGKILL)
    assert running.finish(120).returncode == -signal.SIGKILL
    done = completed(MAIN, *killed, ranks=2, vllm=True)
    assert "going on with" in done.stdout
    assert untimed(tmp_path / "killed" / "small") == untimed(tmp_path / "whole" / "small")


@pytest.mark.long
def test_two_ranks_train_with_one_engine_that_gets_their_adapters(tmp_path):
    adapters = ("--lora.rank=4", "--optimizer.lr=1e-2", "--rollout.check_every=1")
    arguments = ("--steps=2", "--rollout.tensor_parallel=2", "--output.save_model=False", *adapters)
    check_gaps(started(tmp_path, *arguments), [0, 1, 2])
