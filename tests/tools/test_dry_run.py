"""`exgrpo train --dry-run`: configuration, plan, memory by part and FLOPs, and nothing is started."""

from io import StringIO

import pytest
import yaml
from rich.console import Console

from exgrpo.tools import costs, dry_run, launch
from exgrpo.tools.costs import GIB, cpu_memory, step_tflops
from exgrpo.train.config.recipe import load_recipe, parse_args, to_yaml
from exgrpo.train.run.memory import MOMENTS, gpu_memory, peak
from tests.train.config.test_recipes import FOLDER
from tests.train.shapes import PUBLISHED, SMALL, recipe


@pytest.fixture
def dry(monkeypatch, tmp_path):
    """Does a dry run on CPUs, and returns what it prints."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(launch, "_start", lambda *_: pytest.fail("started"))

    def start(*arguments):
        printed = StringIO()
        monkeypatch.setattr(launch, "Console", lambda: Console(file=printed, width=200))
        assert launch.main(["--dry-run", f"--output.folder={tmp_path}", *arguments]) == 0
        assert list(tmp_path.iterdir()) == []
        return printed.getvalue()

    return start


def test_it_shows_the_configuration_the_plan_memory_and_flops(dry, monkeypatch, tmp_path):
    monkeypatch.setattr(costs, "free_memory", lambda: 16 * GIB)
    given = ["--questions=12", "--steps=7"]
    settings, rest = dry("--processes=2", *given).split("2 processes train ")
    assert yaml.safe_load(settings) == yaml.safe_load(to_yaml(parse_args([*given, f"--output.folder={tmp_path}"])))
    assert "A step has 12 questions with 8 answers each, 96 in all" in rest
    assert "Held-out questions: test (512)" in rest
    assert "on 2 x process" in rest
    assert "16.0 GiB are free" in rest
    for name in ("AdamW moments", "key/value cache", "fused head", "checkpoints", "experience", "update"):
        assert name in rest
    assert "GPU" not in rest


def test_it_says_which_questions_are_asked_again(dry):
    text = dry("--experience.ratio=0", "--experience.repeat=0.25", "--experience.prefix=success")
    assert "Up to 25% of a step's questions are asked again, and answers begin as a stored one." in text


def test_it_plans_for_the_machine_that_is_named(dry):
    text = dry("--machine=H200x8")
    assert "8 processes train " in text
    assert "memory plan: passes of 32768 tokens without activation checkpointing, a cache of 1 GiB" in text
    assert "of 137.0 GiB are taken" in text
    assert "on 8 x GPU" in text


def test_a_model_that_cannot_be_counted_has_no_plan(dry, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "architectures": ["GPT2LMHeadModel"]}')
    text = dry(f"--policy.path={folder}", "--data.train=builtin:arithmetic", "--data.train_limit=8")
    assert "no memory plan, since model 'gpt2' has no intermediate_size" in text


@pytest.mark.parametrize(("gpu", "options"), [("RTX3090", {}), ("RTX5090", {"engine": "vllm", "kv_cache_gib": 3})])
def test_a_7b_model_is_trained_on_one_small_gpu(gpu, options):
    """By the model that is trained; and with more memory by a copy in vLLM, as the recipe says."""
    config = load_recipe(FOLDER / "lora_7b_24gb.yaml")
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update=options)})

    def fits(name):
        usable = costs._usable(dry_run.GPUS[name], 1)
        items = gpu_memory(config, PUBLISHED["7B"](), 1)
        return max(peak(items, moment) for moment in MOMENTS) <= usable

    assert fits(gpu)
    assert fits("RTX4090") == (not options)


def test_gpus_of_this_machine_are_planned_by_the_one_with_least_free_memory(monkeypatch):
    monkeypatch.setattr(costs, "gpus", lambda: 2)
    monkeypatch.setattr(costs.torch.cuda, "mem_get_info", lambda gpu: ((80 - 70 * gpu) * GIB, 80 * GIB))
    assert costs._usable(None, 1) == 76 * GIB  # without the 4 that no tensor gets
    assert costs._usable(None, 2) == costs._usable(None, 8) == 6 * GIB
    assert costs._usable(3.0, 1) == 0


@pytest.mark.parametrize(
    ("rollout", "processes", "copies"),
    [
        ({"engine": "vllm", "sleep_level": 0}, 2, 0),
        ({"engine": "vllm", "sleep_level": 1}, 2, 2),
        ({"engine": "vllm", "sleep_level": 2}, 2, 0),
        ({"engine": "server", "servers": ["http://elsewhere:8000"]}, 2, 0),
        ({"engine": "transformers"}, 2, 2),
        ({"engine": "transformers"}, 1, 0),
    ],
)
def test_engines_that_sleep_keep_their_weights_in_cpu_memory(rollout, processes, copies):
    assert cpu_memory(recipe(rollout=rollout), SMALL, processes)[costs.ASLEEP] == 4 * SMALL.total * copies


def test_flops_of_a_step_are_those_of_all_answers_at_full_length():
    """A prompt is read once for its answers, and the last token of an answer predicts nothing; see `ForwardFlops`."""
    config = recipe(questions=4, rollout={"samples": 3}, optimizer={"passes": 2, "minibatches": 2})
    prompt, answer = 16, 24
    behind = SMALL.decoder_flops(prompt + answer - 1) - SMALL.decoder_flops(prompt)
    forward = 4 * (SMALL.decoder_flops(prompt) + 3 * behind + SMALL.head_flops(1 + 3 * (answer - 1))) / 1e12
    expected = {"generate": forward, "score, at most": forward, "update": 2 * 3 * forward}
    assert step_tflops(config, SMALL) == pytest.approx(expected)
    compared = recipe(questions=4, rollout={"samples": 3}, objective={"kl_coef": 0.1}, lora={"rank": 4})
    expected = {"generate": forward, "score, at most": 2 * forward, "update": 2 * forward}
    assert step_tflops(compared, SMALL) == pytest.approx(expected)
