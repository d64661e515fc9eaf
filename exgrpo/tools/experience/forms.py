"""Files of answers as other projects write them: a model of a row for each form, and what the row says as traces.

`exgrpo.train.run.traces` has the columns of a trace. What a form does not say is not made up: the run that begins with
the answers scores what has no log-probs and grades what has no reward.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import AliasPath, BaseModel, ConfigDict, Field

from exgrpo.train.common.errors import DataError, shown
from exgrpo.train.common.records import Mask, Rollout
from exgrpo.train.data.rows import Message, as_text, gold_text, parse_row
from exgrpo.train.rollout.stops import text_of

Answer = dict[str, Any]
"""The columns of a trace that a form says; `rewards` has the parts of the reward by name, None where there is none."""
Decode = Callable[[Any], str]
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Step = Annotated[int, Field(ge=0, lt=2**31)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class Form(_Strict):
    """A row of one form.

    Attributes:
        title: what messages call the form.
        known_by: columns that tell it from the others.
        tokens: whether its answers are token ids, which only the tokenizer of their model can read.
    """

    title: ClassVar[str]
    known_by: ClassVar[frozenset[str]]
    tokens: ClassVar[bool] = False

    def answers(self, decode: Decode) -> Iterator[Answer]:
        """The answers of the row, none where it holds none.

        Args:
            decode: token ids to text, special tokens kept; of the tokenizer of the model that wrote them.

        Raises:
            DataError: it cannot be right; the message is without the row's place.
        """
        raise NotImplementedError


class Said(_Strict):
    """A message; `content` is a text, or parts of which some are texts."""

    role: str
    content: str | list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """What it says."""
        if isinstance(self.content, list):
            return "\n\n".join(part["text"] for part in self.content if isinstance(part.get("text"), str))
        return self.content or ""


def asked(prompt: str | Sequence[Said]) -> str:
    """The question of a prompt as a training question has it, without a system message."""
    if isinstance(prompt, str):
        return prompt
    said = [Message(one.role, one.text) for one in prompt if one.role != "system"]
    return said[0].content if len(said) == 1 else as_text(said)


def _gold(value: Any) -> str | None:
    """A right answer; None: it is no text or number, by which questions could be told apart."""
    try:
        return gold_text(value, "answer")
    except DataError:
        return None


def _number(value: float) -> float | None:
    """A number; None: it is NaN."""
    try:
        return None if math.isnan(value) else float(value)
    except OverflowError:
        raise DataError(f"{shown(value)} is too large a number") from None


class VerlDump(Form):
    """A line of `trainer.rollout_data_dir` or `validation_data_dir` of verl; special tokens are not in its texts."""

    title = "verl rollout dump"
    known_by = frozenset({"input", "output", "score"})

    input: str
    output: str
    gts: Any = None
    score: Number | None = None
    step: Step | None = None

    def answers(self, decode: Decode) -> Iterator[Answer]:
        """See `Form`."""
        row = {"question": self.input, "answer": _gold(self.gts), "response": self.output, "step": self.step}
        yield {**row, "rewards": {"score": self.score}}


class TrlCompletions(Form):
    """A row of the completions that TRL logs (`log_completions`), with a column for each reward function."""

    model_config = ConfigDict(extra="allow")
    title = "TRL completions"
    known_by = frozenset({"prompt", "completion", "step"})

    step: Step
    prompt: str | list[Said]
    completion: str | list[Said]
    advantage: float | None = None
    __pydantic_extra__: dict[str, Any]

    def answers(self, decode: Decode) -> Iterator[Answer]:
        """See `Form`; a completion of several messages is not read. pandas writes NaN where a reward is None."""
        said = self.completion
        if not isinstance(said, str) and len(said) != 1:
            raise DataError(f"completion has {len(said)} messages, and answers of one are read")
        numbers = {
            name: None if value is None else _number(value)
            for name, value in self.__pydantic_extra__.items()
            if value is None or (isinstance(value, int | float) and not name.startswith("__"))
        }
        response = said if isinstance(said, str) else said[0].text
        advantage = None if self.advantage is None else _number(self.advantage)
        row = {"question": asked(self.prompt), "response": response, "step": self.step, "advantage": advantage}
        yield {**row, "rewards": numbers}


class OfVerl(Form):
    """A row with the columns of verl's data sets."""

    prompt: list[dict[str, Any]]
    reward_model: dict[str, Any]
    data_source: str | None = None

    def asked(self) -> Answer:
        """Question, answer and source, as a run reads them from the same columns. Raises DataError as `parse_row`."""
        row = parse_row({"prompt": self.prompt, "reward_model": self.reward_model}, self.data_source or "")
        return {"question": row.question, "answer": row.gold, "source": row.source or None}


