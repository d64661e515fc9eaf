"""Which training question a trace belongs to, and which tokens of the run's model say what it says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from exgrpo.train.data.questions import Question
from exgrpo.train.experience_data.traces import Trace
from exgrpo.train.records import Rollout, TokenIds
from exgrpo.train.rollout.stops import text_of


class Questions:
    """Finds the training question of a trace: by its text and gold answer, else by the token ids of its prompt.

    Where a trace has no gold answer, its text is enough. Of equal questions the first one is found.

    Args:
        questions: of the run.
    """

    def __init__(self, questions: Sequence[Question]) -> None:
        self._by_gold: dict[tuple[str, str], Question] = {}
        self._by_text: dict[str, Question] = {}
        self._by_prompt: dict[tuple[int, ...], Question] = {}
        for question in questions:
            self._by_gold.setdefault((question.text, question.gold), question)
            self._by_text.setdefault(question.text, question)
            self._by_prompt.setdefault(question.prompt, question)

    def find(self, trace: Trace) -> Question | None:
        """The question of a trace; None: it is not among them, or has another gold answer."""
        if trace.question is not None:
            by_text = (
                self._by_text.get(trace.question)
                if trace.gold is None
                else self._by_gold.get((trace.question, trace.gold))
            )
            if by_text is not None:
                return by_text
        by_prompt = None if trace.prompt is None else self._by_prompt.get(tuple(trace.prompt.tolist()))
        return by_prompt if by_prompt and trace.gold in (None, by_prompt.gold) else None


@dataclass(frozen=True)
class Encoding:
    """How the run's model reads and writes text.

    Attributes:
        encode: texts to their token ids, without the special tokens around a text.
        decode: token ids to text, special tokens kept.
        eos: ids of all tokens that end an answer; the first is appended to a text that has ended.
        vocabulary: number of token ids that the model knows.
        stop: strings that end an answer.
    """

    encode: Callable[[Sequence[str]], Sequence[Sequence[int]]]
    decode: Callable[[Any], str]
    eos: tuple[int, ...]
    vocabulary: int
    stop: tuple[str, ...] = ()

    @classmethod
    def of(cls, pretrained: Any, stop: tuple[str, ...]) -> Self:
        """That of a `Pretrained`."""
        tokenizer, own = pretrained.tokenizer, pretrained.tokenizer.eos_token_id
        return cls(
            encode=lambda texts: tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else [],
            decode=tokenizer.decode,
            eos=tuple(sorted(pretrained.eos, key=lambda eos: eos != own)),
            vocabulary=pretrained.model.config.get_text_config().vocab_size,
            stop=stop,
        )

    def same_tokens(self, trace: Trace, question: Question) -> bool:
        """Whether the trace's token ids are this model's: they mean the same prompt and the same answer."""
        ids = trace.tokens
        if ids is None or trace.prompt is None or tuple(trace.prompt.tolist()) != question.prompt:
            return False
        if not len(ids) or ids.max() >= self.vocabulary:
            return False
        answer = Rollout(ids, trace.finished, written=trace.written)
        return text_of(answer, self.decode, question.stops(self.stop)) == trace.response

    def tokens(self, traces: Sequence[Trace]) -> list[tuple[TokenIds, bool]]:
        """The texts of traces as token ids [R], and whether they end; an empty text has no tokens.

        What has ended ends with EOS, and nothing comes behind the first EOS.
        """
        found = []
        for trace, ids in zip(traces, self.encode([trace.response for trace in traces]), strict=True):
            array = np.array(ids, np.int32)
            ends = np.flatnonzero(np.isin(array, self.eos))
            if len(ends):
                found.append((array[: ends[0] + 1], True))
            elif trace.finished and len(array):
                found.append((np.append(array, np.int32(self.eos[0])), True))
            else:
                found.append((array, trace.finished))
        return found
