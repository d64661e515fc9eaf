"""What is refused while a run is put together."""

from types import SimpleNamespace

import pytest
import torch
from transformers import MiniCPM3Config

from exgrpo.kernels import backend_choice, dispatch, extension, self_test
from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import ConfigError, DataError, ModelError
from exgrpo.train.data.questions import Question, QuestionSet
from exgrpo.train.policy.source import find_model
from exgrpo.train.run.build import Inputs, check_alike, check_head, settle_kernels
from tests.train.fakes import one_of_two


def test_a_model_whose_logits_the_kernels_cannot_compute_is_refused_before_anything_is_loaded(tmp_path):
    MiniCPM3Config(num_hidden_layers=1, architectures=["MiniCPM3ForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"^policy.path: .* cannot be trained: .* changes its hidden states between"):
        check_head(find_model(str(tmp_path)))


CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch):
    """The cpu backend is there, and what it is told to be: right, or wrong."""
    monkeypatch.delenv("EXGRPO_BACKEND", raising=False)
    monkeypatch.setattr(extension, "MISSING", "")
    monkeypatch.setattr(dispatch, "_LEFT_OUT", {})
    settings = SimpleNamespace(dtype=torch.float32)

    def settle(backend, world, fault=""):
        monkeypatch.setattr(self_test, "fault", lambda name, *_: fault if name == "cpu" else "")
        settle_kernels(backend, settings, world)
        return dispatch.automatic(CPU, torch.float32, backend_choice.LARGE + 1)

    return settle


def test_a_backend_that_is_wrong_on_one_rank_is_left_out_on_all(machine):
    pair, other = one_of_two(lambda value: other if isinstance(value, dict) else None), {}
    assert machine("auto", pair) == "cpu"
    other = {"triton": "it is not installed", "cpu": "its log_prob is wrong"}
    assert machine("auto", pair) == "torch"


def test_a_named_backend_that_is_wrong_is_refused(machine):
    with pytest.raises(
        ConfigError, match=r"policy.kernel_backend: backend='cpu': it failed its self-test .*: mad .*; exp"
    ):
        machine("cpu", ALONE, fault="mad")


def test_ranks_with_other_questions_are_refused():
    train, test = (QuestionSet((Question(0, (1, 2), "1 + 1", gold, "sums"),)) for gold in ("2", "3"))
    inputs = Inputs(None, train, {"test": test}, None)
    check_alike(inputs, ALONE)
    with pytest.raises(DataError, match="^test: the processes of the run have read different questions: "):
        check_alike(inputs, one_of_two(lambda value: {**value, "test": "other"}))
