"""A model to start from, and what of its tokenizer the trainer needs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from exgrpo.train.common.errors import DataError, ModelError, shown
from exgrpo.train.data.questions import Question
from exgrpo.train.policy.source import ModelSource, explained, find_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ASKED, _ANSWERED = "QUESTION", "ANSWER"
"""Messages of a conversation that is only looked at."""


@dataclass(frozen=True)
class Pretrained:
    """A model to start from.

    Attributes:
        model: where it is, and its configuration.
        tokenizer: its tokenizer.
        eos: ids of all tokens that end a response, that of the tokenizer first.
        pad: id that fills batches up.
    """

    model: ModelSource
    tokenizer: PreTrainedTokenizerFast
    eos: tuple[int, ...]
    pad: int

    def ends(self, stop: Iterable[str]) -> list[int]:
        """Return the ids of all tokens that end a response where such strings do: `eos`, then strings of one token."""
        found = list(self.eos)
        for string in stop:
            # Some tokenizers put a token for a space before a text: only the last one counts.
            last = self.tokenizer(string, add_special_tokens=False)["input_ids"][-1:]
            if self.tokenizer.decode(last) == string and last[0] not in found:
                found += last
        return found


def load_pretrained(path: str, overrides: Mapping[str, Any] | None = None, adapters: str | None = None) -> Pretrained:
    """Find a model and its special tokens.

    Args:
        path: a local folder, builtin:NAME for a model that ships with the package, or a hub name.
        overrides: values of its configuration that are changed.
        adapters: folder of saved adapters, of which a run has written with which tokens their answers end.

    Raises:
        ConfigError: an override does not suit the model.
        ModelError: the model is missing, has no token that ends a response, or has no row of its embedding for
            a token; the message says which.
    """
    model = find_model(path, overrides)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=False)
        tokenizer("1 + 1")  # some wrong settings are noticed only by what uses them
    except Exception as error:  # of whatever kind: tokenizers and their settings have errors of their own
        raise explained(error, model.path) from error
    chosen = _generation_ends(model.path)
    of_model = model.config.eos_token_id if chosen is None else chosen
    of_adapters = None if adapters is None else _generation_ends(str(Path(adapters).expanduser()))
    eos = _eos_ids(model.path, tokenizer.eos_token_id, of_model, of_adapters)
    if not eos:
        raise ModelError(f"policy.path: {model.path!r} names no EOS token in generation_config, config or tokenizer")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    pretrained = Pretrained(model, tokenizer, eos, pad)
    _check_ids(pretrained)
    return pretrained


def _generation_ends(path: str) -> Any:
    """The ids that the generation config names; None: there is none, or it names none."""
    try:
        # None where there is no such file; one that is damaged must not count as none, for it decides.
        there = cached_file(path, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
    except OSError:  # a hub that does not answer
        there = None
    try:
        return GenerationConfig.from_pretrained(path).eos_token_id if there else None
    except Exception as error:
        raise explained(error, path) from error


def _eos_ids(path: str, *sources: Any) -> tuple[int, ...]:
    ids = [i for ids in sources if ids is not None for i in (ids if isinstance(ids, list) else [ids])]
    if strange := [i for i in ids if type(i) is not int]:
        raise ModelError(f"policy.path: {path!r} names the EOS token {shown(strange[0])}: an id of a token is a number")
    return tuple(dict.fromkeys(ids))


def _check_ids(pretrained: Pretrained) -> None:
    """Every token needs a row of the embedding, those that end answers or fill batches first.

    A special one, which no text has by chance, may lack it: that for images of Gemma 3 does in the models of text.
    """
    path, rows = pretrained.model.path, pretrained.model.config.get_text_config().vocab_size
    for name, ids in (("EOS", pretrained.eos), ("pad", (pretrained.pad,))):
        if outside := [i for i in ids if not 0 <= i < rows]:
            raise ModelError(
                f"policy.path: the {name} token of {path!r} has the id {outside[0]}, and its vocabulary has {rows} "
                "tokens: correct the id in generation_config.json, config.json or the tokenizer"
            )
    beyond = {i: token for token, i in pretrained.tokenizer.get_vocab().items() if i >= rows}
    added = pretrained.tokenizer.added_tokens_decoder if beyond else {}
    if lacking := [i for i in beyond if i not in added or not added[i].special]:
        raise ModelError(
            f"policy.path: the tokenizer of {path!r} has the token {beyond[lacking[0]]!r} with the id {lacking[0]}, "
            f"and the model's vocabulary has {rows} tokens: give the model the tokenizer that belongs to it, or "
            "enlarge its embedding"
        )


def behind_an_answer(tokenizer: Any, *messages: Mapping[str, str]) -> str:
    """Return what the chat template writes after an answer, before the next one if messages lie between them.

    Raises:
        Exception: any that the template raises.
    """
    conversation = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _ANSWERED}, *messages]
    written = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=bool(messages))
    return written.partition(_ASKED)[2].partition(_ANSWERED)[2]


def missing_end(pretrained: Pretrained, stop: Sequence[str]) -> str | None:
    """Return the token, or the text, with which the chat template ends an answer, at which rollouts do not stop.

    Args:
        pretrained: the model and its tokenizer.
        stop: strings that end an answer, too.

    Returns:
        None: rollouts end there, or the template has no such token or text.
    """
    tokenizer = pretrained.tokenizer
    try:
        behind = behind_an_answer(tokenizer)
    except Exception:  # a template may raise anything, and `PromptFormat` reports it
        return None
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
    special = next((i for i in ids if i in tokenizer.added_tokens_decoder or i in pretrained.eos), None)
    if special in pretrained.eos or any(string in behind for string in stop):
        return None
    end = behind.strip().partition("\n")[0] if special is None else tokenizer.decode([special])
    return end or None


def check_prompts(pretrained: Pretrained, questions: Iterable[Question]) -> None:
    """Check that the embedding of the model has a row for every token of the prompts.

    Raises:
        DataError: it has not; the message names the question.
    """
    rows = pretrained.model.config.get_text_config().vocab_size
    if max(pretrained.tokenizer.get_vocab().values()) < rows:  # as nearly always, and there may be a million questions
        return
    for question in questions:
        if (largest := max(question.prompt, default=0)) >= rows:
            raise DataError(
                f"the question {shown(question.text)} of {shown(question.source)} has the token "
                f"{pretrained.tokenizer.convert_ids_to_tokens(largest)}, which this model cannot read: remove it"
            )
