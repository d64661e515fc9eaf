"""`exgrpo bench`: with torch alone, with all that there is, and what it says of peers and of mistakes."""

import json
import re
import time

import pytest
import torch

from exgrpo.tools.bench import affordable, case_of, main, measure, parse
from exgrpo.tools.heads import POLICY_LOSS, Case, Floor, FullLogits
from exgrpo.tools.peers import PEERS
from tests.test_extras import HIDDEN, ROOT, with_torch_alone

TINY = ("--tokens", "16", "--hidden", "8", "--vocabulary", "60", "--dtype", "fp32")
ALL_PEERS = "cut_cross_entropy liger_kernel quack verl"
CPU = torch.device("cpu")


def test_with_torch_alone_it_names_what_would_bring_the_rest(tmp_path):
    options = (*TINY, "--output", tmp_path)
    done = with_torch_alone("exgrpo.tools.bench", *options, hidden=f"{HIDDEN} {ALL_PEERS}", TORCH_COMPILE_DISABLE="1")
    assert done.returncode == 0, done.stderr
    assert "no verl FusedLinearForPPO: not installed: pip install --no-deps verl==0.9.1\n" in done.stdout
    assert "a picture needs matplotlib: pip install matplotlib" in done.stdout
    content = json.loads((tmp_path / "bench.json").read_text())
    rows = {row["row"]: row for row in content["rows"]}
    assert {"floor", "exgrpo torch", "full logits", "full logits, compiled"} <= rows.keys()
    # Eager or "compiled" to the same, plain torch has one error, and rounding in fp32 is far below this.
    assert rows["full logits"]["gradient_error"] == rows["full logits, compiled"]["gradient_error"] < 1e-5
    assert not any(row.get("wrong") for row in content["rows"])
    done = with_torch_alone("exgrpo.tools.bench", "--model", "nobody/nothing", "--output", tmp_path)
    assert done.returncode == 2
    assert "pip install 'exgrpo[train]'" in done.stderr


def test_it_draws_where_it_can_and_leaves_the_ratios(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("exgrpo.tools.bench.ROWS", (Floor(), FullLogits()))
    assert main([*TINY, "--output", str(tmp_path)]) == 0
    assert "<svg" in (tmp_path / "bench.svg").read_text()
    floor, plain = json.loads((tmp_path / "bench.json").read_text())["rows"]
    ratios = sorted(a / b for a, b in zip(floor["seconds"], plain["seconds"], strict=True))
    assert ratios[0] <= plain["floor_over_time"] <= ratios[-1]
    assert re.search(r"full logits +[\d.,]+ ms +\d\.\d\d \(\d\.\d\d to \d\.\d\d\)", capsys.readouterr().out)


def test_rows_without_time_are_left_out_by_name():
    case = Case(POLICY_LOSS, 8, 4, 20, torch.float32)
    results = measure(case, [FullLogits()], CPU, 0.0, end=time.perf_counter())
    assert results["full logits"].reason == "there was no time left for it"


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ((), (896, 32000)),
        (("--model", "Qwen/Qwen2.5-1.5B"), (1536, 151936)),
        (("--hidden", "64"), (64, 32000)),
        (("--vocabulary", "64000"), (896, 64000)),
    ],
)
def test_sizes_are_those_asked_for(words, sizes):
    case = case_of(parse([*words, "--tokens", "7"]), CPU)
    assert (case.tokens, case.width, case.vocabulary) == (7, *sizes)


@pytest.mark.parametrize(("tokens", "seconds", "left"), [(512, 0, 64), (512, 3600, 512), (7, 3600, 7), (7, 0, 7)])
def test_there_are_as_many_tokens_as_have_time(tokens, seconds, left):
    assert affordable(Case(POLICY_LOSS, tokens, 4, 20, torch.float32), CPU, seconds).tokens == left


def test_a_models_folder_needs_no_package(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"hidden_size": 12, "vocab_size": 300}}))
    case = case_of(parse(["--model", str(tmp_path), "--tokens", "5"]), CPU)
    assert (case.width, case.vocabulary) == (12, 300)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "x", "--hidden", "8"), "--model says what --hidden and --vocabulary are"),
        (("--dtype", "fp16"), "--dtype fp16: most CPUs multiply it by plain loops"),
    ],
)
def test_options_that_cannot_be_are_one_line(words, message, capsys):
    if torch.cuda.is_available():
        pytest.skip("the messages are those of a machine without a GPU")
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_the_versions_of_peers_are_those_that_are_compared_elsewhere():
    pinned = re.findall(r"^(?:GPU_)?PEERS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(pinned) == 2
    assert {peer.requirement for peer in PEERS if peer.requirement} <= set(" ".join(pinned).split())
