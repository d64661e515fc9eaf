"""Programs that take turns, what is known of their memory, and how costs are fitted."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks import test_growth, test_training_step
from benchmarks.growth import AXES, END, PROMPT, Sizes, config_of, exponent, points, write_model
from benchmarks.memory import Peak, peak_of
from benchmarks.plots import draw
from benchmarks.render import grids
from benchmarks.test_training_step import EXGRPO, ON_POLICY, TRL, VLLM
from benchmarks.turns import Program, ProgramError, Turn, take_turns
from benchmarks.workloads import ON_GPU, TINY

FAKE = """
import json, os, sys, time
from benchmarks.turns import Turns
print("a library greets")
turns = Turns()
turns.answer({})
count = 0
while (asked := turns.wait()) is not None:
    count += 1
    with open(sys.argv[2], "a") as file:
        file.write(sys.argv[1])
    if asked.get("fail"):
        sys.exit("out of luck")
    turns.answer({"count": count, "asked": asked, "cpu": time.process_time()})
"""


def fake(name: str, folder: Path) -> Program:
    return Program([sys.executable, "-c", FAKE, name, str(folder / "order")], folder / f"{name}.log")


def test_two_programs_take_turns_and_sleep_between_them(tmp_path):
    with fake("a", tmp_path) as a, fake("b", tmp_path) as b:
        turns = take_turns({"a": a, "b": b}, warmup=1, rounds=3, asked={"b": [{"size": 1}, {"size": 2}]})
        before = a.turn({}).facts["cpu"]
        time.sleep(0.5)
        slept = a.turn({}).facts["cpu"] - before
    assert (tmp_path / "order").read_text() == "abbbbaabbbbaaa"
    assert [turn.facts["count"] for turn in turns["a"]] == [2, 3, 4]
    assert [turn.asked["size"] for turn in turns["b"]] == [1, 2, 1, 2, 1, 2]
    assert all(turn.facts["asked"] == turn.asked and turn.seconds > 0 for turn in turns["b"])
    assert all(turn.peak.own > 1 << 20 and turn.peak.children == 0 for turn in turns["a"])
    assert slept < 0.1  # processor time while nobody asks
    assert (tmp_path / "a.log").read_text() == "a library greets\n"


def test_a_program_that_ends_says_why(tmp_path):
    ended = "has ended with exit status 1:\n(.*\n)*out of luck"
    with fake("a", tmp_path) as program, pytest.raises(ProgramError, match=ended):
        program.turn({"fail": True})
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(ProgramError, match=r"exit status -9 \(killed: is there memory for all programs at once"):
        Program([sys.executable, "-c", kill], tmp_path / "log")
    with pytest.raises(ProgramError, match="no such model"):
        Program([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path / "log")


def test_the_peak_of_a_program_has_that_of_its_children():
    hold = "import sys; held = bytearray(64 << 20); del held; print('ready', flush=True); sys.stdin.read()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}], check=True)"
    # The second program has a child, and holds little itself.
    for code, least in ((hold, Peak(64 << 20, 0)), (child, Peak(0, 64 << 20))):
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as program:
            assert program.stdout.readline() == "ready\n"
            peak = peak_of(program.pid)
            program.stdin.close()
        assert least.own <= peak.own < least.own + (48 << 20)
        assert least.children <= peak.children <= least.children + (48 << 20) * bool(least.children)
        assert peak.total == peak.own + peak.children


def turn(seconds, tokens, phases, own=100, children=0, asked=None, **facts):
    facts = {"phases": phases, "generated_tokens": tokens, **facts}
    return Turn(asked or {}, seconds, facts, Peak(own << 20, children << 20))


def test_rows_of_a_training_step_are_compared_with_trl_round_by_round(tmp_path):
    turns = {
        TRL: [turn(load * 4.0, 100, {"generate": 3.0, "update": 1.0}) for load in (1, 5, 2)],
        ON_POLICY: [turn(load * 3.0, 100, {"generate": 2.0, "update": 1.0}, 120, 30) for load in (1, 5, 2)],
        EXGRPO: [turn(load * 2.0, 50, {"generate": 1.0, "push": 1.0}, 120, replayed=4) for load in (1, 5, 2)],
    }
    rows = test_training_step.results(turns)
    assert rows[EXGRPO].facts["times_trl"] == (0.5, 0.5, 0.5)
    assert rows[EXGRPO].facts["token_times_trl"] == (1.0, 1.0, 1.0)
    assert rows[EXGRPO].facts["times_on_policy"] == pytest.approx(2 / 3)
    assert rows[ON_POLICY].facts["memory_times_trl"] == 1.5
    assert rows[ON_POLICY].peak_bytes == 150 << 20
    reported = [
        {"group": "training step: x", "row": name, "median": 1.0, "peak_bytes": row.peak_bytes, **row.facts}
        for name, row in rows.items()
    ]
    (grid,) = grids(reported)
    assert {"time / TRL", "peak MiB", "in children", "peak / TRL"} <= set(grid.header)
    assert "0.75 (0.75 to 0.75)" in next(line for line in grid.lines if line[0] == ON_POLICY)
    assert draw(reported, tmp_path / "plots.svg")


def test_a_step_with_replay_is_measured_by_phase(tmp_path):
    row = test_training_step.measure(TINY, [EXGRPO], tmp_path, rounds=1)[EXGRPO]
    facts, (seconds,) = row.facts, row.seconds
    assert {"generate", "score", "update"} < facts["phases"].keys()
    assert 0 < sum(facts["phases"].values()) < seconds
    answers, length = TINY.groups * TINY.samples, TINY.max_tokens  # the answers never end
    assert facts["replayed"]
    assert facts["generated_tokens"] == (answers - facts["replayed"]) * length
    assert facts["mfu"]["update"] > 0


def test_without_trl_its_row_is_skipped_and_the_others_are_there(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert test_training_step.missing(ON_GPU[0]) == {
        TRL: "trl is not installed: pip install trl==1.16.0",
        **dict.fromkeys((VLLM, *test_training_step.ON_GPU), "vllm is not installed: pip install vllm"),
    }
    turns = {ON_POLICY: [turn(3.0, 100, {"update": 1.0})], EXGRPO: [turn(2.0, 50, {"update": 1.0})]}
    assert "times_trl" not in test_training_step.results(turns)[EXGRPO].facts


@pytest.mark.parametrize("power", [0.0, 0.7, 1.0, 2.0])
def test_growth_exponents(power):
    assert exponent({size: 0.3 * size**power for size in (4, 8, 16, 64)}) == pytest.approx(power)


def test_growth_rows_take_their_turns_by_axis(tmp_path):
    """A made-up machine: generation grows with the square root of all answers, the rest with all tokens."""

    def taken(one: Sizes) -> Turn:
        answers = one.questions * one.samples
        tokens = answers * one.max_tokens
        phases = {"generate": answers**0.5, "score": float(tokens), "update": float(tokens)}
        return turn(1.0, tokens, phases, asked=one.asked())

    sizes = {one for axis in AXES for one in points(axis).values()}
    turns = {str(width): [taken(one) for one in sizes if one.width == width] for width in AXES["width"]}
    rows = test_growth.results(turns)
    found = {axis: [round(row.facts["exponent"], 6) for row in of_axis.values()] for axis, of_axis in rows.items()}
    assert found == {
        "questions": [0.5, 1, 1],
        "samples": [0.5, 1, 1],
        "max_tokens": [0, 1, 1],
        "width": [0, 0, 0],
    }
    reported = [
        {"group": f"{test_growth.GROUP} {axis}", "row": name, "median": 1.0, **row.facts}
        for axis, of_axis in rows.items()
        for name, row in of_axis.items()
    ]
    assert grids(reported)[0].header == ["", "median", "by size", "growth exponent"]
    assert draw(reported, tmp_path / "plots.svg")


@pytest.mark.parametrize("tied", [False, True])
def test_models_of_the_benchmarks_never_end_an_answer(tied, tmp_path):
    config = config_of(64)
    config.tie_word_embeddings = tied
    write_model(config, tmp_path)
    model, tokenizer = LlamaForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    prompt = " ".join(f"w{i}" for i in range(1, PROMPT + 1))
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    assert ids.tolist() == [list(range(1, PROMPT + 1))]
    probabilities = torch.softmax(model(ids).logits.double(), -1)
    assert probabilities[..., END].max() < 1e-12
    assert (probabilities[..., 1:].max(-1).values < 0.01).all()  # the others are about equally likely
