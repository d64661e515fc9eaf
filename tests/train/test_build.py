"""What is refused while a run is put together."""

import pytest
from transformers import MiniCPM3Config

from exgrpo.train.build import check_head
from exgrpo.train.errors import ModelError
from exgrpo.train.pretrained.source import find_model


def test_a_model_whose_logits_the_kernels_cannot_compute_is_refused_before_anything_is_loaded(tmp_path):
    MiniCPM3Config(num_hidden_layers=1, architectures=["MiniCPM3ForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"^policy.path: .* cannot be trained: .* changes its hidden states between"):
        check_head(find_model(str(tmp_path)))


def test_the_default_runs_model_is_not():
    check_head(find_model("builtin:arithmetic"))
