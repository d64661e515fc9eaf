"""From the command line to the results: set everything up, train, evaluate before and after, say where things are."""

import datetime
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console

from exgrpo.train.answers import Answerer
from exgrpo.train.checkpoint.checkpoint import CheckpointError, Checkpoints
from exgrpo.train.checkpoint.durable import write_whole
from exgrpo.train.checkpoint.folder_lock import claim
from exgrpo.train.checkpoint.resume import AUTO, FINISHED, check_continuation, locate, saved_config
from exgrpo.train.config import Config, ConfigError
from exgrpo.train.data.questions import QuestionSet, load_questions
from exgrpo.train.distributed import World, start
from exgrpo.train.evaluate.held_out import evaluate
from exgrpo.train.metrics.display import Display
from exgrpo.train.metrics.step import RunLog
from exgrpo.train.metrics.trackers import check_trackers, open_trackers
from exgrpo.train.policy.zero3 import Policy
from exgrpo.train.preflight import PreflightError, preflight
from exgrpo.train.pretrained.check import check_weights
from exgrpo.train.pretrained.tokenizer import Pretrained, load_pretrained
from exgrpo.train.recipe import parse_args, to_yaml
from exgrpo.train.report.page import ReportError, write_report
from exgrpo.train.reward.pool import Grader
from exgrpo.train.rollout import RolloutError, Sampling, text_of
from exgrpo.train.rollout.registry import Choice, choose_engine, open_engine
from exgrpo.train.rollout.settings import training_settings
from exgrpo.train.seeds import derive_seed
from exgrpo.train.trainer import StepResult, Trainer
from exgrpo.train.weight_check import WeightMismatchError, check_engine

T = TypeVar("T")
PROBE_QUESTIONS = 4
PROBE_TOKENS = 32


def main(argv: list[str]) -> int:
    """Run the program; returns its exit status."""
    _quiet()
    with ExitStack() as resources:
        try:
            config, folder = _configure(argv)
            run = Run(config, start(config.distributed.timeout_minutes), resources, resume=folder)
        except (ConfigError, ValueError, OSError, WeightMismatchError, CheckpointError, RolloutError) as error:
            return _fail(error)
        try:
            run.train()
        except (CheckpointError, WeightMismatchError, RolloutError, PreflightError) as error:
            return _fail(error)
    return 0


def _configure(argv: list[str]) -> tuple[Config, Path | None]:
    """The configuration, and the folder of the run that goes on with it (None: a new one)."""
    config = parse_args(argv)
    folder = locate(config)
    if folder is not None:
        saved = saved_config(folder)
        config = parse_args(argv, saved)
        check_continuation(config, saved)
    check_trackers(config.output.trackers)
    return config, folder


def _fail(error: Exception) -> int:
    rank = os.environ.get("RANK", "0")
    print(f"error: {error}" if rank == "0" else f"error on rank {rank}: {error}", file=sys.stderr)
    return 2


def _quiet() -> None:
    """Leave the console to the display: libraries speak from warnings upwards."""
    import transformers

    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


