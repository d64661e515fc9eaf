"""Convert questions to token ids of prompts."""

import string
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from exgrpo.train.common.errors import SHOWN, DataError, cut, shown
from exgrpo.train.config.sources import settings_of
from exgrpo.train.data.rows import Message, Row

PROMPTS: dict[str, tuple[str, str | None]] = {
    # SYSTEM_PROMPTS["default"] in reasoning_gym/utils.py
    "reasoning_gym": (
        "{question}",
        "Given a problem, your task is to answer the question by thinking step-by-step in a clear and specific "
        "manner.\nOnce you have thought about the reasoning process, provide the answer in the following format:\n"
        "<answer>answer here</answer>\n"
        "Do not explain your reasoning inside the answer tags, provide only the final answer. When an example is "
        "provided, you should strictly follow the format of the output/answer in that example.\n",
    ),
    # examples/data_preprocess/gsm8k.py and math_dataset.py of verl
    "verl_gsm8k": ("""{question} Let's think step by step and output the final answer after "####".""", None),
    "verl_math": ("{question} Let's think step by step and output the final answer within \\boxed{{}}.", None),
    # recipes/DeepSeek-R1-Distill-Qwen-1.5B/grpo/config_demo.yaml of open-r1
    "open_r1": (
        "{question}",
        "You are a helpful AI Assistant that provides well-reasoned and detailed responses. You first think about the "
        "reasoning process as an internal monologue and then provide the user with the answer. Respond in the "
        "following format: <think>\n...\n</think>\n<answer>\n...\n</answer>",
    ),
}
"""User messages, as `PromptFormat.prompt_format`, and system messages of other projects, verbatim, by their names."""


@dataclass(frozen=True)
class PromptFormat:
    r"""Conversion of the questions of a data set to prompts.

    Attributes:
        max_prompt_tokens: longer prompts are left out.
        chat: True renders the tokenizer's chat template with its generation prompt. False, for base models, encodes the
            plain text after the special tokens that the tokenizer puts before a text.
        prompt_format: last user message, with {question} in it; literal braces are doubled, as in str.format.
        system_prompt: system message of every chat.
        keep_system: use the row's own system message where it has one; by default only its question is used.
        answer_prefix: text that opens every answer, such as "<think>\n"; it ends the prompt, and is not added where the
            chat template has written it already.
    """

    max_prompt_tokens: int
    chat: bool = True
    prompt_format: str = "{question}"
    system_prompt: str | None = None
    keep_system: bool = False
    answer_prefix: str = ""

    @classmethod
    def from_options(cls, options: object, prompt_format: str | None = None) -> Self:
        """Return the format that options with these attributes describe, with `prompt_format` in place of theirs."""
        given = {field.name: getattr(options, field.name) for field in fields(cls)}
        return cls(**(given if prompt_format is None else {**given, "prompt_format": prompt_format}))._named()

    @classmethod
    def from_source(cls, source: str, options: Any) -> Self:
        """Return the format of one source's questions from such options and their `sources`."""
        return cls.from_options(options, settings_of(source, options.sources).prompt_format)

    def _named(self) -> Self:
        """Replace a named prompt by its texts; raises DataError if another system message is set."""
        text, system = PROMPTS.get(self.prompt_format, (self.prompt_format, None))
        if system is None:
            return replace(self, prompt_format=text)
        if self.system_prompt is not None or self.keep_system:
            raise DataError(
                f"prompt_format {self.prompt_format} brings a system message: leave system_prompt and keep_system out"
            )
        return replace(self, prompt_format=text, system_prompt=system)

    def check(self, tokenizer: Any) -> None:
        """Raise DataError, naming the setting, if these settings do not fit each other or the tokenizer."""
        self.check_settings()
        if self.chat and getattr(tokenizer, "chat_template", None) is None:
            raise DataError(
                "the tokenizer has no chat template: use chat=False (for a base model), or give it one "
                "(chat_template.jinja in its folder)"
            )

    def check_settings(self) -> None:
        """Raise DataError, naming the setting, if these settings do not fit each other."""
        if self.system_prompt is not None and self.keep_system:
            raise DataError("data.keep_system and data.system_prompt exclude each other: unset one")
        if not self.chat and (self.system_prompt is not None or self.keep_system):
            raise DataError("data.chat=False has no place for a system message: put it into data.prompt_format")
        text = self.prompt_format
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
        except ValueError as error:
            raise DataError(f"prompt_format {shown(text)}: {shown(error)}; literal braces are doubled") from error
        if strange := [name for name in names if name != "question"]:
            raise DataError(
                f"prompt_format {shown(text)} has the field {{{cut(strange[0], SHOWN)}}}, but "
                "only {question} is known; literal braces are doubled: \\boxed{{}}"
            )
        if not names:
            raise DataError(
                f"prompt_format {shown(text)} does not contain {{question}}, and is no name of a prompt: "
                f"{', '.join(PROMPTS)}"
            )
        try:
            text.format(question="")
        except (ValueError, LookupError) as error:
            raise DataError(f"prompt_format {shown(text)}: {shown(error)}") from error

    def token_ids(self, rows: Sequence[Row], tokenizer: Any) -> list[list[int]]:
        """Return [len(rows)] the token ids of each row's prompt.

        Raises:
            DataError: the chat template rejects the messages, or there is none and a question has several turns.
        """
        if self.chat:
            texts = _render([self.messages(row) for row in rows], tokenizer)
        elif long := next((row for row in rows if row.turns), None):
            raise DataError(f"the question {shown(long.text)} has several turns, which need data.chat=True")
        else:
            texts = [self.prompt_format.format(question=row.question) for row in rows]
        texts = [text.removesuffix(self.answer_prefix) + self.answer_prefix for text in texts]
        bare = list(tokenizer(texts, add_special_tokens=False)["input_ids"])
        if self.chat:  # the template writes the special tokens itself
            return bare
        # Some tokenizers append EOS to every text, and the answer would begin after it: keep only the leading tokens.
        first, (whole,) = bare[0], tokenizer(texts[:1], add_special_tokens=True)["input_ids"]
        before = next((start for start in range(len(whole)) if whole[start:][: len(first)] == first), 0)
        return [whole[:before] + ids for ids in bare]

    def messages(self, row: Row) -> list[dict[str, str]]:
        """Return the conversation {role, content} of a row's prompt, which ends with the question."""
        system = row.system if self.keep_system else self.system_prompt
        first = [] if system is None else [Message("system", system)]
        last = Message("user", self.prompt_format.format(question=row.question))
        return [message._asdict() for message in (*first, *row.turns, last)]


def _render(chats: list[list[dict[str, str]]], tokenizer: Any) -> list[str]:
    try:
        return tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything, often for a system message
        raise DataError(f"the tokenizer's chat template refuses the messages: {shown(error)}") from error
