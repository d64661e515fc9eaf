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
from exgrpo.train.checkpoint.store import ExperienceStore, read_checked, write_checked
from exgrpo.train.common.distributed import World
from exgrpo.train.common.step_batch import Floats, Ints, StepBatch
from exgrpo.train.data.distinct import canonical, first_places
from exgrpo.train.data.questions import Question
from exgrpo.train.data.rows import Message, as_text, marked_answer
from exgrpo.train.replay import PlannedGroup, Replay, ReplayState
from exgrpo.train.run.start_experience import Answer, Beginning, Encoding, Started, start_experience

STATE = "state.json"
ROW_NUMBERS = ("index", "__index_level_0__")
"""Columns, also of `extra_info`, in which verl and pandas number rows: copies of a question differ in them."""


def distinct_rows(data: Any, ignored: Collection[str] = ROW_NUMBERS) -> list[int]:
    """Return the places of the rows that ask another question than all rows before.

    Args:
        data: a `datasets.Dataset`, or rows by their places.
        ignored: columns in which rows that ask the same question may differ; any other may decide on a reward.
    """

    def asked(row: Mapping[str, Any]) -> str:
        extra = row.get("extra_info")
        both = {**row, "extra_info": _without(extra, ignored)} if isinstance(extra, Mapping) else row
        return canonical(_without(both, ignored))

    if not hasattr(data, "iter"):
        return first_places((asked(data[place]) for place in range(len(data))), set())
    batches = data.with_format(None).iter(batch_size=1024)  # one row at a time takes five times as long
    rows = (dict(zip(batch, row, strict=True)) for batch in batches for row in zip(*batch.values(), strict=True))
    return first_places(map(asked, rows), set())


def _without(columns: Mapping[str, Any], ignored: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in columns.items() if name not in ignored}


class Plan(NamedTuple):
    """The questions of a generation.

    Attributes:
        groups: one for each, in the order of their rows; those that stored answers join come last.
        fillers: questions that are asked only to fill up.
    """

    groups: list[PlannedGroup]
    fillers: frozenset[int]


def plan_generation(replay: Replay, batch: int, step: int, multiple: int = 1) -> Plan:
    """The groups of the next generation, a multiple of `multiple`.

    Where too few questions are unsolved for `batch` groups, retired ones fill up: they teach little, and the batch
    keeps its shape. What a method settles after grading has its shape from `settle`, and is not filled so.

    Args:
        replay: decides.
        batch: B, questions of a generation.
        step: number of the generation.
        multiple: what the number of groups has to be a multiple of, for every process to have as many rows; B is one.
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
        else:  # of more than B groups, some are not asked
            planned = planned[: (len(planned) + len(fillers)) // multiple * multiple - len(fillers)]
    groups = [*planned, *(PlannedGroup(question, replay.memory.samples) for question in fillers)]
    # The order does not matter to what is settled before an answer joins.
    return Plan(sorted(groups, key=lambda group: group.choose > 0), frozenset(fillers))


@contextmanager
def uncounted(trainer: Any) -> Iterator[None]:
    """Within it, TRL's metrics and table of completions stay as they are; tokens count wherever they come."""
    metrics, logs = trainer._metrics, trainer._logs
    trainer._metrics = {mode: defaultdict(list) for mode in metrics}
    trainer._logs = copy.deepcopy(logs)
    try:
        yield
        metrics["train"]["num_tokens"] = trainer._metrics["train"]["num_tokens"]
    finally:
        trainer._metrics, trainer._logs = metrics, logs


class Prompts:
    """The prompts of questions where a rollout function or an environment makes them.

    Attributes:
        ids: token ids by question.
    """

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}

    def learn(self, asked: Iterable[tuple[int, list[int]]]) -> None:
        """Remember what questions were asked with.

        Raises:
            ValueError: a question has had another prompt, behind which stored answers to it were written.
        """
        for question, ids in asked:
            if self.ids.setdefault(question, ids) != ids:
                raise ValueError(
                    f"train_dataset: row {question} has another prompt than before, and stored answers are scored "
                    "behind the prompt of their question; let rollout_func, or reset of the environment, make it from "
                    "the row alone, as the chat template does"
                )


def _retired(replay: Replay, wanted: int) -> list[int]:
    """Questions that have left for good."""
    if not wanted:
        return []
    return replay.rng.choice(np.flatnonzero(replay.memory.retired), wanted, replace=False).tolist()