class Run:
    """A run that is set up and checked.

    Args:
        config: what to do.
        world: the processes that do it.
        resources: closes what the run opens.
        resume: folder of the run to go on with; None: a new one.

    Raises:
        ValueError, OSError: where something about the input is wrong; the message names it.
        WeightMismatchError: where the rollout engine computes another policy than the trainer.
        CheckpointError: where the run cannot go on from its checkpoints.
    """

    def __init__(self, config: Config, world: World, resources: ExitStack, *, resume: Path | None = None) -> None:
        self.world = world
        self.console = Console() if world.is_main else None
        self.pretrained = load_pretrained(config.policy.path, config.policy.overrides)
        settings = training_settings(config, self.pretrained)
        self.choice = choose_engine(settings, world)
        # The run keeps its engine: what is installed later changes nothing when it goes on.
        config = _with_engine(config, self.choice)
        self.config = config
        self.train_set, self.test_set = load_data(config, self.pretrained)
        self.grader = Grader(config.reward.function, workers=config.reward.workers, time_limit=config.reward.time_limit)
        resources.callback(self.grader.close)
        check_weights(self.pretrained.model, world)
        # The engine's copy first: once the policy's DeepSpeed configuration exists, models load sharded.
        self.engine = open_engine(self.choice, settings, world)
        resources.callback(self.engine.close)
        self.engine.sleep()  # its memory is the policy's while that is set up
        self.folder = resume or self._make_folder()
        self._on_main(lambda: resources.enter_context(claim(self.folder)))
        self.policy = Policy(config, self.pretrained.model, world)
        self.answerer = Answerer(self.engine, self.grader, self.pretrained.tokenizer.decode, world)
        self.trainer = Trainer(config, self.train_set, self.policy, self.answerer)
        self.checkpoints = Checkpoints(
            self.folder,
            world,
            fingerprint=self.train_set.fingerprint,
            config=config.model_dump(mode="json"),
            keep=config.checkpoint.keep,
        )
        self.step = 0
        self.before: float | None = None
        self.untold: dict[str, float] = {}
        position = self._restore() if resume else None
        # Before the log, which cuts off what an interrupted run has told its trackers after the checkpoint.
        step = position["step"] if position else None
        trackers = self._on_main(lambda: open_trackers(config, self.folder, step)) or []
        self.log: RunLog | None = None
        if world.is_main:
            self.log = RunLog(self.folder, trackers, resume=position)
            resources.callback(self.log.close)
        self.engine.push_weights(self.policy.weights())
        self.weight_gap = self._check_weights()
        if self.step == 0:
            self.untold = {"weight_gap": self.weight_gap}

    def _restore(self) -> dict[str, int]:
        """Go back to the newest sound checkpoint; returns where the log stood."""
        self.step, progress = self.checkpoints.load(self.policy, self.trainer)
        self.before = progress["before"]
        if self.world.is_main:
            (self.folder / FINISHED).unlink(missing_ok=True)
            write_whole(self.folder / "config.yaml", to_yaml(self.config).encode())
        return progress["log"]

    def _save(self) -> None:
        progress = {"before": self.before, "log": self.log.position() if self.log else None}
        start = time.perf_counter()
        self.checkpoints.save(self.step, self.policy, self.trainer, progress)
        # Told with the next record: a line of its own would stand after the position that the checkpoint has.
        self.untold = {"seconds/checkpoint": time.perf_counter() - start}

    def _make_folder(self) -> Path:
        """The run's own new folder; rank 0 names and makes it."""
        name = self.config.output.name or datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        folder = self.world.gather(self.config.output.folder / name)[0]

        def make() -> None:
            try:
                folder.mkdir(parents=True, exist_ok=False)
                (folder / "config.yaml").write_text(to_yaml(self.config), encoding="utf-8")
            except FileExistsError:
                raise ConfigError(
                    f"output.folder: {folder} exists already: choose another output.name or remove it"
                ) from None
            except OSError as error:
                raise ConfigError(
                    f"output.folder: {folder} cannot be written: {error.strerror}; choose another output.folder"
                ) from None

        self._on_main(make)
        return folder

    def _on_main(self, action: Callable[[], T]) -> T | None:
        """What an action gives on rank 0, None elsewhere; where it fails, all ranks end with its message."""
        result, problem = None, ""
        if self.world.is_main:
            try:
                result = action()
            except (ConfigError, OSError) as error:
                problem = str(error)
        problem = self.world.gather(problem)[0]
        if problem:
            raise ConfigError(problem)
        return result

    def _check_weights(self) -> float:
        questions = self.train_set.questions[:PROBE_QUESTIONS]
        return check_engine(
            self.policy,
            self.engine,
            [np.array(question.prompt, dtype=np.int32) for question in questions],
            dtype=self.config.policy.dtype,
            max_tokens=min(PROBE_TOKENS, self.config.rollout.max_tokens),
            seed=self.config.seed,
        )

    def train(self) -> None:
        """Evaluate, train, evaluate, save."""
        config = self.config
        with Display(config.steps, self.step, self.console) as display:
            self._introduce(display.say)
            if self.step == 0:
                self._preflight(display.say)
                self.before = self._evaluate(display.say)
            while self.step < config.steps:
                result = self.trainer.step(self.step + 1)
                if result is None:
                    display.say(f"Every question is retired after {self.step} steps: nothing is left to learn from.")
                    break
                self.step += 1
                if config.rollout.check_every and self.step % config.rollout.check_every == 0:
                    result.metrics["weight_gap"] = self._check_weights()
                self._record(result, display)
                for note in result.notes:
                    display.say(note)
                if config.evaluation.every and self.step % config.evaluation.every == 0 and self.step < config.steps:
                    self._evaluate(display.say)
                if config.checkpoint.every and (self.step % config.checkpoint.every == 0 or self.step == config.steps):
                    self._save()
            after = self._evaluate(display.say)
        if config.output.save_model:
            self.policy.save(self.folder / "model")
            if self.world.is_main:
                self.pretrained.tokenizer.save_pretrained(self.folder / "model")
        self._conclude(after)

    def _introduce(self, say: Callable[[str], None]) -> None:
        config, questions = self.config, self.train_set
        reason = self.engine.unrepeatable
        repeats = f"; the same seed may give other ones: {reason}" if reason else ""
        dropped = f", {questions.dropped_long} over-long prompts dropped" if questions.dropped_long else ""
        if questions.beyond_limit:
            dropped += f", {questions.beyond_limit} more left out by data.train_limit"
        say(
            f"{config.policy.path} ({config.policy.dtype}) on {self.world.size} x {self.world.device.type}, "
            f"{len(questions.questions)} questions from {config.data.train}{dropped}\n"
            f"rollouts by {self.choice}{repeats}\n"
            f"rollout engine and trainer agree: mean log-prob difference {self.weight_gap:.1e}"
        )
        if config.resume == AUTO and not self.step:
            say(f"no unfinished run in {config.output.folder}: a new one begins in {self.folder}")
        if self.step:
            say(f"going on with {self.folder} after step {self.step}")

    def _preflight(self, say: Callable[[str], None]) -> None:
        if self.config.preflight == "off":
            return
        result = preflight(self.config, self.answerer, self.train_set.questions, self.trainer.sampling)
        say(str(result))
        problem = result.problem(self.config)
        if problem and self.config.preflight == "stop":
            raise PreflightError(f"{problem}. To train all the same: --preflight warn")
        if problem:
            say(f"warning: {problem}")

    def _evaluate(self, say: Callable[[str], None]) -> float | None:
        """Held-out Pass@1 now; None without held-out questions."""
        if self.test_set is None:
            return None
        start, tokens = time.perf_counter(), self.answerer.tokens
        overall, by_source = evaluate(
            self.answerer,
            self.test_set,
            self.config.evaluation.samples,
            Sampling(
                max_tokens=self.config.rollout.max_tokens,
                temperature=self.config.evaluation.temperature,
                top_p=self.config.evaluation.top_p,
                stop=self.trainer.sampling.stop,
            ),
            derive_seed(self.config.seed, "evaluation", self.step),
            success=self.config.reward.success,
        )
        if self.log:
            sources = {f"test/{name}": source.pass_rate for name, source in by_source.items()}
            pass_at = {f"pass_at/{k}": value for k, value in overall.pass_at.items()}
            cost = {
                "tokens/evaluation": self.answerer.tokens - tokens,
                "seconds/evaluation": time.perf_counter() - start,
            }
            self._write({"step": self.step, "test/pass_rate": overall.pass_rate, **pass_at, **sources, **cost})
        say(
            f"held-out Pass@1 after {self.step} steps: {overall.pass_rate:.3f} ± {overall.standard_error:.3f} "
            f"on {overall.questions} questions"
            + (f", {overall.left_out} of them over-long and so wrong" if overall.left_out else "")
        )
        return overall.pass_rate

    def _write(self, record: dict[str, float]) -> None:
        if self.log:
            self.log.metrics({**self.untold, **record})
            self.untold = {}

    def _record(self, result: StepResult, display: Display) -> None:
        if self.log is None:
            return
        self._write(result.metrics)
        display.step(result.metrics)
        # Replayed groups come last: show some of either kind.
        shown = list(range(len(result.questions)))[:: max(1, len(result.questions) - 1)]
        for i in shown[: self.config.output.sample_groups]:
            question = self.train_set.questions[result.questions[i]]
            answers = [(_label(a.reward, a.rollout.finished), a.text) for a in result.answers.of_question[i]]
            replayed = result.replayed[i]
            if replayed is not None:
                text = text_of(replayed, self.answerer.decode, self.config.rollout.stop)
                answers.append((f"replayed from step {replayed.step}", text))
            self.log.sample(self.step, question.text, question.gold, answers)

    def _conclude(self, after: float | None) -> None:
        if self.console is None:
            return
        if self.before is not None and after is not None:
            self.console.print(
                f"\nheld-out Pass@1: before {self.before:.3f}, after {after:.3f} ({after - self.before:+.3f})",
                highlight=False,
                style="bold",
            )
        names = ["config.yaml", "metrics.jsonl", "samples.md"]
        try:
            write_report([self.folder], self.folder / "report.html")
            names.insert(0, "report.html")
        except ReportError as error:  # a run of no steps without held-out questions has nothing to show
            self.console.print(f"no report: {error}", highlight=False, soft_wrap=True)
        (self.folder / FINISHED).touch()
        names += ["tensorboard"] if "tensorboard" in self.config.output.trackers else []
        names += ["model"] if self.config.output.save_model else []
        self.console.print(f"results in {self.folder}: {', '.join(names)}", highlight=False, soft_wrap=True)


def _with_engine(config: Config, choice: Choice) -> Config:
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": choice.name})})


def _label(reward: float, finished: bool) -> str:
    return f"reward {reward:g}" + ("" if finished else ", cut at the length limit")


def load_data(config: Config, pretrained: Pretrained) -> tuple[QuestionSet, QuestionSet | None]:
    """The questions to train on and, where there are any, the held-out ones."""
    data = config.data

    def load(source: str, split: str, limit: int | None) -> QuestionSet:
        return load_questions(
            source,
            pretrained.tokenizer,
            split=split,
            chat=data.chat,
            system_prompt=data.system_prompt,
            keep_system=data.keep_system,
            answer_prefix=data.answer_prefix,
            prompt_format=data.prompt_format,
            max_prompt_tokens=data.max_prompt_tokens,
            limit=limit,
            seed=config.seed,
        )

    train = load(data.train, data.train_split, data.train_limit)
    return train, load(data.test, data.test_split, data.test_limit) if data.test else None
