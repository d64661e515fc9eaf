"""An evaluation from its options to its scores; an interrupted one resumes from the answers on disk."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.progress import track

from exgrpo.tools.evaluate.options import LONGEST_ANSWER, EvaluationOptions
from exgrpo.train.common.distributed import World, agree
from exgrpo.train.common.durable import claim
from exgrpo.train.common.errors import HaltError, OutputError, os_errors_as, printable
from exgrpo.train.common.plain import read_log
from exgrpo.train.common.seeds import derive_seed
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.common.success import RewardWatch, is_success
from exgrpo.train.config.policy import LoraConfig, with_saved
from exgrpo.train.config.rollout import SAMPLED, RolloutConfig
from exgrpo.train.config.sources import names_of, settings_of
from exgrpo.train.data.files import HELD_OUT_SEED, read_rows
from exgrpo.train.data.prompts import PromptFormat
from exgrpo.train.data.questions import NoPromptFitsError, Question, contradictions, question_set
from exgrpo.train.data.selection import COUNTED_WRONG, gold_note, unearnable_pairs
from exgrpo.train.metrics.soundness import ungraded
from exgrpo.train.policy.adapters import adapted_model, check_adapters
from exgrpo.train.policy.check import check_dtype, check_weights
from exgrpo.train.policy.policy import WholeWeights
from exgrpo.train.policy.tokenizer import DTYPES, Pretrained, check_prompts, load_pretrained
from exgrpo.train.reward.contract import ALL_COLUMNS
from exgrpo.train.reward.form import Graded, tell
from exgrpo.train.reward.pool import Grader
from exgrpo.train.rollout.answers import RolloutWorker
from exgrpo.train.rollout.engine import EngineSettings, Sampling
from exgrpo.train.rollout.registry import choose_engine, open_engine
from exgrpo.train.rollout.stops import Stops
from exgrpo.train.rollout.turns.conversations import conversations_of
from exgrpo.train.run.validation_scores import SourceScore, Verdict, question_key, score, unasked

ANSWERS, OPTIONS = "answers.jsonl", "options.yaml"


class AnswerFile:
    """The answers of completed chunks.

    It drops incomplete chunks of an interruption, and chunks whose questions differ from `expected`, which gives text
    and gold answer of the question of each answer, by chunk.

    Raises:
        OutputError: the folder holds an evaluation with other options.
    """

    def __init__(self, folder: Path, options: EvaluationOptions, expected: Sequence[list[tuple[str, str]]]) -> None:
        self.path = folder / ANSWERS
        # How it is computed may be otherwise when it goes on.
        text = yaml.safe_dump(options.model_dump(mode="json", exclude={"distributed"}), sort_keys=False)
        if (folder / OPTIONS).exists() and (folder / OPTIONS).read_text(encoding="utf-8") != text:
            raise OutputError(
                f"output: {folder} holds an evaluation with other options; choose another --output.folder"
            )
        (folder / OPTIONS).write_text(text, encoding="utf-8")
        found: dict[int, list[dict[str, Any]]] = {}
        for record in self.records():
            found.setdefault(record["chunk"], []).append(record)
        asked = {chunk: [(one["question"], one["gold"]) for one in records] for chunk, records in found.items()}
        self.done = {chunk for chunk, questions in enumerate(expected) if asked.get(chunk) == questions}
        partial = self.path.with_suffix(".tmp")
        with partial.open("w", encoding="utf-8") as file:
            kept = (record for chunk in sorted(self.done) for record in found[chunk])
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
        partial.replace(self.path)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield all complete records of the file."""
        if not self.path.exists():
            return
        for line in read_log(self.path):
            if line.problem:
                return  # cut by an interruption
            yield line.value

    def append(self, chunk: int, questions: Sequence[Question], batch: StepBatch) -> None:
        """Append the answers of a chunk; group i of the batch answers question i."""
        with self.path.open("a", encoding="utf-8") as file:
            for row, group in enumerate(batch.group):
                question = questions[group]
                record = {
                    "chunk": chunk,
                    "source": question.source,
                    "question": question.text,
                    "gold": question.gold,
                    "response": batch.text[row],
                    "graded_by": question.reward,
                    "reward": batch.reward.item(row),
                    "key": batch.key.item(row),
                    "finished": batch.finished.item(row),
                    "tokens": batch.length.item(row),
                }
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


