"""The examples for clusters: their own linters find nothing, and all their options exist."""

import os
import re
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from exgrpo.tools import serve
from exgrpo.train.config.recipe import parse_args
from tests.programs import printed, ran
from tests.train.launch import ROOT

SLURM, KUBERNETES = (ROOT / "examples" / name for name in ("slurm.sh", "kubernetes.yaml"))


def documents():
    return list(yaml.safe_load_all(KUBERNETES.read_text()))


def test_the_shell_has_nothing_to_complain_about():
    printed(Path(sys.executable).with_name("shellcheck"), SLURM)


def test_a_server_that_ends_ends_the_job(tmp_path):
    commands = {"scontrol": "printf 'n%d\\n' 1 2 3 4", "srun": "exit 3", "curl": "sleep 1; exit 7"}
    for name, body in commands.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    job = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_CPUS_PER_TASK": "32", "SLURM_JOB_ID": "7"}
    there = {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", **job}
    done = ran("bash", SLURM, cwd=tmp_path, env=there, timeout=60)
    assert done.returncode == 1
    assert "the server at http://n3:8000 has ended" in done.stderr


@pytest.mark.parametrize("document", documents(), ids=lambda document: document["kind"])
def test_every_object_is_one_of_kubernetes(document):
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def told(text, program):
    """The words behind a program, on lines that are continued."""
    (words,) = re.findall(rf"{re.escape(program)} (.*)", text.replace("\\\n", " "))
    return words.split()


@pytest.mark.parametrize(
    "text", [SLURM.read_text(), documents()[2]["spec"]["template"]["spec"]["containers"][0]["args"][0]]
)
def test_the_trainer_has_all_options(text):
    flat = text.replace("\\\n", " ")
    options = flat[flat.index("--resume auto") :].replace('"${urls[@]}"', "http://a:8000").replace("$model", "model")
    config = parse_args([word.strip('"') for word in options.split()])
    assert config.resume == "auto"
    assert config.rollout.engine == "server"
    assert all(url.startswith("http://") for url in config.rollout.servers)


OF_SERVER = documents()[1]["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    "words",
    [[*OF_SERVER["command"][3:], *OF_SERVER["args"]], told(SLURM.read_text(), "exgrpo.tools.serve")[:-1]],
    ids=["kubernetes", "slurm"],
)
def test_the_server_has_all_options(words):
    own, further = serve._parser().parse_known_args([word.strip('"') for word in words])
    assert (own.host, own.port, own.max_tokens) == ("0.0.0.0", 8000, 3072)
    assert further in ([], ["--tensor-parallel-size", "4"])
