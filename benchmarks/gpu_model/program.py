"""Predictions for a head on a GPU: `python -m benchmarks.gpu_model --gpu H100 --tokens 8192 --width 3584`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import Field
from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.gpu_model.defaults import best, shipped
from benchmarks.gpu_model.measured import comparisons
from benchmarks.gpu_model.prediction import Prediction, UnknownGpu, floor, gpu_of, paths_of, predict, way_of
from benchmarks.gpu_model.walk import PATHS, Size
from benchmarks.render import mebibytes, seconds
from exgrpo.tools.estimate.parts import GPUS
from exgrpo.tools.heads import FORWARD, FULL_GPU, LOG_PROB, POLICY_LOSS, WITH_ENTROPY
from exgrpo.train.common.errors import ConfigError, ExgrpoError, print_error
from exgrpo.train.config.command_line import options_of
from exgrpo.train.config.options import Section

PROGRAM = "python -m benchmarks.gpu_model"
OPERATIONS = (FORWARD, POLICY_LOSS, WITH_ENTROPY, LOG_PROB)


class Options(Section):
    """Predict time, traffic and memory of the fused head in bf16 on a GPU: docs/gpu_model.md. Nothing is measured."""

    gpu: str = Field("H100", description=f"{', '.join(GPUS)}, or the name that the driver gives.")
    tokens: int = Field(8192, ge=1, description="Tokens, T; all have a gradient.")
    width: int = Field(3584, ge=1, description="Width of the hidden states, D.")
    vocabulary: int = Field(152064, ge=1, description="Entries of the vocabulary, V.")
    back_to_back: bool = Field(False, description="The device was busy before the call: the power limit holds at once.")
    defaults: bool = Field(False, description="For every GPU and the benchmarks' sizes: shipped defaults and the best.")
    record: Path | None = Field(None, description="A record of a benchmark run: predicted and measured times.")


def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit status."""
    try:
        table = _table(options_of(Options, PROGRAM, argv))
    except ExgrpoError as error:
        return print_error(error)
    Console().print(table)
    return 0


def _table(options: Options) -> Table:
    if options.record:
        return _comparison(options.record)
    if options.defaults:
        return _defaults(not options.back_to_back)
    return _predictions(options)


def _predictions(options: Options) -> Table:
    """Every operation on every path of a GPU, and the floor."""
    try:
        gpu = gpu_of(options.gpu)
    except UnknownGpu as error:
        raise ConfigError(str(error)) from None
    size, rested = Size(options.tokens, options.width, options.vocabulary), not options.back_to_back
    shape = f"{size.tokens}x{size.width}x{size.vocabulary}"
    columns = ("operation", "path", "time", "floor / time", "traffic GB", "launches", "tiles", "waves", "peak MiB")
    table = _drawn(f"{options.gpu}, bfloat16 {shape}: predictions", columns, left=2)
    for operation in OPERATIONS:
        bare = floor(gpu, operation, size, rested=rested)
        table.add_row(operation, "floor", *_cells(bare, bare))
        for path in paths_of(gpu):
            way = way_of(gpu, path, size)
            found = predict(way, operation, size, rested=rested)
            rows = f"{len(way.chunks(size.tokens))} x {max(way.chunks(size.tokens))} rows"
            table.add_row("", f"{path}, {rows}", *_cells(found, bare))
    now, fastest = (choose(gpu, POLICY_LOSS, size, rested=rested) for choose in (shipped, best))
    gain = f"{now.seconds / fastest.seconds - 1:.1%}"
    told = [f"{path}: {what}" for path, what in PATHS.items()]
    told.append(f"policy loss, shipped: {now}; best of the model: {fastest}, {gain} faster")
    table.caption = "\n".join(told)
    table.caption_justify = "left"
    return table


def _cells(found: Prediction, bare: Prediction) -> Iterator[str]:
    yield seconds(found.seconds)
    yield f"{bare.seconds / found.seconds:.2f}"
    yield f"{found.bytes / 1e9:.1f}"
    yield f"{found.launches}"
    yield f"{found.tiles:,}"
    yield f"{found.waves:,}"
    yield mebibytes(found.peak)


def _defaults(rested: bool) -> Table:
    """The shipped defaults and the best, by the policy loss."""
    columns = ("GPU", "size", "shipped", "time", "best of the model", "time", "gain")
    table = _drawn("Policy loss in bfloat16: predictions", columns, left=3)
    for name, gpu in GPUS.items():
        for shape in FULL_GPU:
            size = Size(*shape)
            now, fastest = (choose(gpu, POLICY_LOSS, size, rested=rested) for choose in (shipped, best))
            gain = f"{now.seconds / fastest.seconds - 1:.1%}"
            row = (str(now), seconds(now.seconds), str(fastest), seconds(fastest.seconds), gain)
            table.add_row(name, "x".join(map(str, shape)), *row)
    return table


def _comparison(path: Path) -> Table:
    """Predicted and measured times of the rows that the model knows."""
    try:
        rows = list(comparisons(record.read(path)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"record: {path} is no record of these benchmarks: {error}") from None
    if not rows:
        raise ConfigError(f"record: {path} has no row of a GPU with a data sheet; expected that of a run on such a GPU")
    table = _drawn("Predicted and measured", ("group", "row", "predicted", "measured", "ratio"), left=2)
    for one in rows:
        times = (seconds(one.predicted.seconds), seconds(one.measured["median"]))
        table.add_row(one.group, one.row, *times, f"{one.ratio:.2f}")
    return table


def _drawn(title: str, columns: Sequence[str], left: int) -> Table:
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right")
    return table