def load(options: EvaluationOptions, tokenizer: Any, *, progress: bool) -> tuple[list[Question], list[Question]]:
    """Return the questions of all data sets, and those with too long prompts; raise NoPromptFitsError if all are."""
    questions: list[Question] = []
    left_out: list[Question] = []
    problem: NoPromptFitsError | None = None
    for source in options.data.test:
        own = settings_of(source, options.data.sources)
        prompts, limit = PromptFormat.from_source(source, options.data), options.data.test_limit
        rows = read_rows(
            source,
            split=options.data.test_split,
            limit=limit,
            seed=HELD_OUT_SEED,
            columns=ALL_COLUMNS,
            names=names_of(source, options.data),
            reward=options.reward.function or own.reward,
        )
        try:
            of_source = question_set(source, rows, tokenizer, prompts, limit=limit, progress=progress, stop=own.stop)
        except NoPromptFitsError as error:
            problem = error
            left_out += error.left_out
        else:
            questions += of_source.questions
            left_out += of_source.left_out
    if problem and not questions:
        raise problem
    return questions, left_out


def answers_per_row(questions: Sequence[Question], options: EvaluationOptions) -> list[int]:
    """Return the number of answers per row: `samples`, or enough that all rows of a question add up to `avg`.

    avg@32 is thus the same for a file that repeats every row of a source 32 times and one that does not.
    """
    keys = [(question.source, question_key(question.text, question.gold)) for question in questions]
    repeats, avg = Counter(keys), options.rollout.avg
    return [math.ceil(avg[key[0]] / repeats[key]) if key[0] in avg else options.rollout.samples for key in keys]


def engine_settings(
    options: EvaluationOptions, pretrained: Pretrained, questions: Sequence[Question]
) -> EngineSettings:
    """Return the engine's settings; it never sleeps, since nothing else needs its memory."""
    return EngineSettings(
        source=pretrained.model,
        dtype=DTYPES[options.policy.dtype],
        eos=pretrained.eos,
        pad=pretrained.pad,
        max_prompt_tokens=max((len(question.prompt) for question in questions), default=1),
        rollout=RolloutConfig(**options.rollout.model_dump(exclude={*SAMPLED, "avg"}), sleep_level=0),
    )


def fitted(options: EvaluationOptions, pretrained: Pretrained, questions: Sequence[Question]) -> EvaluationOptions:
    """Return the options with `max_tokens` set; the default is as long as the model's positions allow."""
    if options.rollout.max_tokens is not None:
        return options
    prompt = max((len(question.prompt) for question in questions), default=1)
    room = LONGEST_ANSWER if pretrained.model.positions is None else pretrained.model.positions - prompt
    rollout = options.rollout.model_copy(update={"max_tokens": max(1, min(LONGEST_ANSWER, room))})
    return options.model_copy(update={"rollout": rollout})


def run(options: EvaluationOptions, world: World, resources: ExitStack) -> dict[str, SourceScore]:
    """Generate the missing answers, then score all; the result is the same on every rank."""
    adapters = with_saved(LoraConfig(path=options.lora.path))
    pretrained = load_pretrained(options.model, options.policy.overrides, adapters.path)
    questions, left_out = load(options, pretrained.tokenizer, progress=world.is_main)
    check_prompts(pretrained, questions)
    counts = answers_per_row([*questions, *left_out], options)
    counts, of_left_out = counts[: len(questions)], counts[len(questions) :]
    chunks = [slice(start, start + options.chunk) for start in range(0, len(questions), options.chunk)]
    options = fitted(options, pretrained, questions)
    settings = engine_settings(options, pretrained, questions)
    choice = choose_engine(settings, world)
    if choice.name == "transformers":
        check_dtype(options.policy.dtype, world.device)
    check_weights(pretrained.model, world)
    if adapters.path:
        agree(world, lambda: check_adapters(adapters, pretrained.model))
    # Store the chosen engine: a resumed evaluation must not switch to one that was installed meanwhile.
    options = options.model_copy(update={"rollout": options.rollout.model_copy(update={"engine": choice.name})})
    unwritable = f"output: {options.output.folder} cannot be written"
    if world.is_main:
        with os_errors_as(OutputError, unwritable):
            options.output.folder.mkdir(parents=True, exist_ok=True)
        resources.enter_context(claim(options.output.folder))
    with os_errors_as(OutputError, unwritable):
        expected = [
            [(one.text, one.gold) for one, n in zip(questions[chunk], counts[chunk], strict=True) for _ in range(n)]
            for chunk in chunks
        ]
        file = AnswerFile(options.output.folder, options, expected) if world.is_main else None
    done = world.gather(file.done if file else set())[0]
    grader = Grader.of((question.reward for question in questions), options.reward)
    resources.callback(grader.close)
    engine = open_engine(choice, settings, world)
    resources.callback(engine.close)
    if adapters.path:
        adapted = adapted_model(pretrained.model, adapters, settings.dtype, settings.attention)
        engine.push_weights(WholeWeights(adapted))
        del adapted
    conversations = conversations_of(options.environment, pretrained)
    rollout_worker = RolloutWorker(engine, grader, pretrained.tokenizer.decode, world, conversations)
    console = Console(quiet=not world.is_main)
    console.print(f"{len(questions)} rows, {len(done)} of {len(chunks)} chunks done")
    console.print(f"answers by {choice}")
    if world.is_main:
        _warn(options, questions, left_out, console)
    sampling = Sampling(
        settings.rollout.max_tokens,
        temperature=options.rollout.temperature,
        top_p=options.rollout.top_p,
        stop=Stops(options.rollout.stop, pretrained.tokenizer.decode),
    )
    for number in track([n for n in range(len(chunks)) if n not in done], "evaluating", console=console):
        chunk = chunks[number]
        batch = _answered(rollout_worker, questions[chunk], counts[chunk], sampling, number, options, console)
        if file:
            with os_errors_as(OutputError, unwritable):
                file.append(number, questions[chunk], batch)
    wrong = []
    for question, count in zip(left_out, of_left_out, strict=True):
        wrong += unasked(question.source, question_key(question.text, question.gold), count)
    with os_errors_as(OutputError, f"output: {options.output.folder} cannot be read"):
        return _scores(file, wrong, options, world, console)


