"""Training steps: programs of their own, their memory, and how their rows are compared."""

import json

import pytest
import torch

from benchmarks import test_training_step
from benchmarks.programs import ROOT
from benchmarks.render import grids
from benchmarks.test_training_step import EXGRPO, ON_POLICY, TRL
from benchmarks.timing import OURS, Budget
from benchmarks.workloads import TINY
from tests.programs import python

PEAKS = """
import json, subprocess, sys
from benchmarks.memory import program_peak
found = [program_peak()]
held = bytearray(512 << 20)
del held
found.append(program_peak())
code = "import sys; held = bytearray(64 << 20); del held; print('ready', flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
found.append(program_peak())
child.kill()
print(json.dumps(found))
"""


def test_the_peak_of_a_program_has_that_of_its_children():
    begin, held, beside = json.loads(python("-c", PEAKS, cwd=ROOT))
    assert begin["children_bytes"] == held["children_bytes"] == 0
    # The imports may have held some memory that is free again; an interpreter without torch takes less than 48 MiB.
    assert held["peak_bytes"] - begin["peak_bytes"] == pytest.approx(512 << 20, abs=64 << 20)
    assert 64 << 20 <= beside["children_bytes"] <= (64 + 48) << 20
    assert beside["peak_bytes"] - beside["children_bytes"] == pytest.approx(held["peak_bytes"], abs=16 << 20)


def step(seconds, tokens, phases, own=100, children=0, **facts):
    memory = {"peak_bytes": (own + children) << 20, "children_bytes": children << 20}
    return {"seconds": seconds, "phases": phases, "generated_tokens": tokens, "mfu": {}, **memory, **facts}


def test_rows_of_a_training_step_are_compared_with_trl():
    steps = {
        TRL: [step(load * 4.0, 100, {"generate": 3.0, "update": 1.0}) for load in (1, 5, 2)],
        ON_POLICY: [step(load * 3.0, 100, {"generate": 2.0, "update": 1.0}, 120, 30) for load in (1, 5, 2)],
        EXGRPO: [step(load * 2.0, 50, {"generate": 1.0, "push": 1.0}, 120, replayed=4) for load in (1, 5, 2)],
    }
    rows = test_training_step.results(steps)
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


def test_a_step_with_replay_is_measured_by_phase(tmp_path):
    row = test_training_step.measure(TINY, [EXGRPO], tmp_path, rounds=1)[EXGRPO]
    facts, (seconds,) = row.facts, row.seconds
    assert {"generate", "score", "update"} < facts["phases"].keys()
    assert 0 < sum(facts["phases"].values()) < seconds
    answers, length = TINY.groups * TINY.samples, TINY.max_tokens  # the answers never end
    assert facts["replayed"]
    assert facts["generated_tokens"] == (answers - facts["replayed"]) * length
    assert facts["mfu"]["update"] > 0


@pytest.mark.long
def test_a_step_of_trl_is_measured_by_phase(tmp_path):
    pytest.importorskip("trl", reason="trl is not installed")
    row = test_training_step.measure(TINY, [TRL], tmp_path, rounds=2)[TRL]
    assert len(row.seconds) == 2, row.failure
    assert {"generate", "grade", "score", "update"} == row.facts["phases"].keys()
    assert row.facts["generated_tokens"] == TINY.groups * TINY.samples * TINY.max_tokens
    assert row.facts["times_trl"] == (1.0, 1.0, 1.0)


def test_heads_in_trl_give_the_gradients_of_full_logits(tmp_path):
    pytest.importorskip("trl", reason="trl is not installed")
    from benchmarks import test_trl_head

    rows = test_trl_head.measure(TINY, tmp_path, torch.device("cpu"), Budget(0.0, least=1))
    ran = {name: row.facts for name, row in rows.items() if row.seconds}
    assert {*ran, test_trl_head.LIGER} == {*test_trl_head.ROWS}
    # fp32 rounds to 6e-8, and a term of the loss that is left out or scaled wrongly changes some percent.
    assert all(0 < facts["gradient_error"] < 1e-4 for facts in ran.values())
    assert not any(facts["wrong"] for name, facts in ran.items() if name.startswith(OURS))
