"""Where a model comes from, and what of its tokenizer the trainer needs."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True)
class Pretrained:
    """A model to start from.

    Attributes:
        path: folder or hub name for `from_pretrained`.
        tokenizer: its tokenizer.
        eos: ids of all tokens that end a response.
        pad: id that fills batches up.
    """

    path: str
    tokenizer: PreTrainedTokenizerFast
    eos: tuple[int, ...]
    pad: int


def load_pretrained(path: str) -> Pretrained:
    """Find a model and its special tokens.

    Args:
        path: a local folder, builtin:NAME for a model that ships with the package, or a hub name.

    Raises:
        ValueError: where the model is missing or has no token that ends a response; the message says which.
    """
    if path.startswith("builtin:"):
        folder = ASSETS / path.removeprefix("builtin:")
        if not (folder / "config.json").is_file():
            names = sorted(found.parent.name for found in ASSETS.glob("*/config.json"))
            raise ValueError(f"policy.path: no builtin model {path!r}; there is {', '.join(names) or 'none'}")
        path = str(folder)
    elif path.startswith((".", "/", "~")) or Path(path).exists():
        folder = Path(path).expanduser()
        if not (folder / "config.json").is_file():
            raise ValueError(f"policy.path: {folder} holds no config.json, so no Hugging Face model")
        path = str(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"policy.path: {path!r} cannot be loaded: {str(error).splitlines()[0]}") from None
    eos = _eos_ids(path, config.eos_token_id, tokenizer.eos_token_id)
    if not eos:
        raise ValueError(f"policy.path: {path!r} names no EOS token in generation_config, config or tokenizer")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    return Pretrained(path, tokenizer, eos, pad)


def _eos_ids(path: str, *fallbacks: int | list[int] | None) -> tuple[int, ...]:
    """The generation config decides where there is one; else every id that config and tokenizer name."""
    try:
        chosen = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        chosen = None
    sources = (*fallbacks,) if chosen is None else (chosen, fallbacks[-1])
    ids = {i for ids in sources if ids is not None for i in (ids if isinstance(ids, list) else [ids])}
    return tuple(sorted(ids))
