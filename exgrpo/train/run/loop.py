"""A run from its inputs to its results: set it up, train, evaluate before and after, say where things are."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import transformers
from rich.console import Console

from exgrpo.train.checkpoint.listing import find, survey
from exgrpo.train.checkpoint.resume import AUTO, FINISHED, begun_anew
from exgrpo.train.common.distributed import World, missing_gpu, on_main, start
from exgrpo.train.common.durable import write_whole
from exgrpo.train.common.errors import HaltError, OutputError, RewardError, os_errors_as
from exgrpo.train.common.process import Stopped, command_to_go_on
from exgrpo.train.config.hub import upload
from exgrpo.train.config.options import Config
from exgrpo.train.config.recipe import to_yaml
from exgrpo.train.data.questions import contradictions
from exgrpo.train.metrics.display import Display
from exgrpo.train.metrics.soundness import Soundness
from exgrpo.train.policy.tokenizer import missing_end
from exgrpo.train.run.build import Inputs, build, read_inputs
from exgrpo.train.run.model_folder import BEST, MODEL, Cards, export_folder, uploads, write_model
from exgrpo.train.run.preflight import QUESTIONS, preflight
from exgrpo.train.run.recorder import Recorder
from exgrpo.train.run.start_experience import Beginning, Encoding, Started, start_experience
from exgrpo.train.run.startup_checks import Early
from exgrpo.train.run.validation import Course
from exgrpo.train.run.weight_check import check_engine
from exgrpo.train.trainer import StepResult

PROBE_QUESTIONS, PROBE_TOKENS = 4, 32


def run(config: Config, early: Early, resources: ExitStack, resume: Path | None = None) -> None:
    """Set a run up and train.

    Args:
        config: what to do.
        early: what the first look has read.
        resources: closes what the run opens.
        resume: folder of the run to go on with; None: a new one.

    Raises:
        ExgrpoError: something about the input or the machine is wrong; the message names it.
        Stopped: a person or the system stops it once it is set up.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    inputs = read_inputs(config, early)
    world = start(config.distributed.timeout_minutes, config.distributed.threads, _kept(resume))
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    this = Run(config, inputs, world, resources, resume=resume)
    try:
        this.train()
    except KeyboardInterrupt:
        raise Stopped(this.way_on()) from None


def _kept(resume: Path | None) -> dict[str, int] | None:
    """The threads of a run that goes on, as its newest checkpoint has them."""
    found = find(resume) if resume else []
    return found[0].manifest.progress.get("threads") if found else None


