"""How do the phases of a training step grow with questions, group size, response length and the model?"""

from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from benchmarks.growth import (
    AXES,
    BASE,
    TITLES,
    config_of,
    exponent,
    medians,
    options,
    points,
    write_model,
    write_questions,
)
from benchmarks.programs import QUIET
from benchmarks.timing import CLOCK
from benchmarks.turns import Program, Turn, command, take_turns
from exgrpo.tools.bench import Result, Results

PHASES = ("generate", "score", "update")
WARMUP = 1
GROUP = "growth with"


def results(turns: dict[str, list[Turn]]) -> dict[str, Results]:
    """The rows of all axes: for each phase its seconds by size, and how they grow.

    Args:
        turns: by name of the program; each has a turn for each of its sizes in every round.
    """
    rows: dict[str, Results] = {}
    for axis in AXES:
        of_axis = {
            size: [turn for turn in turns[str(one.width)] if turn.asked == one.asked()]
            for size, one in points(axis).items()
        }
        for size, one in points(axis).items():
            tokens = one.questions * one.samples * one.max_tokens
            assert all(turn.facts["generated_tokens"] == tokens for turn in of_axis[size]), "an answer has ended early"
        base = next(size for size, one in points(axis).items() if one == BASE)
        rows[axis] = {}
        for phase in PHASES:
            seconds = {size: [turn.facts["phases"][phase] for turn in taken] for size, taken in of_axis.items()}
            by_size = medians(seconds)
            facts = {"growth": {str(size): value for size, value in by_size.items()}, "exponent": exponent(by_size)}
            rows[axis][phase] = Result(tuple(seconds[base]), facts=facts)
    return rows


def measure(folder: Path, rounds: int) -> dict[str, Results]:
    """A program for each model; each takes a turn for each of the sizes that are asked of its model."""
    questions = folder / "questions.jsonl"
    write_questions(questions)
    asked: dict[str, list[dict[str, int]]] = {}
    for of_size in (one for axis in AXES for one in points(axis).values()):
        of_model = asked.setdefault(str(of_size.width), [])
        if of_size.asked() not in of_model:
            of_model.append(of_size.asked())
    with ExitStack() as running:
        programs = {}
        for width in asked:
            write_model(config_of(int(width)), folder / width)
            words = [*options(folder / width, questions, folder / f"run {width}"), *QUIET]
            program = Program(command("benchmarks.training_step", *words), folder / f"{width}.log")
            programs[width] = running.enter_context(program)
        return results(take_turns(programs, WARMUP, rounds, asked))


@pytest.fixture(scope="module")
def growth(tmp_path_factory, rounds):
    """Gives the rows of all axes, which are measured together."""
    return cache(lambda: measure(tmp_path_factory.mktemp("growth"), rounds))


@pytest.mark.usefixtures("real_steps")
@pytest.mark.timeout(3600)
@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("phase", PHASES)
def test_growth(benchmark, races, growth, axis, phase):
    races.run(f"{GROUP} {TITLES[axis]}", phase, lambda: growth()[axis], benchmark)
