"""Evaluate a model on questions: `python -m exgrpo.train.evaluate MODEL --data FILE [FILE ...]`.

Several processes: `deepspeed --num_accelerators 2 --module exgrpo.train.evaluate.program MODEL --data FILE`.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import tyro
import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from rich.console import Console
from rich.progress import track
from rich.table import Table

from exgrpo.train.answers import Answer, Answerer
from exgrpo.train.checkpoint.folder_lock import claim
from exgrpo.train.config import PROMPT_FORMAT, Config, ConfigError, RewardConfig, RolloutConfig, StopString
from exgrpo.train.data.questions import NoPromptFitsError, Question, QuestionSet, load_questions
from exgrpo.train.distributed import World, start
from exgrpo.train.evaluate.scores import SourceScore, average, score, score_all
from exgrpo.train.pretrained.check import check_weights
from exgrpo.train.pretrained.overrides import Overrides
from exgrpo.train.pretrained.tokenizer import DTYPES, Pretrained, load_pretrained
from exgrpo.train.recipe import explain, read_recipe, split_recipe, unfinished
from exgrpo.train.reward.pool import Grader
from exgrpo.train.reward.success import RewardWatch, is_success
from exgrpo.train.rollout import Sampling, Stops
from exgrpo.train.rollout.registry import choose_engine, open_engine
from exgrpo.train.rollout.settings import EngineSettings
from exgrpo.train.seeds import derive_seed

ANSWERS, SCORES, OPTIONS = "answers.jsonl", "scores.json", "options.yaml"


def evaluate(
    answerer: Answerer, questions: QuestionSet, samples: int, sampling: Sampling, seed: int, *, success: float
) -> tuple[SourceScore, dict[str, SourceScore]]:
    """Answer every question `samples` times; all ranks work on it and get the same scores: of all, and by source.

    An answer with a reward of at least `success` is right; all answers to a question that was left out are wrong.
    """
    answers = answerer.answer(questions.questions, [samples] * len(questions), sampling, seed)
    verdicts = [
        (question.source, _identity(question), is_success(answer.reward, success))
        for question, of_question in zip(questions, answers.of_question, strict=True)
        for answer in of_question
    ]
    left_out = [(question.source, _identity(question), samples) for question in questions.left_out]
    return score_all(verdicts, left_out), score(verdicts, left_out)


def _identity(question: Question) -> str:
    return f"{question.text}\0{question.gold}"


class Options(BaseModel):
    """Evaluate a causal LM: Pass@1, avg@k and unbiased pass@k by data source, every answer written down."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: Annotated[str, tyro.conf.Positional] = Field(description="Folder or hub name, or builtin:NAME.")
    overrides: Overrides = Field(
        default_factory=dict,
        description="Values of the model's configuration to change: max_position_embeddings=16384 rope_theta=40000.",
    )
    data: tuple[str, ...] = Field(min_length=1, description="JSONL, JSON or parquet files, hub or builtin names.")
    output: Path = Field(Path("evaluation"), description="Folder for answers.jsonl and scores.json.")
    split: str = Field("test", description="Split of hub and builtin data sets.")
    limit: int | None = Field(None, ge=1, description="Use only so many questions of each data set.")
    samples: int = Field(1, ge=1, description="Answers per row.")
    avg: dict[str, PositiveInt] = Field(
        default_factory=dict,
        description="Answers per question for single data sources (aime 32 amc 32); rows that repeat a question count.",
    )
    temperature: float = Field(0.6, gt=0, description="Sampling temperature (the paper's 0.6).")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1 = off.")
    max_tokens: int = Field(8192, ge=1, description="Longest response.")
    stop: tuple[StopString, ...] = Field((), description="Strings that end an answer; they are no part of its text.")
    max_prompt_tokens: int = Field(1024, ge=1, description="Longer prompts are not asked; they count as wrong.")
    chat: bool = Field(True, description="Format prompts by the tokenizer's chat template.")
    system_prompt: str | None = Field(None, description="System message put before every question.")
    keep_system: bool = Field(False, description="Use the data row's own system message.")
    prompt_format: str = Field(PROMPT_FORMAT, description="Format string around every question.")
    answer_prefix: str = Field(
        "", description="Text that opens every answer, such as '<think>\\n'; it ends the prompt."
    )
    reward: str = Field(
        "math_no_think", description="math, math_no_think, package.module:function or file.py:function."
    )
    success: float = Field(
        RewardConfig.model_fields["success"].default,
        allow_inf_nan=False,
        description="An answer with a reward of at least this is right.",
    )
    workers: int = Field(2, ge=1, description="Grading processes per rank.")
    time_limit: float = Field(5.0, gt=0, description="Seconds to grade an answer.")
    dtype: str = Field("bf16", pattern="^(fp32|bf16)$", description="fp32 or bf16.")
    batch_tokens: int = Field(65536, ge=1, description="Prompt + response tokens generated at once per rank.")
    engine: Literal["auto", "transformers", "vllm"] = Field(
        "auto", description="What generates; auto: vLLM where it can, else transformers."
    )
    kv_cache_gib: float = Field(1.0, gt=0, description="vLLM: GiB per rank for keys and values.")
    chunk: int = Field(64, ge=1, description="Rows between two writes; an interrupted evaluation repeats one chunk.")
    seed: int = Field(0, ge=0, description="Seed of the samples.")


