"""The choice of a rollout engine, without vLLM."""

import sys
from types import ModuleType, SimpleNamespace
from typing import get_args

import pytest
import torch

from exgrpo.tools.evaluate.evaluation import engine_settings
from exgrpo.tools.evaluate.options import EvaluationOptions
from exgrpo.train.common.distributed import World
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.config.options import RolloutConfig
from exgrpo.train.policy.tokenizer import load_pretrained
from exgrpo.train.rollout.engine import training_settings
from exgrpo.train.rollout.registry import ENGINES, choose_engine
from exgrpo.train.rollout.vllm import availability
from exgrpo.train.rollout.vllm.process import ENVIRONMENT
from tests.train.configs import configured
from tests.train.fakes import one_of_two
from tests.train.launch import launch

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
NEWEST = "0.33.0"
CPU_PLATFORM = SimpleNamespace(device_type="cpu")


def settings(**rollout):
    config = configured({f"rollout.{name}": value for name, value in rollout.items()})
    return training_settings(config, load_pretrained("builtin:arithmetic"))


class Alike(World):
    """One of several ranks that all give the same."""

    def gather(self, value):
        return [value] * self.size


def chosen(asked, device=CPU, size=1):
    return choose_engine(asked, Alike(0, size, device, None))


@pytest.fixture
def installed(monkeypatch):
    """Pretend that a version is installed (None: none), that its import raises something, that it takes no model."""

    def pretend(version, error=None, refusal=None):
        def imported(device):
            if error:
                raise error

        monkeypatch.setattr(availability, "installed_version", lambda device: version)
        monkeypatch.setattr(availability, "import_vllm", imported)
        monkeypatch.setattr(availability, "refusal", lambda *_: refusal)

    return pretend


def test_auto_takes_vllm_on_gpus_where_it_can_and_says_otherwise_why_not(installed):
    installed(NEWEST)
    assert str(chosen(settings(), GPU)) == "vllm"
    assert str(chosen(settings(engine="transformers"), GPU)) == "transformers"
    assert str(chosen(settings(top_p=0.9, top_k=20), GPU)) == "vllm"
    assert str(chosen(settings(top_p=0.9), GPU)).startswith("transformers (rollout.top_p and min_p need rollout.top_k")
    installed(None)
    assert str(chosen(settings(), GPU)).startswith("transformers (vLLM is not installed")


def test_a_rank_that_cannot_have_vllm_keeps_all_from_it(installed):
    pair = one_of_two(lambda _: "vLLM is not installed", GPU)
    installed(NEWEST)
    assert str(choose_engine(settings(), pair)) == "transformers (vLLM is not installed)"
    with pytest.raises(ConfigError, match="^engine: vLLM is not installed; or take the engine transformers"):
        choose_engine(settings(engine="vllm"), pair)


def test_auto_takes_transformers_on_cpus_and_servers_that_are_named(installed):
    installed(NEWEST + "+cpu")
    assert str(chosen(settings())) == "transformers"
    assert str(chosen(settings(engine="vllm"))) == "vllm"
    for engine in ("auto", "server"):
        assert chosen(settings(engine=engine, servers=("http://localhost:8000",))).name == "server"


@pytest.mark.parametrize(
    ("version", "error", "refusal", "device", "message"),
    [
        (None, None, None, CPU, "vLLM is not installed: `make train ENGINE=vllm` .*; or take the engine transformers"),
        (None, None, None, GPU, "vLLM is not installed: `pip install 'exgrpo.vllm.'`.*0.26 is the one for torch 2.11"),
        ("0.25.9", None, None, CPU, "vLLM 0.25.9 is installed, and it must be one from 0.26 to 0.33"),
        (NEWEST, ImportError("no libnuma"), None, CPU, r"cannot be imported \(no libnuma\)"),
        (NEWEST, AttributeError("no op _C::rms_norm"), None, GPU, r"cannot be imported \(no op _C::rms_norm\)"),
        (NEWEST, None, "max_tokens exceed", CPU, "max_tokens exceed"),
        (NEWEST, None, None, torch.device("xpu", 0), "vLLM was not tried on xpu"),
    ],
)
def test_vllm_that_is_asked_for_and_cannot_be_had_is_an_error(installed, version, error, refusal, device, message):
    installed(version, error, refusal)
    with pytest.raises(ConfigError, match=f"engine: .*{message}"):
        chosen(settings(engine="vllm"), device)
    assert chosen(settings(), device).name == "transformers"


