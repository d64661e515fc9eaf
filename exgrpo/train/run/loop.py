"""Run training: set up, evaluate, train, save, and print a summary."""

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
from exgrpo.train.run.startup_checks import StartupResult
from exgrpo.train.run.validation import Evaluator
from exgrpo.train.run.weight_check import check_engine
from exgrpo.train.trainer import StepResult

PROBE_QUESTIONS, PROBE_TOKENS = 4, 32


def run(config: Config, startup: StartupResult, resources: ExitStack, resume: Path | None = None) -> None:
    """Set up a run, a new one or the one whose folder is to be resumed, and train.

    Raises:
        ExgrpoError: the inputs or the machine do not fit the configuration, or the run fails.
        Stopped: interrupted after set-up.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    inputs = read_inputs(config, startup)
    world = start(config.distributed.timeout_minutes, config.distributed.threads, _kept(resume))
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    this = Run(config, inputs, world, resources, resume=resume)
    try:
        this.train()
    except KeyboardInterrupt:
        raise Stopped(this.way_on()) from None


def _kept(resume: Path | None) -> dict[str, int] | None:
    """Return the threads in the newest checkpoint of a resumed run."""
    found = find(resume) if resume else []
    return found[0].manifest.progress.get("threads") if found else None


class Run:
    """A run that is set up and checked.

    Attributes:
        step: last finished training step.
        started: summary of the stored answers that a new run starts with; None: it starts without.
        evaluator: evaluations before the first step, between steps and after the last one.
        utilisation: computes MFU with the best rate of matrix products that the run has measured.
        weight_gap: mean absolute difference of log-probs between the rollout engine and the trainer.

    Raises:
        ExgrpoError: the inputs or the machine do not fit the configuration.
    """

    def __init__(
        self, config: Config, inputs: Inputs, world: World, resources: ExitStack, *, resume: Path | None = None
    ) -> None:
        self.console = Console() if world.is_main else None
        self.parts = build(config, inputs, world, resources, resume)
        self.inputs, self.world = inputs, world
        self.trainer, self.checkpoints = self.parts.trainer, self.parts.checkpoints
        self.config, self.folder = self.trainer.config, self.checkpoints.run
        self.policy, self.rollout_worker = self.trainer.policy, self.trainer.rollout_worker
        self.utilisation = self.parts.utilisation
        self.step = 0
        self.evaluator = Evaluator(self.config, inputs.held_out, self.rollout_worker)
        self.cards = Cards(self.config)
        self.soundness = Soundness(self.config.reward.max_failed)
        self.started = None if resume else self._start_experience()
        position = self._restore() if resume else None
        self.recorder = Recorder(self.trainer, self.folder, resources, position)
        self.rollout_worker.engine.push_weights(self.policy.weights())
        self.weight_gap = self._check_weights()
        if self.step == 0:
            self.recorder.add_to_next({"weight_gap": self.weight_gap})

    def _start_experience(self) -> Started | None:
        pretrained, stop = self.inputs.pretrained, self.config.rollout.stop
        vocabulary = pretrained.model.config.get_text_config().vocab_size
        encoding = Encoding(pretrained.tokenizer, pretrained.eos, vocabulary, stop, self.config.data.answer_prefix)
        return start_experience(Beginning.from_trainer(self.trainer), encoding)

    def _restore(self) -> dict[str, int]:
        """Restore the newest sound checkpoint; returns the position of its log."""
        self.step, progress = self.checkpoints.load(self.policy, self.trainer)
        self.evaluator.restore(progress["evaluations"])
        self.utilisation = self.utilisation.at_least(progress.get("matrix_rate", 0.0))
        on_main(self.world, self._reopen)
        return progress["log"]

    def _reopen(self) -> None:
        with os_errors_as(OutputError, f"{self.folder} cannot be written"):
            (self.folder / FINISHED).unlink(missing_ok=True)
            write_whole(self.folder / "config.yaml", to_yaml(self.config).encode())

    def _save(self) -> None:
        progress = {
            "evaluations": self.evaluator.state(),
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
            self.rollout_worker.engine,
            [question.prompt_ids for question in questions],
            dtype=self.config.policy.dtype,
            max_tokens=min(PROBE_TOKENS, self.config.rollout.max_tokens),
            seed=self.config.seed,
            cut=self.config.rollout.cut,
        )

    def train(self) -> None:
        """Evaluate, train, evaluate, save."""
        config, evaluator = self.config, self.evaluator
        with Display(config.steps, self.step, self.console) as display:
            self._introduce(display.say)
            if self.step == 0:
                self._preflight(display.say)
                self._evaluate(display.say)
            while self.step < config.steps and not evaluator.exhausted:
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
                    self._due(config.checkpoint.every) or self.step == config.steps or evaluator.exhausted
                ):
                    self._save()
            if note := self.trainer.replay.watch.conclude():
                display.say(note)
            if evaluator.exhausted:
                patience = config.evaluation.patience
                display.say(f"{evaluator.verdict()}; {patience} evaluations have not improved it, so the run ends")
            if evaluator.is_due(self.step):
                self._evaluate(display.say)
        self._conclude()

    def _take_down(self, result: StepResult, display: Display) -> None:
        """Record and print a step with its warnings; raise HaltError after too many failed steps in a row."""
        check_every = self.config.rollout.check_every
        result.metrics.update(self.utilisation.metrics(result.work, result.metrics))
        if check_every and self.step % check_every == 0:
            result.metrics["weight_gap"] = self._check_weights()
        self.recorder.step(self.step, result)
        display.step(result.metrics)
        unsound = self.soundness.observe(result.batch.counts, result.applied)
        for note in filter(None, (*result.notes, *self.rollout_worker.news(), unsound)):
            display.say(note)
        if problem := self.soundness.problem(result.batch.counts):
            if self.config.checkpoint.every:
                self._save()
            raise HaltError(f"{problem}. The run has {self.way_on()}")

    def _due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0

    def _conclude(self) -> None:
        config, folder = self.config, self.folder
        if config.output.save_model:
            self._write_model(folder / MODEL)
        if not self.console:
            return
        self.recorder.conclude([*self.evaluator.changes(), *filter(None, [self.evaluator.verdict()])], self.console)
        if config.output.push_to_hub:  # last, since the network may fail
            address = upload(config.output.push_to_hub, uploads(folder))
            self.console.print(f"uploaded to {address}", highlight=False, soft_wrap=True)

    def _write_model(self, folder: Path) -> None:
        card = self.cards.card(self.step, self.evaluator.latest)
        write_model(folder, self.policy, self.inputs.pretrained.tokenizer, card)

    def way_on(self) -> str:
        """Return where the run stopped and the command to resume it."""
        found, _ = survey(self.folder)
        done = f"stopped after step {self.step} of {self.config.steps}"
        if not found:
            why = "before the first checkpoint" if self.config.checkpoint.every else "and checkpoint.every is None"
            return f"{done}, {why}: nothing to go on with in {self.folder}"
        return f"{done}. To go on after step {found[0].step}: {command_to_go_on(self.folder)}"

    def _introduce(self, say: Callable[[str], None]) -> None:
        config, questions, world, startup = self.config, self.inputs.train_set, self.world, self.inputs.startup
        reason = self.rollout_worker.engine.unrepeatable
        repeats = f"; the same seed may give other ones: {reason}" if reason else ""
        dropped = f", {len(questions.left_out)} over-long prompts dropped" if questions.left_out else ""
        if questions.beyond_limit:
            dropped += f", {questions.beyond_limit} more left out by data.train_limit"
        say(
            f"{config.policy.path} ({config.policy.dtype}) on {world.size} x {world.device.type}, "
            f"{startup.counted}{len(questions.questions)} questions from {', '.join(config.data.train)}{dropped}\n"
            f"rollouts by {self.parts.choice}{repeats}\n"
            + "".join(f"{line}\n" for line in (self.parts.memory, world.threads) if line)
            + f"rollout engine and trainer agree: mean log-prob difference {self.weight_gap:.1e}\n"
            f"matrix products run at {self.utilisation.rate / 1e12:.3g} TFLOP/s here; mfu is the share of that rate "
            "that training reaches"
        )
        if world.is_main:
            both = contradictions(chain(questions, *self.inputs.held_out.values()))
            for note in filter(None, (*startup.notes, both)):
                say(note)
        if self.started:
            say(str(self.started))
        if not self.policy.packs:
            say("rows are padded: with this model and attention, packed ones do not give the same log-probs")
        if self.policy.plain_layers:
            say(f"layers are not compiled: {self.policy.plain_layers}")
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
            found, problem = preflight(config, self.rollout_worker, questions, self.trainer.sampling, end)
        except RewardError as error:  # the same rewards would fail in training
            raise HaltError(str(error)) from None
        say(found)
        if problem and config.preflight == "stop":
            raise HaltError(f"{problem}. To train all the same: --preflight warn")
        news = self.rollout_worker.news()  # a problem includes these failures
        for warning in [problem] if problem else news:
            say(f"warning: {warning}")

    def _evaluate(self, say: Callable[[str], None]) -> None:
        """Evaluate on the held-out sets, if there are any, and write the model if it is the best one."""
        if not self.evaluator.sets:
            return
        found, sentences = self.evaluator.evaluate(self.step)
        self.recorder.record("evaluation", found)
        for sentence in (*sentences, *self.rollout_worker.news()):
            say(sentence)
        if self.evaluator.improved:
            self._write_model(self.folder / BEST)
