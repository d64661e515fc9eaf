"""From the command line to the results: set everything up, train, evaluate before and after, say where things are."""

import datetime
import logging
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from rich.console import Console

from exgrpo.train.answers import Answerer
from exgrpo.train.config import Config, ConfigError, parse_args, to_yaml
from exgrpo.train.data import QuestionSet, load_questions
from exgrpo.train.display import Display
from exgrpo.train.distributed import World, start
from exgrpo.train.evaluate import Evaluation, evaluate
from exgrpo.train.metrics import RunLog
from exgrpo.train.policy import DTYPES, Policy
from exgrpo.train.pretrained import Pretrained, load_pretrained
from exgrpo.train.reward import Grader
from exgrpo.train.rollout import Sampling, TransformersEngine
from exgrpo.train.seeds import derive_seed
from exgrpo.train.trainer import StepResult, Trainer
from exgrpo.train.weight_check import WeightMismatchError, check_engine

PROBE_QUESTIONS = 4
PROBE_TOKENS = 32


def main(argv: list[str]) -> int:
    """Run the program; returns its exit status."""
    _quiet()
    with ExitStack() as resources:
        try:
            config = parse_args(argv)
            run = Run(config, start(config.distributed.timeout_minutes), resources)
        except (ConfigError, ValueError, OSError, WeightMismatchError) as error:
            rank = os.environ.get("RANK", "0")
            print(f"error: {error}" if rank == "0" else f"error on rank {rank}: {error}", file=sys.stderr)
            return 2
        run.train()
    return 0


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

    Raises:
        ValueError, OSError: where something about the input is wrong; the message names it.
        WeightMismatchError: where the rollout engine computes another policy than the trainer.
    """

    def __init__(self, config: Config, world: World, resources: ExitStack) -> None:
        self.config = config
        self.world = world
        self.console = Console() if world.is_main else None
        self.pretrained = load_pretrained(config.policy.path)
        self.train_set, self.test_set = _load_data(config, self.pretrained)
        self.grader = Grader(config.reward.function, workers=config.reward.workers, time_limit=config.reward.time_limit)
        resources.callback(self.grader.close)
        self.folder = self._make_folder()
        # The engine's copy first: once the policy's DeepSpeed configuration exists, models load sharded.
        self.engine = TransformersEngine(
            self.pretrained.path,
            dtype=DTYPES[config.policy.dtype],
            device=world.device,
            eos=self.pretrained.eos,
            pad=self.pretrained.pad,
            batch_tokens=config.rollout.batch_tokens,
            attention=config.policy.attention,
        )
        resources.callback(self.engine.close)
        self.policy = Policy(config, self.pretrained.path, world)
        self.answerer = Answerer(self.engine, self.grader, self.pretrained.tokenizer.decode, world)
        self.trainer = Trainer(config, self.train_set, self.policy, self.answerer)
        self.log = RunLog(self.folder, tensorboard=config.output.tensorboard) if world.is_main else None
        if self.log:
            resources.callback(self.log.close)
        self.weight_gap = self._check_weights()

    def _make_folder(self) -> Path:
        """The run's own new folder; rank 0 names and makes it."""
        name = self.config.output.name or datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        folder = self.world.gather(self.config.output.folder / name)[0]
        problem = ""
        if self.world.is_main:
            try:
                folder.mkdir(parents=True, exist_ok=False)
                (folder / "config.yaml").write_text(to_yaml(self.config), encoding="utf-8")
            except FileExistsError:
                problem = f"{folder} exists already: choose another output.name or remove it"
            except OSError as error:
                problem = f"{folder} cannot be written: {error.strerror}; choose another output.folder"
        problem = self.world.gather(problem)[0]
        if problem:
            raise ValueError(f"output.folder: {problem}")
        return folder

    def _check_weights(self) -> float:
        self.engine.push_weights(self.policy.weights())
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
        with Display(config.steps, self.console) as display:
            self._introduce(display.say)
            before = self._evaluate(0, display.say)
            for step in range(1, config.steps + 1):
                result = self.trainer.step(step)
                if result is None:
                    display.say(f"Every question is retired after {step - 1} steps: nothing is left to learn from.")
                    break
                self._record(step, result, display)
                if config.evaluation.every and step % config.evaluation.every == 0 and step < config.steps:
                    self._evaluate(step, display.say)
            after = self._evaluate(config.steps, display.say) if config.steps else before
        if config.output.save_model:
            self.policy.save(self.folder / "model")
            if self.world.is_main:
                self.pretrained.tokenizer.save_pretrained(self.folder / "model")
        self._conclude(before, after)

    def _introduce(self, say: Callable[[str], None]) -> None:
        config, questions = self.config, self.train_set
        dropped = f", {questions.dropped_long} over-long prompts dropped" if questions.dropped_long else ""
        say(
            f"{config.policy.path} ({config.policy.dtype}) on {self.world.size} x {self.world.device.type}, "
            f"{len(questions.questions)} questions from {config.data.train}{dropped}\n"
            f"rollout engine and trainer agree: mean log-prob difference {self.weight_gap:.1e}"
        )

    def _evaluate(self, step: int, say: Callable[[str], None]) -> Evaluation | None:
        if self.test_set is None:
            return None
        evaluation = evaluate(
            self.answerer,
            self.test_set.questions,
            self.config.evaluation.samples,
            Sampling(
                max_tokens=self.config.rollout.max_tokens,
                temperature=self.config.evaluation.temperature,
                top_p=self.config.evaluation.top_p,
            ),
            derive_seed(self.config.seed, "evaluation", step),
        )
        if self.log:
            sources = {f"test/{source}": rate for source, rate in evaluation.by_source.items()}
            self.log.metrics({"step": step, "test/pass_rate": evaluation.pass_rate, **sources})
        say(
            f"held-out Pass@1 after {step} steps: {evaluation.pass_rate:.3f} ± {evaluation.standard_error:.3f} "
            f"on {len(self.test_set.questions)} questions"
        )
        return evaluation

    def _record(self, step: int, result: StepResult, display: Display) -> None:
        if self.log is None:
            return
        self.log.metrics(result.metrics)
        display.step(result.metrics)
        # Replayed groups come last: show some of either kind.
        shown = list(range(len(result.questions)))[:: max(1, len(result.questions) - 1)]
        for i in shown[: self.config.output.sample_groups]:
            question = self.train_set.questions[result.questions[i]]
            answers = [(_label(a.reward, a.rollout.finished), a.text) for a in result.answers.of_question[i]]
            replayed = result.replayed[i]
            if replayed is not None:
                text = str(self.pretrained.tokenizer.decode(replayed.response))
                answers.append((f"replayed from step {replayed.step}", text))
            self.log.sample(step, question.text, question.gold, answers)

    def _conclude(self, before: Evaluation | None, after: Evaluation | None) -> None:
        if self.console is None:
            return
        if before and after:
            gain = after.pass_rate - before.pass_rate
            self.console.print(
                f"\nheld-out Pass@1: before {before.pass_rate:.3f}, after {after.pass_rate:.3f} ({gain:+.3f})",
                highlight=False,
                style="bold",
            )
        names = ["config.yaml", "metrics.jsonl", "samples.md"]
        names += ["tensorboard"] if self.config.output.tensorboard else []
        names += ["model"] if self.config.output.save_model else []
        self.console.print(f"results in {self.folder}: {', '.join(names)}", highlight=False, soft_wrap=True)


def _label(reward: float, finished: bool) -> str:
    return f"reward {reward:g}" + ("" if finished else ", cut at the length limit")


def _load_data(config: Config, pretrained: Pretrained) -> tuple[QuestionSet, QuestionSet | None]:
    data = config.data

    def load(source: str, split: str, limit: int | None) -> QuestionSet:
        return load_questions(
            source,
            pretrained.tokenizer,
            split=split,
            chat=data.chat,
            system_prompt=data.system_prompt,
            keep_system=data.keep_system,
            prompt_format=data.prompt_format,
            max_prompt_tokens=data.max_prompt_tokens,
            limit=limit,
            seed=config.seed,
        )

    train = load(data.train, data.train_split, data.train_limit)
    return train, load(data.test, data.test_split, data.test_limit) if data.test else None
