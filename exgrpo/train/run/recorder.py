"""Write the results of a run: metrics per step, samples of answers, and the report."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

from rich.console import Console

from exgrpo.train.checkpoint.resume import FINISHED
from exgrpo.train.common.distributed import on_main
from exgrpo.train.common.errors import OutputError, ReportError, os_errors_as
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.metrics.log_files import METRICS, SAMPLES, RecordKind, Sample, SampledAnswer, Writer, read_samples
from exgrpo.train.metrics.report.page import write_report
from exgrpo.train.metrics.run_log import RunLog, open_trackers
from exgrpo.train.rollout.stops import parts_of
from exgrpo.train.run.model_folder import BEST, EXPORTS, MODEL
from exgrpo.train.trainer import StepResult, Trainer


def written_groups(questions: Sequence[int], shown: Sequence[int], tracked: set[int], most: int) -> list[int]:
    """Return the positions of the groups of a step to write, ascending: `shown` and all of the tracked questions.

    Adds the questions of `shown` to the tracked ones while there are fewer than `most`.
    """
    for position in shown:
        if len(tracked) < most:
            tracked.add(questions[position])
    return [i for i, question in enumerate(questions) if i in shown or question in tracked]


def spread(groups: int, count: int) -> list[int]:
    """Return `count` evenly spread positions with the first and the last one: replayed groups come last."""
    count = min(groups, count)
    return [i * (groups - 1) // max(1, count - 1) for i in range(count)]


class Recorder:
    """Writes into a run's folder on rank 0; does nothing on other ranks.

    Args:
        position: position of the log at the checkpoint of a resumed run; None: a new run.

    Raises:
        ConfigError: on every rank, if a tracker cannot start.
        OutputError: on every rank, if the folder cannot be written.
    """

    def __init__(self, trainer: Trainer, folder: Path, resources: ExitStack, position: dict[str, int] | None) -> None:
        self._trainer, self._folder, self._world = trainer, folder, trainer.rollout_worker.world
        self._output = trainer.config.output
        self._next: dict[str, float] = {}
        self._tracked: set[int] = set()
        self._log = on_main(self._world, lambda: self._open(position))
        if self._log:
            resources.callback(self._log.close)

    def _open(self, position: dict[str, int] | None) -> RunLog:
        folder = self._folder
        with os_errors_as(OutputError, f"{folder} cannot be written"):
            # Before `RunLog` truncates the file, which shows what was sent to trackers after the checkpoint.
            trackers = open_trackers(self._trainer.config, folder, position["step"] if position else None)
            log = RunLog(folder, trackers, resume=position)
            # The first questions of the run: other groups are written independently of their question.
            first = dict.fromkeys(sample.question for sample in read_samples(folder / SAMPLES))
            self._tracked = set(islice(first, self._output.tracked_questions))
        return log

    def position(self) -> dict[str, int] | None:
        """Return the position of the log; None on ranks without one. A collective call, as `record` and `step`."""
        return on_main(self._world, lambda: self._log.position() if self._log else None)

    def add_to_next(self, metrics: Mapping[str, float]) -> None:
        """Keep numbers for the next record: a separate record would lie after the checkpoint's position of the log."""
        self._next |= metrics

    def record(self, kind: RecordKind, metrics: Mapping[str, float]) -> None:
        """Write a record, together with the numbers of `add_to_next`; raise OutputError on every rank."""
        on_main(self._world, lambda: self._log.metrics(kind, {**self._next, **metrics}) if self._log else None)
        self._next = {}

    def step(self, step: int, result: StepResult) -> None:
        """Write the record of a training step and samples of its groups; raises as `record`."""
        self.record("training", result.metrics)
        on_main(self._world, lambda: self._write_samples(step, result.batch, self._log) if self._log else None)

    def _write_samples(self, step: int, batch: StepBatch, log: RunLog) -> None:
        questions, shown = batch.question.tolist(), spread(batch.groups, self._output.sample_groups)
        for group in written_groups(questions, shown, self._tracked, self._output.tracked_questions):
            log.sample(self._sample(step, batch, group))

    def _sample(self, step: int, batch: StepBatch, group: int) -> Sample:
        question = self._trainer.questions[batch.question[group]]
        stop = question.stops(self._trainer.config.rollout.stop)
        answers = tuple(self._answer(batch, row, stop) for row in batch.rows_of([group]).tolist())
        return Sample(step, question.index, question.text, question.gold, question.index in self._tracked, answers)

    def _answer(self, batch: StepBatch, row: int, stop: tuple[str, ...]) -> SampledAnswer:
        answer, reward = batch.answer(row), batch.reward.item(row)
        texts = parts_of(answer, self._trainer.rollout_worker.decode, stop)
        given = answer.response_mask is not None and not answer.response_mask[0]
        writers: cycle[Writer] = cycle(("prefix", "policy") if given else ("policy", "environment"))
        parts = tuple(zip(writers, texts, strict=False))
        shown = SampledAnswer(parts, reward, answer.finished, len(answer.response))
        if not batch.replayed[row]:
            return shown
        entropy = batch.chosen_entropy.item(row)
        return replace(shown, replayed_from=batch.step.item(row), entropy=None if math.isnan(entropy) else entropy)

    def conclude(self, changes: Sequence[str], console: Console) -> None:
        """Print sentences about the evaluations, write the report and mark the run as finished; on rank 0 only."""
        folder = self._folder
        if changes:
            console.print("\n" + "\n".join(changes), highlight=False, style="bold")
        names = ["config.yaml", METRICS, SAMPLES]
        try:
            write_report([folder], folder / "report.html")
            names.insert(0, "report.html")
        except ReportError as error:  # a run without steps and evaluations has no records
            console.print(f"no report: {error}", highlight=False, soft_wrap=True)
        with os_errors_as(OutputError, f"{folder / FINISHED} cannot be written"):
            (folder / FINISHED).touch()
        names += ["tensorboard"] if "tensorboard" in self._output.trackers else []
        names += [name for name in (MODEL, BEST, EXPORTS) if (folder / name).exists()]
        console.print(f"results in {folder}: {', '.join(names)}", highlight=False, soft_wrap=True)
