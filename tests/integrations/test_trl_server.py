"""ExGRPO in TRL's server mode, by a real vLLM server on the CPU.

TRL sends weights to a server by NCCL, which takes a GPU. They are not sent here, so the server writes with the weights
of the first step throughout.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

pytest.importorskip("trl", reason="trl is not installed: pip install 'trl>=1.16,<2'", exc_type=ImportError)

from tests.integrations.trl_trainers import options, questions, reward, save_model, tokenizer
from tests.train.launch import ROOT, environment, free_port
from tests.train.rollout.vllm.installed import real

STEPS = 3
HEAD_WIDTH = 32  # vLLM's attention on CPUs takes no narrower ones


@pytest.fixture
def named(tmp_path: Path) -> dict[str, str]:
    """An environment in which the build for CPUs goes by the name of vllm, under which TRL and vLLM's program look."""
    about = tmp_path / "named" / "vllm-0.32.0+cpu.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    found = environment()
    return {**found, "PYTHONPATH": f"{about.parent}:{found['PYTHONPATH']}", "TRL_EXPERIMENTAL_SILENCE": "1"}


@pytest.fixture
def server(tmp_path: Path, named: dict[str, str]) -> Iterator[str]:
    """The address of a server as TRL's guide starts it, without a way for weights."""
    save_model(tmp_path / "model", head_width=HEAD_WIDTH)
    tokenizer().save_pretrained(tmp_path / "model")
    port, log = free_port(), tmp_path / "server.log"
    program = Path(sys.executable).with_name("vllm")
    given = ["--port", str(port), "--dtype", "float32", "--max-model-len", "64", "--max-logprobs", "-1"]
    given += ["--logprobs-mode", "processed_logprobs"]
    own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as out:
        command = [program, "serve", tmp_path / "model", *given]
        process = subprocess.Popen(command, env={**named, **own}, stdout=out, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 400
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not start: {log.read_text(errors='replace')[-4000:]}")
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def _answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.RequestException:
        return False


@real
@pytest.mark.long
def test_a_server_writes_the_fresh_answers(tmp_path: Path, named: dict[str, str], server: str) -> None:
    finished = subprocess.run(
        [sys.executable, __file__, server, tmp_path], cwd=ROOT, env=named, capture_output=True, text=True, timeout=600
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    logs = seen["logs"][:STEPS]
    # Two forwards in fp32 of logits below 30: a few roundings of 2e-6 each.
    assert logs[0]["sampling/sampling_logp_difference/max"] < 2e-5
    assert logs[1]["sampling/sampling_logp_difference/max"] > 1e-2, "the server has the weights of the first step"
    replayed = [log["experience/replayed"] for log in logs]
    assert replayed[0] == 0
    assert min(replayed[1:]) > 0
    assert seen["written"] == [16 - stored for stored in replayed]
    assert all(log["grad_norm"] > 0 for log in logs)


def run(url: str, folder: Path) -> None:
    """Train, and keep the logs and how many answers each generation asked for."""
    from trl.generation import vllm_generation
    from trl.generation.vllm_client import VLLMClient

    from exgrpo.integrations.trl import ExGRPOConfig, ExGRPOTrainer

    written = []

    class WithoutWeights(VLLMClient):
        def init_communicator(self, device: object = 0) -> None: ...

        def _start_weight_update(self) -> None: ...

        def _finish_weight_update(self) -> None: ...

        def update_named_params(self, metadata: object, named_params: object) -> None: ...

        def generate(self, *arguments: object, **more: object) -> dict[str, list]:
            output = super().generate(*arguments, **more)
            written.append(len(output["completion_ids"]))
            return output

    vllm_generation.VLLMClient = WithoutWeights
    own = {"start_pass_rate": 0.0, "learning_rate": 1e-2, "gradient_accumulation_steps": 2, "expire": []}
    own["max_steps"] = STEPS
    served = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
    config = ExGRPOConfig(**options(folder / "run", **own, **served))
    trainer = ExGRPOTrainer(
        str(folder / "model"), reward, config, questions().select(range(4)), processing_class=tokenizer()
    )
    trainer.train()
    (folder / "seen.json").write_text(json.dumps({"logs": trainer.state.log_history, "written": written}))


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]))
