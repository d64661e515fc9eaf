"""The program with real rollout servers on CPUs, as a user starts them."""

import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from exgrpo.train.common.columns import LOG_PROB_SOURCES
from tests.train.launch import MAIN, Ranks, launch
from tests.train.rollout.server.servers import Server
from tests.train.rollout.vllm.installed import real
from tests.train.run.test_run import SMALL, records

pytestmark = real


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    options = "--max-tokens=160", "--kv-cache-gib=0.2"
    model = Path("builtin:arithmetic")
    pair = [Server(model, folder / f"{number}.log", *options, cold=number == 0) for number in range(2)]
    try:
        for server in pair:
            server.start()
        yield pair
    finally:
        for server in pair:
            server.kill()


def options(servers, folder):
    urls = [server.ready() for server in servers]
    return (*SMALL, "--rollout.engine=server", "--rollout.servers", *urls, f"--output.folder={folder}")


@pytest.mark.long
def test_two_ranks_ahead_of_their_updates_lose_no_step_with_a_server(servers, tmp_path):
    ahead = ("--rollout.behaviour=engine", "--rollout.ahead=True", "--steps=6", "--rollout.check_every=3")
    arguments = (*options(servers, tmp_path), *ahead)
    run = Ranks(MAIN, *arguments, ranks=2)
    metrics = tmp_path / "small" / "metrics.jsonl"
    while run.running() and not (metrics.exists() and '"step": 2' in metrics.read_text()):
        time.sleep(0.05)
    servers[1].kill()
    done = run.finish()
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert "the same seed may give other ones" in printed
    assert servers[1].url in printed
    told = records(tmp_path / "small")
    gaps = {record["step"]: record["weight_gap"] for record in told if "weight_gap" in record}
    assert list(gaps) == [0, 3, 6]
    assert max(gaps.values()) < 1e-5
    steps = [record for record in told if "reward" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert [record["staleness"] for record in steps] == [0, 1, 1, 1, 1, 1]
    # An update moves the policy; rounding alone does not go this far.
    assert steps[0]["mismatch/mean"] < 1e-4 < steps[-1]["mismatch/mean"]
    assert all(0 < record["mismatch/ess"] <= 1 for record in steps)
    files = [load_file(path) for path in (tmp_path / "small" / "experience").glob("*.safetensors")]
    of_trajectories = [file["row.old_log_probs_from"] for file in files if "row.old_log_probs_from" in file]
    assert set(np.concatenate(of_trajectories)) == {LOG_PROB_SOURCES.index("engine")}


@pytest.mark.long
def test_servers_that_are_gone_are_one_error_before_training(servers, tmp_path):
    for server in servers:
        server.ready()
    arguments = options(servers, tmp_path)
    for server in servers:
        server.kill_alone()
    assert all(server.workers_end() for server in servers)
    done = launch(MAIN, *arguments, ranks=2)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert errors
    assert all(servers[0].url in line and "exgrpo.tools.serve" in line for line in errors), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "small").exists()