def _answered(
    rollout_worker: RolloutWorker,
    questions: Sequence[Question],
    counts: Sequence[int],
    sampling: Sampling,
    number: int,
    options: EvaluationOptions,
    console: Console,
) -> StepBatch:
    """Return the graded answers of a chunk; raise HaltError if too many could not be graded."""
    batch = rollout_worker.answer(questions, counts, sampling, derive_seed(options.seed, "evaluation", number))
    for note in rollout_worker.news():
        console.print(printable(note), highlight=False, markup=False, soft_wrap=True)
    if batch.counts.failed_fraction > options.reward.max_failed:
        raise HaltError(
            f"{batch.counts.failed_fraction:.0%} of {len(batch)} answers could not be graded: "
            f"{ungraded(batch.counts)}. The same command resumes with these questions"
        )
    return batch


def _scores(
    file: AnswerFile | None, wrong: Sequence[Verdict], options: EvaluationOptions, world: World, console: Console
) -> dict[str, SourceScore]:
    """Score all answers in rank 0's file and the rows left out; the result is the same on every rank."""
    records, success = list(file.records()) if file else [], options.reward.success
    watch = RewardWatch(success, "reward.success", patience=1)
    if records and (note := watch.observe(np.array([record["reward"] for record in records], np.float64))):
        console.print(note, highlight=False, soft_wrap=True)
    graded = [Graded(record["response"], record["gold"], record["graded_by"]) for record in records]
    formed = tell("form", options.reward, graded, world)
    found = tell("found", options.reward, graded, world)
    return world.gather(score([*verdicts(records, formed, found, success), *wrong]) if file else {})[0]


def verdicts(
    records: Sequence[dict[str, Any]], formed: Sequence[bool | None], found: Sequence[bool | None], success: float
) -> Iterator[Verdict]:
    """Yield a verdict per record; `formed` and `found`: the answer has the form, a final answer; None: unknown."""
    for record, has_form, has_answer in zip(records, formed, found, strict=True):
        key = question_key(record["question"], record["gold"])
        right = is_success(record["reward"], success)
        yield Verdict(record["source"], key, right, record["finished"], has_form, has_answer, record["key"])


def _warn(
    options: EvaluationOptions, questions: Sequence[Question], left_out: Sequence[Question], console: Console
) -> None:
    """Print rows that are left out, cannot be right or contradict others, and sources in `rollout.avg` without rows."""
    pairs = unearnable_pairs(questions, options.reward)
    for note in filter(None, (gold_note(questions, pairs, COUNTED_WRONG), contradictions(questions))):
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    for source, count in sorted(Counter(question.source for question in left_out).items()):
        console.print(
            f"{source}: {count} rows have prompts of more than {options.data.max_prompt_tokens} tokens and count as "
            "wrong (data.max_prompt_tokens)",
            highlight=False,
            soft_wrap=True,
        )
    if absent := sorted(set(options.rollout.avg) - {question.source for question in (*questions, *left_out)}):
        console.print(f"rollout.avg: no rows come from {', '.join(absent)}")