def placed(groups: Sequence[PlannedGroup], stored: StepBatch, samples: int) -> Ints:
    """[S] the places of stored answers, which are the last of the K of their group; see `trl_batch.places`.

    Raises:
        ValueError: a group has no fresh answer, more than K, or too few answers for its places.
    """
    fresh = np.array([group.fresh for group in groups], np.int64)
    joined = np.bincount(stored.group, minlength=len(groups))
    wrong = (fresh < 1) | (fresh > samples) | (fresh + joined < samples)
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(
            f"compose: question {groups[i].question} has {fresh[i]} fresh and {joined[i]} stored answers; in TRL a "
            f"group is planned with 1 to {samples} fresh ones, and with stored ones in all places that are left of "
            f"{samples}; groups of stored answers alone come from its function settle"
        )
    return places(stored, len(groups), samples, fresh[stored.group])


def start_replay(trainer: Any) -> Started | None:
    """Fill the experience of a new run with what the option `start` names; all processes call it together.

    Args:
        trainer: an ExGRPOTrainer before its first generation.

    Returns:
        what was stored; None: the option is not given.

    Raises:
        DataError: the file cannot be read, or nothing of it can be used.
    """
    data, accelerator = trainer.train_dataset, trainer.accelerator

    def grade(answers: Sequence[Answer]) -> list[tuple[float, int]]:
        # TRL gathers rewards, so all processes grade as many answers.
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
        trainer._pending_extra_logs.clear()  # they are of no generation
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
        held = set(trainer.replay.memory.table.column("question").tolist())
        trainer.prompts.learn((of.index, list(of.prompt)) for of in run.questions if of.index in held)
    return started


def _questions(trainer: Any) -> list[Question]:
    """The rows of a data set of TRL; the gold answer is in the column `answer`, as in rows of questions."""
    data = trainer.train_dataset
    prompts = list(data["prompt"])
    ids, _, _ = trainer._tokenize_prompts(prompts)
    golds = data["answer"] if "answer" in data.column_names else [""] * len(data)
    return [
        Question(i, tuple(ids[i]), question_text(prompt), marked_answer(str(gold)).strip(), "train_dataset")
        for i, (prompt, gold) in enumerate(zip(prompts, golds, strict=True))
    ]


def question_text(prompt: str | Sequence[Mapping[str, str]]) -> str:
    """The question as people read it, without a system message."""
    if isinstance(prompt, str):
        return prompt
    said = [Message(one["role"], one["content"]) for one in prompt if one["role"] != "system"]
    return said[0].content if len(said) == 1 else as_text(said)


def save_replay(folder: Path, replay: Replay, generation: int, prompts: Prompts | None = None) -> None:
    """Write the state of a replay, and the number of generations so far, to a folder, which is made.

    Of the prompts, those of questions with stored answers are written.
    """
    state = replay.state()
    held = set(replay.memory.table.column("question").tolist())
    kept = {question: ids for question, ids in prompts.ids.items() if question in held} if prompts else {}
    index = ExperienceStore(folder).save(state.trajectories)
    saved = {
        "arrays": write_checked(folder, {**index, **state.arrays}),
        "open": state.values["replay_open"],
        "generation": generation,
        "rewards_seen": state.values["rewards_seen"],
        "pool_position": state.values["pool_position"],
        **state.values["generators"],
        **({"prompts": kept} if kept else {}),
    }
    (folder / STATE).write_text(json.dumps(saved), encoding="utf-8")


def load_replay(folder: Path, replay: Replay, prompts: Prompts | None = None) -> int:
    """Let a replay go on from a saved state, with the prompts in it.

    Returns:
        the number of generations that are in it.

    Raises:
        ValueError: there is none, it belongs to another number of questions, or a file is damaged.
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
    if lacking := set(replay.memory.arrays()) - set(arrays):
        raise ValueError(
            f"{folder} is of an earlier version, which did not keep {', '.join(sorted(lacking))}: to start from the "
            "weights of that checkpoint, give it as the model and do not resume"
        )
    values = {
        "replay_open": saved["open"],
        "rewards_seen": saved["rewards_seen"],
        "pool_position": saved["pool_position"],
        "generators": {"pool": saved["pool"], "replay": saved["replay"]},
    }
    if prompts is not None:
        prompts.ids = {int(question): ids for question, ids in saved.get("prompts", {}).items()}
    trajectories = ExperienceStore(folder).load(arrays)
    replay.restore(ReplayState(values, arrays, trajectories))
    return int(saved["generation"])