def test_vllm_that_breaks_only_where_it_is_used_is_not_taken(monkeypatch):
    def missing(name):
        raise OSError(f"libcudart.so.13, which {name} needs, is not there")

    lazy = ModuleType("vllm")
    lazy.__path__, lazy.__getattr__ = [], missing
    monkeypatch.setitem(sys.modules, "vllm", lazy)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=CPU_PLATFORM))
    monkeypatch.setattr(availability, "installed_version", lambda device: NEWEST)
    for name, value in (ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "ERROR"}).items():  # which the import sets
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"vLLM 0.33.0 cannot be imported \(libcudart.so.13, which LLM needs"):
        chosen(settings(engine="vllm"))


def test_tensor_parallelism_must_divide_and_needs_vllm(installed):
    installed(NEWEST)
    assert chosen(settings(tensor_parallel=2), size=4).name == "vllm"
    with pytest.raises(ConfigError, match=r"tensor_parallel \(2\) does not divide the 3 processes of this run"):
        chosen(settings(tensor_parallel=2), size=3)
    with pytest.raises(ConfigError, match=r"tensor_parallel \(3\) does not divide the 4 attention heads of"):
        chosen(settings(tensor_parallel=3), size=3)
    with pytest.raises(ConfigError, match=r"tensor_parallel \(2\) is for vLLM .* the engine is transformers: take"):
        chosen(settings(tensor_parallel=2, engine="transformers"), size=2)
    installed(None)
    with pytest.raises(ConfigError, match=r"the engine is transformers \(vLLM is not installed"):
        chosen(settings(tensor_parallel=2), size=2)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"engine": "server"}, "engine=server needs rollout.servers"),
        ({"engine": "vllm", "servers": ("http://a:1",)}, "rollout.servers are given and rollout.engine is vllm"),
        ({"servers": ("localhost",)}, "'localhost' is not an address like http://host:8000"),
        ({"servers": ("http://a:1", "http://a:1/")}, "rollout.servers: one of them is named twice"),
        ({"ahead": True, "servers": ("http://a:1",)}, "rollout.ahead needs .* rollout.behaviour=engine"),
        ({"ahead": True, "behaviour": "engine"}, "rollout.ahead needs rollout.servers"),
    ],
)
def test_options_that_exclude_each_other_are_named(rollout, message):
    with pytest.raises(ValueError, match=message):
        configured({"rollout": rollout})


def test_an_evaluation_makes_room_for_its_longest_question():
    class Question:
        prompt = (1,) * 7

    pretrained = load_pretrained("builtin:arithmetic")
    rollout = {"engine": "vllm", "kv_cache_gib": 2.5, "max_tokens": 80}
    options = EvaluationOptions(model="m", data={"test": ("d",)}, rollout=rollout)
    asked = engine_settings(options, pretrained, [Question, Question])
    assert (asked.max_prompt_tokens, asked.rollout.max_tokens) == (7, 80)
    assert (asked.rollout.engine, asked.rollout.kv_cache_gib, asked.rollout.sleep_level) == ("vllm", 2.5, 0)


def test_every_engine_that_can_be_named_can_be_made():
    names = get_args(RolloutConfig.model_fields["engine"].annotation)
    assert set(names) == {"auto", *ENGINES}


def test_nothing_imports_vllm_before_it_is_chosen(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, exgrpo.train.run.loop, exgrpo.tools.evaluate.__main__\nprint('vllm' in sys.modules)"
    )
    assert launch(program).stdout == "False\n"