def parse_options(argv: Sequence[str]) -> Options:
    """Resolve `[--recipe FILE] MODEL --data FILE [--field VALUE ...]`; the command line beats the recipe."""
    recipe, rest = split_recipe(argv)
    return tyro.cli(
        Options,
        args=rest,
        default=defaults(recipe),
        config=(tyro.conf.FlagConversionOff,),
        prog="python -m exgrpo.train.evaluate",
        description=f"{Options.__doc__} --recipe FILE reads a YAML recipe before the options below are applied.",
    )


def defaults(recipe: Path | None) -> Options:
    """The options in a YAML recipe, or the default ones; model and data, if not there, are left to the command line.

    The recipe of a training run, such as the config.yaml in its folder, means: ask and grade as that run does.
    """
    values = read_recipe(recipe) if recipe else {}
    if "policy" in values:
        values = as_trained(unfinished(values, str(recipe)))
    try:
        checked = Options.model_validate({"model": "", "data": [""], **values})
    except ValidationError as error:
        raise ConfigError(explain(error, Options, str(recipe))) from None
    return checked.model_copy(update={key: tyro.MISSING for key in ("model", "data") if key not in values})


def as_trained(config: Config) -> dict[str, Any]:
    """The options with which a run's answers to its held-out questions are asked for and graded."""
    data, rollout, reward, sampling = config.data, config.rollout, config.reward, config.evaluation
    prompt = ("chat", "system_prompt", "keep_system", "prompt_format", "answer_prefix", "max_prompt_tokens")
    return {
        **{name: getattr(data, name) for name in prompt},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "samples": sampling.samples,
        "max_tokens": rollout.max_tokens,
        "stop": rollout.stop,
        "dtype": config.policy.dtype,
        "reward": reward.function,
        "success": reward.success,
        "time_limit": reward.time_limit,
        "overrides": config.policy.overrides,
    }


def load(options: Options, tokenizer: Any) -> tuple[list[Question], list[Question]]:
    """The questions of all data sets to be asked, and those that are left out because their prompts are too long.

    Raises:
        NoPromptFitsError: no prompt of any data set fits.
    """
    questions: list[Question] = []
    left_out: list[Question] = []
    problem: NoPromptFitsError | None = None
    for source in options.data:
        try:
            of_source = load_questions(
                source,
                tokenizer,
                split=options.split,
                chat=options.chat,
                prompt_format=options.prompt_format,
                system_prompt=options.system_prompt,
                keep_system=options.keep_system,
                answer_prefix=options.answer_prefix,
                max_prompt_tokens=options.max_prompt_tokens,
                limit=options.limit,
                seed=options.seed,
            )
        except NoPromptFitsError as error:
            problem = error
            left_out += error.left_out
        else:
            questions += of_source.questions
            left_out += of_source.left_out
    if problem and not questions:
        raise problem
    return questions, left_out