class OaplAnswer(OfVerl):
    """A row of the data sets of OAPL: one answer to a question of verl's columns."""

    title = "OAPL data"
    known_by = frozenset({"prompt", "response", "precomputed_reward"})

    response: str | None = None
    precomputed_reward: Number | None = None

    def answers(self, decode: Decode) -> Iterator[Answer]:
        """See `Form`."""
        if self.response is not None:
            rewards = {"precomputed_reward": self.precomputed_reward}
            yield {**self.asked(), "response": self.response, "rewards": rewards}


class LuffyTargets(OfVerl):
    """A row of the data sets of LUFFY: answers of a stronger model to a question of verl's columns.

    Its probabilities (`target_ds_qwen_7b_probs`) are not read, for it does not say of which tokens they are.
    """

    title = "LUFFY data"
    known_by = frozenset({"prompt", "reward_model", "target"})

    target: list[Said] | None = None
    target_lst: list[str] | None = None

    def answers(self, decode: Decode) -> Iterator[Answer]:
        """See `Form`; an answer in both columns counts once."""
        first = [said.text for said in (self.target or ())[:1]]
        for response in dict.fromkeys([*first, *(self.target_lst or ())]):
            yield {**self.asked(), "response": response}


class OpenR1Generations(Form):
    """A row of open-r1: the columns of a data set of questions, and what a model has generated for it."""

    title = "open-r1 generations"
    known_by = frozenset({"generations"})

    problem: str | None = None
    question: str | None = None
    answer: Any = None
    solution: Any = None
    generations: list[str]
    finish_reasons: list[str | None] | None = None
    is_reasoning_complete: list[bool | None] | None = None

    def answers(self, decode: Decode) -> Iterator[Answer]:
        """See `Form`."""
        question = self.question if self.question is not None else self.problem
        if question is None:
            raise DataError("has neither question nor problem")
        gold = None
        if self.answer is not None or self.solution is not None:
            gold = parse_row({"question": question, "answer": self.answer, "solution": self.solution}, "").gold
        for response, ended in zip(self.generations, self._finished(), strict=True):
            yield {"question": question, "answer": gold, "response": response, "finished": ended}

    def _finished(self) -> list[bool | None]:
        if self.finish_reasons is not None:
            name, found = "finish_reasons", [None if one is None else one != "length" for one in self.finish_reasons]
        else:
            name, found = "is_reasoning_complete", self.is_reasoning_complete or [None] * len(self.generations)
        if len(found) != len(self.generations):
            raise DataError(f"{len(found)} {name} for {len(self.generations)} generations")
        return found


class _Weighted(_Strict):
    score: Number
    weight: Number = 1.0

    @property
    def value(self) -> float:
        return self.score * self.weight


class _Node(_Strict):
    parent: int | None = None
    message: Said
    token_ids: list[TokenId] = []
    mask: list[bool] = []
    logprobs: list[Number] = []
    advantages: list[Number] | None = None

    def check(self, decode: Decode) -> None:
        """Whether its lists fit each other, and its sampled tokens say its message. Raises DataError."""
        ids, mask = np.array(self.token_ids, np.int32), np.array(self.mask, bool)
        if len(mask) != len(ids):
            raise DataError(f"{len(mask)} mask for {len(ids)} token_ids")
        if len(self.logprobs) not in (0, mask.sum()):
            raise DataError(f"{len(self.logprobs)} logprobs for {mask.sum()} sampled token_ids")
        if mask.any() and self.message.text.strip() not in (told := decode(ids[mask])):
            raise DataError(
                f"its token_ids say {shown(told, 80)} in this tokenizer, and its message "
                f"{shown(self.message.text, 80)}: --tokenizer must name the model that wrote it"
            )


