"""The command: its answers, its advice, its errors."""

import dataclasses
import json

import huggingface_hub.constants
import pytest

from exgrpo.tools.estimate import program
from exgrpo.tools.estimate.parts import GIB, Hardware, data_sheet_of
from exgrpo.tools.estimate.program import Options, hardware_of, read_shape
from exgrpo.tools.estimate.tables import estimate
from exgrpo.train.config.recipe import load_recipe
from tests.tools.estimate.shapes import ASSUMED, HARDWARE
from tests.train.config.test_recipes import FOLDER, RECIPES


def run(capsys, monkeypatch, *arguments) -> tuple[int, str, str]:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    try:
        status = program.main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    out = capsys.readouterr()
    return status, out.out, out.err


def test_the_default_run_fits(capsys, monkeypatch):
    status, out, _ = run(capsys, monkeypatch, "--gpus", "1", "--gpu", "rtx 4090", "--steps", "7")
    assert status == 0
    assert "It fits" in out
    assert "7 steps" in out
    assert "memory plan: passes of 32768 tokens without activation checkpointing, a cache of 1 GiB for " in out
    assert "nothing here was measured" in out
    for name in ("AdamW moments", "key/value cache", "fused head", "checkpoints", "experience buffer", "Utilisation"):
        assert name in out


def test_a_recipe_that_does_not_fit_says_what_to_change(capsys, monkeypatch):
    arguments = ("--recipe", str(FOLDER / "paper.yaml"))
    small = ("--gpus", "2", "--gpu", "A100-40", "--rollout.kv_cache_gib", "1")
    status, out, _ = run(capsys, monkeypatch, *arguments, *small)
    assert status == 0
    assert "It does not fit" in out
    assert "It fits with --distributed.offload_optimizer True" in out
    status, out, _ = run(capsys, monkeypatch, *arguments, "--gpus", "8", "--gpu", "H100")
    assert "It fits" in out
    assert "7,615,616,512 parameters" in out


@pytest.mark.parametrize(
    ("gpu", "options"),
    [("RTX3090", []), ("RTX5090", ["--rollout.engine", "vllm", "--rollout.kv_cache_gib", "3"])],
)
def test_a_7b_model_is_trained_on_one_small_gpu(capsys, monkeypatch, gpu, options):
    """By the model that is trained; and with more memory by a copy in vLLM, as the recipe says."""
    recipe = ("--recipe", str(FOLDER / "lora_7b_24gb.yaml"), "--gpus", "1")
    _, out, _ = run(capsys, monkeypatch, *recipe, "--gpu", gpu, *options)
    assert "7,615,616,512 parameters" in out
    assert "It fits" in out
    if options:
        assert "It does not fit" in run(capsys, monkeypatch, *recipe, "--gpu", "RTX4090", *options)[1]


def test_own_figures_replace_the_data_sheet():
    options = Options(gpu="mine", memory_gib=10, tflops=5, bandwidth=100, reserve_gib=1, gpus=3)
    assert hardware_of(options, "bf16") == Hardware(3, 9 * 2**30, 5e12, 100e9)
    options = Options(gpu="A100-80", bandwidth=100, reserve_gib=0)
    assert hardware_of(options, "fp32") == Hardware(8, 80 * 2**30, 19.5e12, 100e9)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--gpu", "H1000"], ["'H1000' is not one of A100-40", "--memory_gib, --tflops and --bandwidth"]),
        (["--gpus", "0"], ["gpus", "greater than or equal to 1"]),
        (["--rollout.max_tokns", "5"], ["unknown option --rollout.max_tokns; did you mean --rollout.max_tokens?"]),
        (["--recipe", "missing.yaml"], ["missing.yaml: no such recipe"]),
        (["--policy.path", "./missing"], ["missing holds no config.json"]),
        (["--policy.path", "builtin:missing"], ["no builtin model 'builtin:missing'", "arithmetic"]),
        (["--policy.path", "nobody/no-such-model"], ["'nobody/no-such-model' cannot be loaded"]),
        (["--response-tokens", "81"], ["response_tokens: 81 exceeds rollout.max_tokens (80)"]),
        (["--prompt-tokens", "65"], ["prompt_tokens: 65 exceeds data.max_prompt_tokens (64)"]),
    ],
)
def test_a_mistake_ends_with_one_clear_error(arguments, named, capsys, monkeypatch):
    status, out, err = run(capsys, monkeypatch, *arguments)
    assert status == 2
    assert not out
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for part in named:
        assert part in err


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ("no json", "cannot be loaded"),
        ({"model_type": "unheard of"}, "cannot be loaded"),
        ({"model_type": "gpt2"}, "'gpt2' has no intermediate_size"),
        ({"model_type": "mixtral"}, "'mixtral' is a mixture of experts"),
    ],
)
def test_a_configuration_that_cannot_be_counted_is_refused(values, named, tmp_path):
    (tmp_path / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    with pytest.raises(ValueError, match=named):
        read_shape(str(tmp_path))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_estimated(name, monkeypatch):
    """Neither the models that it names nor the hub are needed."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    config = load_recipe(FOLDER / name)
    found = estimate(config, read_shape(config.policy.path), HARDWARE, dataclasses.replace(ASSUMED, prompt_tokens=64))
    assert found.peak > 0
    assert found.seconds > 0
    assert not found.fits  # one gigabyte is too little for any of them


@pytest.mark.parametrize(
    ("name", "multiprocessors", "gib", "known"),
    [
        ("NVIDIA H100 80GB HBM3", 132, 79.2, "H100"),
        ("NVIDIA H100 PCIe", 114, 79.2, None),
        ("NVIDIA A100-SXM4-40GB", 108, 39.4, "A100-40"),
        ("NVIDIA A100-SXM4-80GB", 108, 79.2, "A100-80"),
        ("NVIDIA GeForce RTX 4090", 128, 23.6, "RTX4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76, 15.9, None),
        ("NVIDIA L4", 58, 22, None),
    ],
)
def test_a_gpu_has_the_data_sheet_of_its_own_board(name, multiprocessors, gib, known):
    """Names, multiprocessors and memory as drivers give them."""
    assert data_sheet_of(name, multiprocessors, int(gib * GIB)) == known