def answers_per_row(questions: Sequence[Question], options: Options) -> list[int]:
    """How often each row is answered: `samples` times, or such that `avg` answers to the question come together.

    A file that repeats every row of a source 32 times and one that does not so give avg@32 alike.
    """
    repeats = Counter((question.source, _identity(question)) for question in questions)
    return [
        math.ceil(options.avg[question.source] / repeats[question.source, _identity(question)])
        if question.source in options.avg
        else options.samples
        for question in questions
    ]


class AnswerFile:
    """The answers written so far, a chunk at a time; what an interruption left of a chunk is dropped.

    Args:
        folder: of the evaluation.
        options: it was begun with; going on with others is refused.
        expected: answers of each chunk when it is complete.

    Raises:
        ValueError: the folder holds an evaluation with other options.
    """

    def __init__(self, folder: Path, options: Options, expected: Sequence[int]) -> None:
        self.path = folder / ANSWERS
        text = yaml.safe_dump(options.model_dump(mode="json"), sort_keys=False)
        if (folder / OPTIONS).exists() and (folder / OPTIONS).read_text(encoding="utf-8") != text:
            raise ValueError(f"output: {folder} holds an evaluation with other options; choose another --output")
        (folder / OPTIONS).write_text(text, encoding="utf-8")
        found: dict[int, list[dict[str, Any]]] = {}
        for record in self._records():
            found.setdefault(record["chunk"], []).append(record)
        self.done = {chunk for chunk, records in found.items() if len(records) == expected[chunk]}
        partial = self.path.with_suffix(".tmp")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(r) + "\n" for chunk in sorted(self.done) for r in found[chunk])
        partial.replace(self.path)

    def _records(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return  # the line that an interruption cut

    def append(self, chunk: int, questions: Sequence[Question], answers: Sequence[Sequence[Answer]]) -> None:
        """Write the answers of a chunk."""
        with self.path.open("a", encoding="utf-8") as file:
            for question, of_question in zip(questions, answers, strict=True):
                for answer in of_question:
                    record = {
                        "chunk": chunk,
                        "source": question.source,
                        "question": question.text,
                        "gold": question.gold,
                        "response": answer.text,
                        "reward": answer.reward,
                        "finished": answer.rollout.finished,
                        "tokens": len(answer.rollout.response),
                    }
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def scores(self, left_out: Sequence[tuple[str, str, int]], success: float) -> dict[str, SourceScore]:
        """Scores of everything in the file, and of the rows that were left out."""
        verdicts = (
            (r["source"], f"{r['question']}\0{r['gold']}", is_success(r["reward"], success)) for r in self._records()
        )
        return score(verdicts, left_out)

    def rewards(self) -> npt.NDArray[np.float64]:
        """[N] rewards of all answers in the file."""
        return np.array([record["reward"] for record in self._records()], dtype=np.float64)


def engine_settings(options: Options, pretrained: Pretrained, questions: Sequence[Question]) -> EngineSettings:
    """What an evaluation asks of its engine."""
    shared = set(RolloutConfig.model_fields) & set(Options.model_fields)
    return EngineSettings(
        source=pretrained.model,
        dtype=DTYPES[options.dtype],
        eos=pretrained.eos,
        pad=pretrained.pad,
        max_prompt_tokens=max((len(question.prompt) for question in questions), default=1),
        # Nothing else needs the memory of an evaluation's engine.
        rollout=RolloutConfig(**options.model_dump(include=shared - {"samples"}), sleep_level=0),
    )


def run(options: Options, world: World, resources: ExitStack) -> dict[str, SourceScore]:
    """Answer what is not answered yet, then score everything; the same on every rank."""
    pretrained = load_pretrained(options.model, options.overrides)
    questions, left_out = load(options, pretrained.tokenizer)
    chunks = [questions[i : i + options.chunk] for i in range(0, len(questions), options.chunk)]
    counts = answers_per_row([*questions, *left_out], options)
    wrong = [(q.source, _identity(q), count) for q, count in zip(left_out, counts[len(questions) :], strict=True)]
    of_chunk = [counts[: len(questions)][i : i + options.chunk] for i in range(0, len(questions), options.chunk)]
    settings = engine_settings(options, pretrained, questions)
    choice = choose_engine(settings, world)
    check_weights(pretrained.model, world)
    # An evaluation keeps its engine: what is installed later changes nothing when it goes on.
    options = options.model_copy(update={"engine": choice.name})
    if world.is_main:
        options.output.mkdir(parents=True, exist_ok=True)
        resources.enter_context(claim(options.output))
    file = AnswerFile(options.output, options, [sum(of) for of in of_chunk]) if world.is_main else None
    done = world.gather(file.done if file else set())[0]
    grader = Grader(options.reward, workers=options.workers, time_limit=options.time_limit)
    resources.callback(grader.close)
    engine = open_engine(choice, settings, world)
    resources.callback(engine.close)
    answerer = Answerer(engine, grader, pretrained.tokenizer.decode, world)
    sampling = Sampling(
        options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        stop=Stops(options.stop, pretrained.tokenizer.decode),
    )
    console = Console(quiet=not world.is_main)
    console.print(f"{len(questions)} rows, {len(done)} of {len(chunks)} chunks done")
    console.print(f"answers by {choice}")
    for source, count in sorted(Counter(question.source for question in left_out).items()):
        console.print(
            f"{source}: {count} rows have prompts of more than {options.max_prompt_tokens} tokens and count as wrong "
            "(max_prompt_tokens)",
            highlight=False,
            soft_wrap=True,
        )
    if absent := sorted(set(options.avg) - {question.source for question in (*questions, *left_out)}):
        console.print(f"avg: no rows come from {', '.join(absent)}")
    for number in track([n for n in range(len(chunks)) if n not in done], "evaluating", console=console):
        seed = derive_seed(options.seed, "evaluation", number)
        answers = answerer.answer(chunks[number], of_chunk[number], sampling, seed)
        if file:
            file.append(number, chunks[number], answers.of_question)
    watch = RewardWatch(options.success, "success", patience=1)
    if file and (note := watch.observe(file.rewards())):
        console.print(note, highlight=False, soft_wrap=True)
    return world.gather(file.scores(wrong, options.success) if file else {})[0]


def write(scores: dict[str, SourceScore], options: Options, console: Console) -> None:
    """Print the scores as a table and write them to scores.json, with the questions that were left out by source."""
    ks = sorted({k for source in scores.values() for k in source.pass_at})
    table = Table("source", "questions", "left out", "answers", "Pass@1", "± s.e.", *(f"pass@{k}" for k in ks))
    for name, source in scores.items():
        pass_at = [f"{source.pass_at[k]:.3f}" if k in source.pass_at else "-" for k in ks]
        counts = [str(source.questions), str(source.left_out), str(source.answers)]
        table.add_row(name, *counts, f"{source.pass_rate:.3f}", f"{source.standard_error:.3f}", *pass_at)
    table.add_row("average", "", "", "", f"{average(scores):.3f}", "")
    console.print(table)
    result = {"average": average(scores), "sources": {name: asdict(source) for name, source in scores.items()}}
    (options.output / SCORES).write_text(json.dumps(result, indent=2), encoding="utf-8")
    console.print(f"answers to read and scores are in {options.output}", highlight=False)


def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit status."""
    with ExitStack() as resources:
        try:
            options = parse_options(argv)
            world = start(timeout_minutes=30)
            scores = run(options, world, resources)
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        if world.is_main:
            write(scores, options, Console())
    return 0