class _Call(_Strict):
    model: str | None = None
    finish_reason: str | None = None
    error: Any = None


TRUNCATED = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
"""What stops a trace before its answer has ended."""


class _Trace(_Strict):
    prompt: str | list[Said] | None = Field(None, validation_alias=AliasPath("task", "data", "prompt"))
    gold: Any = Field(None, validation_alias=AliasPath("task", "data", "answer"))
    trainable: bool = Field(True, validation_alias=AliasPath("agent", "trainable"))
    nodes: list[_Node] = []
    calls: list[_Call] = []
    rewards: dict[str, _Weighted | None] = {}
    ok: bool = False
    stop_condition: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the last answer has ended by itself."""
        last = next((call for call in reversed(self.calls) if call.error is None), None)
        return self.stop_condition not in TRUNCATED and (last is None or last.finish_reason != "length")

    def answer(self, decode: Decode) -> Answer | None:
        """Its tokens and what is known of them; None: no policy has sampled any."""
        nodes = self.nodes
        # A node without another behind it ends a branch, so one branch is a chain.
        if [node.parent for node in nodes] != [None, *range(len(nodes) - 1)][: len(nodes)]:
            raise DataError("a trace has several branches, and answers of one conversation are read")
        for node in nodes:
            node.check(decode)
        own = np.array([one for node in nodes for one in node.mask], bool)
        if not own.any():
            return None
        ids = np.array([one for node in nodes for one in node.token_ids], np.int32)
        first, end = int(own.argmax()), len(own) - int(own[::-1].argmax())
        written = None if own[first:end].all() else own[first:end]
        rollout = Rollout(ids[first:end], self.finished, written=written)
        return {
            "question": None if self.prompt is None else asked(self.prompt),
            "answer": _gold(self.gold),
            "prompt_ids": ids[:first],
            "response_ids": rollout.response,
            "response": text_of(rollout, decode, ()),
            "written": written,
            "finished": rollout.finished,
            "model": next((call.model for call in reversed(self.calls) if call.model), None),
            "advantage": self._advantage(nodes),
            "rewards": {name: one.value if one else None for name, one in self.rewards.items()},
            **self._log_prob(nodes, own[first:end]),
        }

    def _log_prob(self, nodes: Sequence[_Node], own: Mask) -> Answer:
        """The log-probs of all response tokens, 0 of those that no policy wrote; nothing where they are not known."""
        if any(any(node.mask) and not node.logprobs for node in nodes):
            return {}
        log_prob = np.zeros(len(own), np.float32)
        log_prob[own] = [one for node in nodes for one in node.logprobs]
        return {"log_prob": log_prob, "behaviour": "engine"}

    def _advantage(self, nodes: Sequence[_Node]) -> float | None:
        """Where all tokens have the same one."""
        found = {one for node in nodes for one in node.advantages or ()}
        return found.pop() if len(found) == 1 else None


class PrimeRlEpisode(Form):
    """A line of the traces.jsonl of prime-rl: an episode of verifiers, of which the policy's own traces are read."""

    title = "prime-rl traces"
    known_by = frozenset({"traces", "task"})
    tokens = True

    step: Step | None = Field(None, validation_alias=AliasPath("run", "work", "step"))
    traces: list[_Trace] = []

    def answers(self, decode: Decode) -> Iterator[Answer]:
        """See `Form`; failed traces and those of other models than the policy are none."""
        for trace in self.traces:
            found = trace.answer(decode) if trace.ok and trace.trainable else None
            if found is not None:
                yield {**found, "step": self.step}


FORMS: dict[str, type[Form]] = {
    "verl": VerlDump,
    "trl": TrlCompletions,
    "prime_rl": PrimeRlEpisode,
    "oapl": OaplAnswer,
    "luffy": LuffyTargets,
    "open_r1": OpenR1Generations,
}
"""By the names that --form takes."""
