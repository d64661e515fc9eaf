"""`python -m tests.train.checkpoint.v0_1_0.make`: with exgrpo 0.1.0, on one CPU, it made the run that lies here.

The run and its next two steps are kept as that version wrote them. test_runs.py has today's version go on with the run.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

ROOT = Path(__file__).parents[4]
HERE = Path(__file__).parent.relative_to(ROOT)
BUILTIN = ROOT / "exgrpo" / "assets" / "arithmetic"


def save_model(folder):
    """A random Llama with two layers of width 16, and the tokenizer of the built-in task."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=291,
        eos_token_id=292,
        pad_token_id=293,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUILTIN).save_pretrained(folder)


def train(*options):
    """Start the trainer on one thread of a CPU."""
    command = [sys.executable, "exgrpo/train/main.py", "--recipe", str(HERE / "recipe.yaml"), *options]
    subprocess.run(command, env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}, check=True)


if __name__ == "__main__":
    os.chdir(ROOT)
    shutil.rmtree(HERE / "run", ignore_errors=True)
    save_model(HERE / "model")
    train()
    shutil.rmtree(HERE / "run" / "tensorboard")
    for name in ("finished", "in_use_by", "report.html"):
        (HERE / "run" / name).unlink()
    with TemporaryDirectory() as folder:
        shutil.copytree(HERE / "run", Path(folder, "run"))
        train("--resume=auto", "--steps=4", f"--output.folder={folder}")
        records = Path(folder, "run", "metrics.jsonl").read_text().splitlines(keepends=True)
    (HERE / "went_on.jsonl").write_text("".join(records[2:]))
