"""ExGRPO in TRL under DeepSpeed ZeRO-3 on two ranks, against one process that shards nothing."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed: pip install 'trl>=1.16,<2'", exc_type=ImportError)
pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install 'exgrpo[train]'")

from safetensors.torch import load_file

from tests.integrations import trl_worker
from tests.integrations.test_trl_start import expert
from tests.integrations.trl_trainers import save_model
from tests.train.launch import completed

AUTO = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
SHARD_ALL = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
ZERO_3 = {**dict.fromkeys(AUTO, "auto"), "zero_allow_untested_optimizer": True, "zero_optimization": SHARD_ALL}
BESIDE = {"compose": "beside", "admit": "with_advantage", "prioritise": "random", "advantage": "stored", "ratio": 0.6}
BESIDE |= {"weigh": "decoupled", "expire": [], "learning_rate": 0.1}
"""A method that leaves answers out, adds others, fills up, and scores what it replays."""


@pytest.mark.long
def test_zero_3_is_the_unsharded_run(tmp_path: Path) -> None:
    # Plain gradient descent: what comes out is linear in the gradients. The loss does not depend on how rows are
    # packed, so two ranks are two micro-batches.
    common = {"max_steps": 3, "start_pass_rate": 0.0, "entropy_coef": 0.0, "optim": "sgd", "learning_rate": 1.0}
    begun = {**common, "start": expert(tmp_path / "expert.jsonl"), "refills": 2}
    kinds = {"tied": common, "untied": common, "beside": {**common, **BESIDE}, "begun": begun}
    for kind in kinds:
        save_model(tmp_path / kind, tied=kind == "tied")
    for folder, changes in {"whole": {"gradient_accumulation_steps": 2}, "shards": {"deepspeed": ZERO_3}}.items():
        runs = [
            (str(tmp_path / kind), str(tmp_path / folder / kind), {**of_kind, **changes})
            for kind, of_kind in kinds.items()
        ]
        if folder == "whole":
            trl_worker.main(runs)
            continue
        completed(Path(trl_worker.__file__), json.dumps(runs), ranks=2)
    for kind in kinds:
        assert_same_run(tmp_path / "shards" / kind, tmp_path / "whole" / kind)


def assert_same_run(shards: Path, whole: Path) -> None:
    results = [json.loads((folder / "result.json").read_text()) for folder in (shards, whole)]
    assert [result["sharded"] for result in results] == [True, False]
    for log, other in zip(results[0]["log"][:3], results[1]["log"][:3], strict=True):
        assert log["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert log["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        for name in ("experience/replayed", "experience/refilled", "num_tokens", "reward"):
            assert log[name] == pytest.approx(other[name]), name
    assert results[0]["log"][2]["experience/replayed"] > 0
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (shards, whole)]
    for name, weight in weights[1].items():
        torch.testing.assert_close(weights[0][name], weight, rtol=1e-5, atol=1e-5)
