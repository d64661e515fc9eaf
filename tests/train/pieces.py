"""A byte-level tokenizer for the tiny models, and a plain reading of their answers."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.train import tiny

SPECIAL = (b"<pad>", b"<s>", b"</s>")
_CHARACTERS = "ab\nQ:"
_TEXTS = [
    *_CHARACTERS,
    *(a + b for a in _CHARACTERS for b in _CHARACTERS),
    *("\n\nQ: a", "aQ:\nb", "é", "→", "é\n", "a→b"),
]
# Characters of two and three bytes in parts, alone and beside other text.
_PARTS = [b"\xc3", b"\xa9", b"\xe2\x86", b"\x92", b"\xe2", b"\x86", b"Q\xc3", b"\xa9:", b"\n\xe2", b"\x92Q", b"b:\xe2"]
_FILLING = [f"x{i}".encode() for i in range(tiny.VOCABULARY - len(SPECIAL) - len(_TEXTS) - len(_PARTS))]
PIECES = [*SPECIAL, *(text.encode() for text in _TEXTS), *_PARTS, *_FILLING]
"""The bytes of each token."""


def read(tokens) -> str:
    """The text of token ids."""
    return b"".join(PIECES[int(token)] for token in tokens).decode("utf-8", errors="replace")


def scan(tokens, strings) -> int | None:
    """Return the number of tokens when the first of the strings is complete."""
    for length in range(1, len(tokens) + 1):
        if any(string in read(tokens[:length]) for string in strings):
            return length
    return None


def before(text: str, strings) -> str | None:
    """Return the text before the string that is complete first, scanning character by character."""
    for end in range(len(text) + 1):
        complete = [string for string in strings if text[:end].endswith(string)]
        if complete:
            return text[: end - max(map(len, complete))]
    return None


def ended(response, finished, log_prob, strings):
    """An answer as (token ids, finished, log-probs), cut where the first of the strings is complete."""
    length = scan(response, strings)
    return (list(response[:length]), finished or length is not None, list(log_prob[:length]))


def save_tokenizer(folder: Path) -> None:
    """Save it in the folder of a tiny model."""
    letters = bytes_to_unicode()
    vocabulary = {"".join(letters[byte] for byte in piece): i for i, piece in enumerate(PIECES)}
    assert len(vocabulary) == tiny.VOCABULARY
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), (piece.decode() for piece in SPECIAL), strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def tokens(*pieces: bytes) -> np.ndarray:
    """Token ids of pieces."""
    return np.array([PIECES.index(piece) for piece in pieces], np.int32)
