"""Plans of generations, experience from files and checkpoints of :mod:`exgrpo.train.replay` for a run in TRL.

It imports no TRL.
"""

import copy
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exgrpo.integrations.trl_batch import places
from exgrpo.train.common.distributed import World
from exgrpo.train.common.durable import read_checked, write_checked
from exgrpo.train.common.records import TokenIds
from exgrpo.train.common.step_batch import Floats, Ints, StepBatch
from exgrpo.train.data.questions import Question
from exgrpo.train.data.rows import Message, as_text, canonical, first_places, marked_answer
from exgrpo.train.replay import PlannedGroup, Replay, ReplayState
from exgrpo.train.replay.memory import OF_QUESTIONS
from exgrpo.train.replay.table import LENGTH
from exgrpo.train.run.start_experience import Answer, Beginning, Encoding, Started, start_experience

STATE = "state.json"
ROW_NUMBERS = ("index", "__index_level_0__")
"""Columns, also of `extra_info`, in which verl and pandas number rows; they differ between copies of a question."""


def distinct_rows(data: Any, ignored: Collection[str] = ROW_NUMBERS) -> list[int]:
    """Return the first row of each distinct question; rows that differ only in `ignored` columns are one question.

    `data` is a `datasets.Dataset`, or rows by number. Any other column may affect the reward.
    """

    def asked(row: Mapping[str, Any]) -> str:
        extra = row.get("extra_info")
        both = {**row, "extra_info": _without(extra, ignored)} if isinstance(extra, Mapping) else row
        return canonical(_without(both, ignored))

    if not hasattr(data, "iter"):
        return first_places((asked(data[place]) for place in range(len(data))), set())
    batches = data.with_format(None).iter(batch_size=1024)  # row by row takes five times as long
    rows = (dict(zip(batch, row, strict=True)) for batch in batches for row in zip(*batch.values(), strict=True))
    return first_places(map(asked, rows), set())


def _without(columns: Mapping[str, Any], ignored: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in columns.items() if name not in ignored}


class GenerationPlan(NamedTuple):
    """The questions of a generation."""

    groups: list[PlannedGroup]  # in row order; those that stored answers join come last
    fillers: frozenset[int]  # questions asked only to fill the batch


