"""The trainer on two hosts and vLLM servers on two others: their weights, and servers that are cut off."""

import re
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from exgrpo.train.checkpoint.listing import survey
from exgrpo.train.rollout.server.guard import TOKEN
from tests.programs import wait_for
from tests.train import hosts
from tests.train.rollout.server.servers import Server
from tests.train.rollout.vllm.installed import real
from tests.train.run.test_hosts import INSIDE, wait_for_a_checkpoint
from tests.train.run.test_run import SMALL, records

pytestmark = [
    pytest.mark.long,
    real,
    pytest.mark.skipif(hosts.missing() is not None, reason=str(hosts.missing())),
    pytest.mark.timeout(1200),  # two servers start cold
]

MODEL = Path("builtin:arithmetic")
SERVING = ("--max-tokens=160", "--kv-cache-gib=0.2")
UNREACHED = 120
"""Seconds after which a server whose machine is not reached any more is left out: docs/servers.md."""


@pytest.fixture(scope="module", autouse=True)
def token():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN, "known-to-servers-and-trainer")
        yield


@contextmanager
def running(*servers):
    """Addresses of the servers, while they run."""
    try:
        for server in servers:
            server.start()
        yield [server.ready() for server in servers]
    finally:
        for server in servers:
            server.kill()


def options(urls, folder):
    return (*SMALL, "--rollout.engine=server", "--rollout.servers", *urls, f"--output.folder={folder}")


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Four hosts, and the addresses of servers on the last two of them."""
    folder = tmp_path_factory.mktemp("four")
    with hosts.Hosts(4, trainers=2) as made:
        servers = [
            Server(MODEL, folder / f"{host}.log", *SERVING, on=made.on(host), address=made.addresses[host])
            for host in (2, 3)
        ]
        with running(*servers) as urls:
            yield made, urls


def test_servers_on_other_hosts_have_the_weights_of_trainers_on_two(four, tmp_path):
    """A check asks every server for answers, whose log-probs have to be the policy's, before training and after."""
    made, urls = four
    status, printed = finished(made.torchrun(*options(urls, tmp_path), "--steps=3", "--rollout.check_every=1"))
    assert status == 0, printed
    assert "on 2 x cpu" in printed
    told = records(tmp_path / "small")
    gaps = [record["weight_gap"] for record in told if "weight_gap" in record]
    assert len(gaps) == 4
    assert max(gaps) < 1e-5
    steps = [record for record in told if "reward" in record]
    assert steps[-1]["replayed"] > 0
    assert all(record["grad_norm"] > 0 for record in steps)


def test_a_run_goes_on_without_a_server_and_ends_in_time_without_any(four, tmp_path):
    """Servers whose cables are out are one line each; put in again, they are used as before."""
    made, urls = four
    long = [option for option in options(urls, tmp_path) if not option.startswith("--steps")]
    running = made.torchrun(*long, "--steps=200", "--checkpoint.every=1")
    folder = tmp_path / "small"
    wait_for_a_checkpoint(folder, running)
    made.cut(3)
    step, seconds = survey(folder)[0][0].step + 3, UNREACHED + 60
    wait_for(lambda: any(one.get("step", 0) >= step for one in records(folder)), of=running[:1], seconds=seconds)
    made.cut(2)
    start = time.monotonic()
    status, printed = finished(running)
    assert time.monotonic() - start < UNREACHED + 60, printed
    assert status != 0
    assert INSIDE not in printed
    told = re.findall(r"(error.*): no rollout server is left \((.*)\): start them again, and go on with", printed)
    assert sorted(who for who, _ in told) == ["error", "error on rank 1"]
    assert all(url in each for url in urls for _, each in told)
    assert made.processes(0) == made.processes(1) == []
    for host in (2, 3):
        made.restore(host)
    (newest, *_), problems = survey(folder)
    assert problems == []
    status, printed = finished(made.torchrun(*long, f"--steps={newest.step + 2}", "--resume=auto"))
    assert status == 0, printed
    assert "rollout server" not in printed
    assert [record["step"] for record in records(folder) if "reward" in record] == [*range(1, newest.step + 3)]


def finished(running):
    """The exit status of a run on several hosts, 0 where it is that of all, and what they have printed."""
    printed = [one.communicate(timeout=400)[0] for one in running]
    return max(abs(one.returncode) for one in running), "".join(printed)
