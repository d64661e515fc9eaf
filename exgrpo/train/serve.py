"""`python -m exgrpo.train.serve MODEL`: a `vllm serve` that gives rollouts and takes weights.

It only puts the command together, prints it and becomes it; options that it does not know go to vLLM as they are.
"""

import argparse
import importlib.metadata
import json
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from exgrpo.train.ending import SERVER
from exgrpo.train.errors import ConfigError, ExgrpoError
from exgrpo.train.pretrained.arguments import from_arguments
from exgrpo.train.pretrained.check import check_positions, check_weights
from exgrpo.train.pretrained.source import ModelSource, find_model
from exgrpo.train.pretrained.tokenizer import DTYPES

GIB = 2**30
CPU_CACHE_GIB = 1.0
"""By default a server would take most of a machine's memory."""
SWITCHES = (
    "--enable-scale-out",  # token ids in, token ids out
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
    "--disable-uvicorn-access-log",
)


def main(argv: Sequence[str]) -> None:
    """Become the server."""
    try:
        command, environment = build(argv, on_cpu=_built_for_cpu())
    except ExgrpoError as error:
        sys.exit(f"error: {error}")
    settings = " ".join(f"{name}={value}" for name, value in environment.items())
    print(f"{settings} {shlex.join(command)}", flush=True)
    os.execve(command[0], command, {**os.environ, **environment, SERVER: str(os.getpid())})


def build(argv: Sequence[str], *, on_cpu: bool) -> tuple[list[str], dict[str, str]]:
    """The command of a server and what it needs in its environment.

    Args:
        argv: the arguments of this program.
        on_cpu: for vLLM's build for CPUs, where this program sets what vLLM finds out by itself on GPUs.

    Raises:
        ModelError: there is no such model, or it is not whole.
        ConfigError: an option does not suit it.
    """
    own, further = _parser().parse_known_args(argv)
    source = _checked(own.model, own.overrides, own.max_tokens)
    options, switches = _options(own, source, on_cpu=on_cpu), list(SWITCHES)
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # `vllm serve`; vLLM's build for CPUs has that command, but not under the name by which it asks for its version.
    program = ["vllm.entrypoints.cli.main", "serve", source.path]
    if on_cpu:
        program = ["vllm.entrypoints.launchers.api_server.entry", "--model", source.path]
        switches.append("--enforce-eager")
        # By default each server would take the cores that the trainer has.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    pairs = [str(part) for option in options.items() for part in option]
    return [sys.executable, "-m", *program, *pairs, *switches, *further], environment


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m exgrpo.train.serve", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", help="folder, hub name or builtin:NAME, as the trainer's policy.path")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="as the trainer's policy.dtype (%(default)s)")
    parser.add_argument("--max-tokens", type=int, help="longest prompt + response; the model's positions if left out")
    parser.add_argument(
        "--overrides", nargs="*", default=[], metavar="KEY=VALUE", help="as the trainer's policy.overrides"
    )
    parser.add_argument("--kv-cache-gib", type=float, help="for keys and values; on CPUs 1 if left out")
    parser.add_argument("--host", default="127.0.0.1", help="interface to listen on (%(default)s: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="(%(default)s)")
    parser.add_argument("--seed", type=int, help="of its samples; random if left out")
    return parser


def _options(own: argparse.Namespace, source: ModelSource, *, on_cpu: bool) -> dict[str, Any]:
    """The options of vLLM that have a value."""
    options: dict[str, Any] = {
        "--host": own.host,
        "--port": own.port,
        # Servers with one seed would draw alike.
        "--seed": secrets.randbelow(2**31) if own.seed is None else own.seed,
        "--dtype": str(DTYPES[own.dtype]).removeprefix("torch."),
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",  # of the policy that is sampled from, at its temperature
        "--weight-transfer-config": json.dumps({"backend": "gloo" if on_cpu else "nccl"}),
        "--worker-extension-cls": "exgrpo.train.rollout.server.worker.RolloutWorker",
    }
    if own.max_tokens is not None:
        options["--max-model-len"] = own.max_tokens
    if source.changes:
        options["--hf-overrides"] = json.dumps(dict(source.changes))
    cache_gib = own.kv_cache_gib
    if on_cpu:
        from exgrpo.train.rollout.vllm.engine import BLOCK_TOKENS

        options["--block-size"] = BLOCK_TOKENS
        cache_gib = cache_gib or CPU_CACHE_GIB
    if cache_gib is not None:
        options["--kv-cache-memory-bytes"] = int(cache_gib * GIB)
    return options


def _checked(path: str, overrides: Sequence[str], length: int | None) -> ModelSource:
    """The model, which is whole and has positions for so many tokens."""
    source = find_model(path, from_arguments(overrides))
    if length is not None:
        check_positions(source, length, f"--max-tokens ({length})")
    check_weights(source)
    return source


def _built_for_cpu() -> bool:
    """Which build of vLLM is installed.

    Raises:
        ConfigError: none.
    """
    for name in ("vllm-cpu", "vllm"):
        try:
            return "cpu" in name + importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ConfigError("vLLM is not installed: `make train ENGINE=vllm` installs the build for CPUs")


if __name__ == "__main__":
    main(sys.argv[1:])