def plan_generation(replay: Replay, batch: int, step: int, multiple: int = 1) -> GenerationPlan:
    """Plan the groups of the next generation, a multiple of `multiple` for equal rows on all processes (B is one).

    If fewer than `batch` questions are unsolved, retired ones fill the batch to keep its shape, although they teach
    little. Methods that change the batch after grading get its shape from `settle` and are not filled.
    """
    planned = replay.plan(batch, step)
    asked = [group.question for group in planned]
    left = ~replay.memory.retired
    left[asked] = False
    fillers: list[int] = []
    if len(planned) < batch and not left.any() and not replay.settles:
        fillers = _retired(replay, batch - len(planned))
    if missing := -(len(planned) + len(fillers)) % multiple:
        fillers += [group.question for group in replay.more(missing, step, [*asked, *fillers])]
        missing = -(len(planned) + len(fillers)) % multiple
        retired = int(np.count_nonzero(replay.memory.retired))
        if missing <= retired:
            fillers += _retired(replay, missing)
        else:  # more than B groups: drop some
            planned = planned[: (len(planned) + len(fillers)) // multiple * multiple - len(fillers)]
    groups = [*planned, *(PlannedGroup(question, replay.memory.samples) for question in fillers)]
    # Sorting is safe: the plan does not depend on the order before stored answers join.
    return GenerationPlan(sorted(groups, key=lambda group: group.choose > 0), frozenset(fillers))


@contextmanager
def uncounted(trainer: Any) -> Iterator[None]:
    """Keep TRL's metrics and table of completions unchanged in this block, except the number of tokens."""
    metrics, logs = trainer._metrics, trainer._logs
    trainer._metrics = {mode: defaultdict(list) for mode in metrics}
    trainer._logs = copy.deepcopy(logs)
    try:
        yield
        metrics["train"]["num_tokens"] = trainer._metrics["train"]["num_tokens"]
    finally:
        trainer._metrics, trainer._logs = metrics, logs


class Prompts:
    """Prompts of questions that a rollout function or an environment makes."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}  # token ids by question

    def learn(self, asked: Iterable[tuple[int, list[int]]]) -> None:
        """Store prompts; raise ValueError if a question had another one, for which its stored answers were written."""
        for question, ids in asked:
            if self.ids.setdefault(question, ids) != ids:
                raise ValueError(
                    f"train_dataset: row {question} has another prompt than before, but stored answers are scored "
                    "after the prompt of their question; let rollout_func, or reset of the environment, make it from "
                    "the row alone, as the chat template does"
                )


def _retired(replay: Replay, wanted: int) -> list[int]:
    if not wanted:
        return []
    return replay.rng.choice(np.flatnonzero(replay.memory.retired), wanted, replace=False).tolist()


def placed(groups: Sequence[PlannedGroup], stored: StepBatch, samples: int) -> Ints:
    """[S] TRL's rows of stored answers, the last of the K of their group; see `trl_batch.places`.

    Raise ValueError if a group has no fresh answer, more than K, or too few answers for its rows.
    """
    fresh = np.array([group.fresh for group in groups], np.int64)
    joined = np.bincount(stored.group, minlength=len(groups))
    wrong = (fresh < 1) | (fresh > samples) | (fresh + joined < samples)
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(
            f"compose: question {groups[i].question} has {fresh[i]} fresh and {joined[i]} stored answers; in TRL plan "
            f"1 to {samples} fresh ones, and stored ones for all remaining places of {samples}; add groups of stored "
            "answers alone in its function settle"
        )
    return places(stored, len(groups), samples, fresh[stored.group])


def start_replay(trainer: Any) -> Started | None:
    """Fill the experience of a new run from the option `start`, on all processes together; None: the option is not set.

    Raise DataError if the file cannot be read, or no answer in it is usable.
    """
    data, accelerator = trainer.train_dataset, trainer.accelerator

    def grade(answers: Sequence[Answer]) -> list[tuple[float, int]]:
        # TRL gathers rewards, so all processes must grade the same number of answers.
        count = -(-len(answers) // accelerator.num_processes)
        places = (np.arange(count) + count * accelerator.process_index).clip(max=len(answers) - 1)
        mine = [answers[place] for place in places.tolist()]
        inputs = [data[answer.question.index] for answer in mine]
        prompts = [row["prompt"] for row in inputs]
        texts: list[Any] = [
            answer.text if isinstance(prompt, str) else [{"role": "assistant", "content": answer.text}]
            for answer, prompt in zip(mine, prompts, strict=True)
        ]
        trainer._calculate_rewards(inputs, prompts, texts, [answer.tokens.tolist() for answer in mine])
        trainer._pending_extra_logs.clear()  # these logs belong to no generation
        trainer._pending_metrics.clear()
        return [(reward, 0) for reward in trainer._rewards[: len(answers)].tolist()]

    def score(batch: StepBatch) -> Floats:
        return trainer._scores(batch, trainer.temperature).log_prob

    run = Beginning(
        questions=_questions(trainer) if trainer.args.start else (),
        replay=trainer.replay,
        max_tokens=trainer.max_completion_length,
        model=trainer.model.config._name_or_path,
        world=World(accelerator.process_index, accelerator.num_processes, accelerator.device, control=None),
        grade=grade,
        score=score,
        cuts=False,
    )
    vocabulary = trainer._causal_lm(trainer.model).config.get_text_config().vocab_size
    encoding = Encoding(trainer._tokenizer, trainer.eos_token_ids, vocabulary)
    started = start_experience(run, encoding)
    if started and trainer.rollout_func is not None:
        held = trainer.replay.memory.table.held
        trainer.prompts.learn((of.index, list(of.prompt)) for of in run.questions if held[of.index])
    return started


def _questions(trainer: Any) -> list[Question]:
    """Return the rows of a data set of TRL as questions; the gold answer is in the column `answer`."""
    data = trainer.train_dataset
    prompts = list(data["prompt"])
    ids, _, _ = trainer._tokenize_prompts(prompts)
    golds = data["answer"] if "answer" in data.column_names else [""] * len(data)
    return [
        Question(i, tuple(ids[i]), question_text(prompt), marked_answer(str(gold)).strip(), "train_dataset")
        for i, (prompt, gold) in enumerate(zip(prompts, golds, strict=True))
    ]


def question_text(prompt: str | Sequence[Mapping[str, str]]) -> str:
    """Return the question as text, without system messages."""
    if isinstance(prompt, str):
        return prompt
    messages = [Message(one["role"], one["content"]) for one in prompt if one["role"] != "system"]
    return messages[0].content if len(messages) == 1 else as_text(messages)


def save_replay(folder: Path, replay: Replay, generation: int, prompts: Mapping[int, Sequence[int] | TokenIds]) -> None:
    """Write the state of a replay, and the number of generations, to a new folder.

    Of the `prompts`, token ids by question, only those of questions with stored answers are written.
    """
    state = replay.state()
    kept = {question: ids for question, ids in prompts.items() if replay.memory.table.held[question]}
    of_prompts: dict[str, np.ndarray] = {
        "prompt.question": np.array(list(kept), np.int64),
        "prompt.length": np.array(list(map(len, kept.values())), np.int64),
        "prompt.token": np.concatenate([np.empty(0, np.int32), *kept.values()]).astype(np.int32),
    }
    folder.mkdir(parents=True, exist_ok=True)
    saved = {"arrays": write_checked(folder, state.arrays | of_prompts), "values": state.values}
    (folder / STATE).write_text(json.dumps({**saved, "generation": generation}), encoding="utf-8")


def load_replay(folder: Path, replay: Replay) -> tuple[int, dict[int, TokenIds]]:
    """Restore a replay; return the number of generations before the save, and the prompts.

    Raise ValueError if there is no state, it has another number of questions, or a file is damaged.
    """
    if not (folder / STATE).is_file():
        raise ValueError(
            f"{folder} holds no experience: that checkpoint is not from ExGRPOTrainer; to start from its weights, "
            "give it as the model and do not resume"
        )
    saved = json.loads((folder / STATE).read_text(encoding="utf-8"))
    arrays = read_checked(folder, saved["arrays"])
    questions = len(replay.memory.count)
    if len(arrays["count"]) != questions:
        raise ValueError(
            f"{folder} is the experience of {len(arrays['count'])} questions and train_dataset has {questions}: "
            "resume with the data set of the run"
        )
    if lacking := {*OF_QUESTIONS, "retired", LENGTH, "prompt.token"} - set(arrays):
        raise ValueError(
            f"{folder} was written by an earlier version, without {', '.join(sorted(lacking))}: to start from the "
            "weights of that checkpoint, give it as the model and do not resume"
        )
    replay.restore(ReplayState(saved["values"], arrays))
    parts = np.split(arrays["prompt.token"], np.cumsum(arrays["prompt.length"])[:-1])
    prompts = dict(zip(arrays["prompt.question"].tolist(), parts, strict=False))  # of none there is one part
    return int(saved["generation"]), prompts