class Run:
    """A run that is set up and checked.

    Args:
        config, resources, resume: see `run`.
        inputs: what it starts from.
        world: the processes that do it.

    Attributes:
        step: the last finished training step.
        started: what the experience of a new run has begun with; None: nothing.
        course: the evaluations, before the first step, between steps and after the last one.
        utilisation: what the steps need against the best rate of matrix products that the run has measured.
        weight_gap: mean difference of log-probs between the rollout engine and the trainer.

    Raises:
        ExgrpoError: something about the input or the machine is wrong; the message names it.
    """

    def __init__(
        self, config: Config, inputs: Inputs, world: World, resources: ExitStack, *, resume: Path | None = None
    ) -> None:
        self.console = Console() if world.is_main else None
        self.parts = build(config, inputs, world, resources, resume)
        self.inputs, self.world = inputs, world
        self.trainer, self.checkpoints = self.parts.trainer, self.parts.checkpoints
        self.config, self.folder = self.trainer.config, self.checkpoints.run
        self.policy, self.answerer = self.trainer.policy, self.trainer.answerer
        self.utilisation = self.parts.utilisation
        self.step = 0
        self.course = Course(self.config, inputs.held_out, self.answerer)
        self.cards = Cards(self.config)
        self.soundness = Soundness(self.config.reward.max_failed)
        self.started = None if resume else self._start_experience()
        position = self._restore() if resume else None
        self.recorder = Recorder(self.trainer, self.folder, resources, position)
        self.answerer.engine.push_weights(self.policy.weights())
        self.weight_gap = self._check_weights()
        if self.step == 0:
            self.recorder.add_to_next({"weight_gap": self.weight_gap})

    def _start_experience(self) -> Started | None:
        pretrained, stop = self.inputs.pretrained, self.config.rollout.stop
        vocabulary = pretrained.model.config.get_text_config().vocab_size
        encoding = Encoding(pretrained.tokenizer, pretrained.eos, vocabulary, stop, self.config.data.answer_prefix)
        return start_experience(Beginning.of(self.trainer), encoding)

    def _restore(self) -> dict[str, int]:
        """Go back to the newest sound checkpoint; returns where the log stood."""
        self.step, progress = self.checkpoints.load(self.policy, self.trainer)
        self.course.restore(progress["evaluations"])
        self.utilisation = self.utilisation.at_least(progress.get("matrix_rate", 0.0))
        on_main(self.world, self._reopen)
        return progress["log"]

    def _reopen(self) -> None:
        with os_errors_as(OutputError, f"{self.folder} cannot be written"):
            (self.folder / FINISHED).unlink(missing_ok=True)
            write_whole(self.folder / "config.yaml", to_yaml(self.config).encode())

    def _save(self) -> None:
        progress = {
            "evaluations": self.course.state(),
            "log": self.recorder.position(),
            "matrix_rate": self.utilisation.rate,
            "threads": self.world.kept,
        }
        start = time.perf_counter()
        self.checkpoints.save(self.step, self.policy, self.trainer, progress)
        self.recorder.add_to_next({"seconds/checkpoint": time.perf_counter() - start})

    def _check_weights(self) -> float:
        questions = self.inputs.train_set.questions[:PROBE_QUESTIONS]
        return check_engine(
            self.policy,
            self.answerer.engine,
            [question.prompt_ids for question in questions],
            dtype=self.config.policy.dtype,
            max_tokens=min(PROBE_TOKENS, self.config.rollout.max_tokens),
            seed=self.config.seed,
            cut=self.config.rollout.cut,
        )

    def train(self) -> None:
        """Evaluate, train, evaluate, save."""
        config, course = self.config, self.course
        with Display(config.steps, self.step, self.console) as display:
            self._introduce(display.say)
            if self.step == 0:
                self._preflight(display.say)
                self._evaluate(display.say)
            while self.step < config.steps and not course.exhausted:
                result = self.trainer.step(self.step + 1)
                if result is None:
                    display.say(f"Every question is retired after {self.step} steps: nothing is left to learn from.")
                    break
                self.step += 1
                self._take_down(result, display)
                if self._due(config.evaluation.every) or self.step == config.steps:
                    self._evaluate(display.say)
                if self._due(config.output.export_every):
                    self._write_model(export_folder(self.folder, self.step))
                if config.checkpoint.every and (
                    self._due(config.checkpoint.every) or self.step == config.steps or course.exhausted
                ):
                    self._save()
            if note := self.trainer.replay.watch.conclude():
                display.say(note)
            if course.exhausted:
                patience = config.evaluation.patience
                display.say(f"{course.verdict()}; {patience} evaluations have not improved it, so the run ends")
            if course.is_due(self.step):
                self._evaluate(display.say)
        self._conclude()

    def _take_down(self, result: StepResult, display: Display) -> None:
        """Write a step down, say what there is to say of it, and stop where it teaches nothing any more."""
        check_every = self.config.rollout.check_every
        result.metrics.update(self.utilisation.metrics(result.work, result.metrics))
        if check_every and self.step % check_every == 0:
            result.metrics["weight_gap"] = self._check_weights()
        self.recorder.step(self.step, result)
        display.step(result.metrics)
        unsound = self.soundness.observe(result.batch.counts, result.applied)
        for note in filter(None, (*result.notes, *self.answerer.news(), unsound)):
            display.say(note)
        if problem := self.soundness.problem(result.batch.counts):
            if self.config.checkpoint.every:
                self._save()
            raise HaltError(f"{problem}. The run has {self.way_on()}")

    def _due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0

    def _conclude(self) -> None:
        """Write the model and the report, and upload what is to be uploaded."""
        config, folder = self.config, self.folder
        if config.output.save_model:
            self._write_model(folder / MODEL)
        if not self.console:
            return
        self.recorder.conclude([*self.course.changes(), *filter(None, [self.course.verdict()])], self.console)
        if config.output.push_to_hub:  # last, since the network may fail and everything else is done
            address = upload(config.output.push_to_hub, uploads(folder))
            self.console.print(f"uploaded to {address}", highlight=False, soft_wrap=True)

    def _write_model(self, folder: Path) -> None:
        card = self.cards.card(self.step, self.course.latest)
        write_model(folder, self.policy, self.inputs.pretrained.tokenizer, card)

    def way_on(self) -> str:
        """How to go on with a run that is stopped now."""
        found, _ = survey(self.folder)
        done = f"stopped after step {self.step} of {self.config.steps}"
        if not found:
            why = "before the first checkpoint" if self.config.checkpoint.every else "and checkpoint.every is None"
            return f"{done}, {why}: nothing to go on with in {self.folder}"
        return f"{done}. To go on after step {found[0].step}: {command_to_go_on(self.folder)}"

    def _introduce(self, say: Callable[[str], None]) -> None:
        config, questions, world = self.config, self.inputs.train_set, self.world
        reason = self.answerer.engine.unrepeatable
        repeats = f"; the same seed may give other ones: {reason}" if reason else ""
        dropped = f", {len(questions.left_out)} over-long prompts dropped" if questions.left_out else ""
        if questions.beyond_limit:
            dropped += f", {questions.beyond_limit} more left out by data.train_limit"
        say(
            f"{config.policy.path} ({config.policy.dtype}) on {world.size} x {world.device.type}, "
            f"{self.inputs.counted}{len(questions.questions)} questions from {', '.join(config.data.train)}{dropped}\n"
            f"rollouts by {self.parts.choice}{repeats}\n"
            + "".join(f"{line}\n" for line in (self.parts.memory, world.threads) if line)
            + f"rollout engine and trainer agree: mean log-prob difference {self.weight_gap:.1e}\n"
            f"matrix products run at {self.utilisation.rate / 1e12:.3g} TFLOP/s here; mfu is the share of that rate "
            "that training reaches"
        )
        if world.is_main:
            both = contradictions(chain(questions, *self.inputs.held_out.values()))
            for note in filter(None, (*self.inputs.notes, both)):
                say(note)
        if self.started:
            say(str(self.started))
        if not self.policy.packs:
            say("rows are padded: with this model and attention, packed ones do not give the same log-probs")
        if missing := missing_gpu(world):
            say(f"warning: {missing}")
        if config.resume == AUTO and not self.step:
            say(begun_anew(config, self.folder))
        if self.step:
            say(f"going on with {self.folder} after step {self.step}")

    def _preflight(self, say: Callable[[str], None]) -> None:
        if self.config.preflight == "off":
            return
        config, questions = self.config, self.inputs.train_set.first(QUESTIONS)
        end = missing_end(self.inputs.pretrained, config.common_stop) if config.data.chat else None
        try:
            found, problem = preflight(config, self.answerer, questions, self.trainer.sampling, end)
        except RewardError as error:  # training is worth nothing, as where the reward fails on all answers
            raise HaltError(str(error)) from None
        say(found)
        if problem and config.preflight == "stop":
            raise HaltError(f"{problem}. To train all the same: --preflight warn")
        news = self.answerer.news()  # the problem says it, too
        for warning in [problem] if problem else news:
            say(f"warning: {warning}")

    def _evaluate(self, say: Callable[[str], None]) -> None:
        """Ask the held-out questions now, if there are any, and keep the model if it is the best one."""
        if not self.course.sets:
            return
        found, sentences = self.course.evaluate(self.step)
        self.recorder.record("evaluation", found)
        for sentence in (*sentences, *self.answerer.news()):
            say(sentence)
        if self.course.improved:
            self._write_model(self.folder / BEST)
