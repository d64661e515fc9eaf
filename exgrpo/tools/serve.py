"""`python -m exgrpo.tools.serve MODEL`: a `vllm serve` that generates rollouts and receives weights.

It builds the command, prints it and replaces itself with it; unknown options are passed on to vLLM. The server answers
only requests with the token in EXGRPO_SERVER_TOKEN, or else in ~/.exgrpo_server_token, which the first start creates.
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

from exgrpo.extras import needs

with needs(__name__, "exgrpo[train]"):
    from exgrpo.train.common.errors import ConfigError, ExgrpoError
    from exgrpo.train.common.process import SERVER
    from exgrpo.train.common.threads import VARIABLE, choose
    from exgrpo.train.config.policy import from_arguments
    from exgrpo.train.policy.check import check_positions, check_weights
    from exgrpo.train.policy.source import ModelSource, find_model
    from exgrpo.train.policy.tokenizer import DTYPES
    from exgrpo.train.rollout.server.check import GLOO, PACKED_NCCL
    from exgrpo.train.rollout.server.guard import TOKEN, made_token, server_token
    from exgrpo.train.rollout.vllm.availability import INSTALL, SERVERS
    from exgrpo.train.rollout.vllm.engine import BLOCK_TOKENS, CPU_CACHE_GIB, gpu_precision

GIB = 2**30
SWITCHES = (
    "--enable-scale-out",  # token ids in, token ids out
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
    "--disable-uvicorn-access-log",
)
VLLM_KEY = "VLLM_API_KEY"
UNGUARDED = {  # refused options of vLLM, with the reason
    "--api-key": f"vLLM's key guards only a part of its routes: set {TOKEN}, which guards all of them",
    "--grpc": "the trainer uses HTTP, and only that is guarded: leave it out",
}


def main(argv: Sequence[str]) -> None:
    """Replace this process by the server."""
    try:
        _parser().parse_known_args(argv)  # --help needs no vLLM
        command, environment = build(argv, on_cpu=_built_for_cpu())
    except ExgrpoError as error:
        sys.exit(f"error: {error}")
    shown = {name: "..." if name in (TOKEN, VLLM_KEY) else value for name, value in environment.items()}
    settings = " ".join(f"{name}={value}" for name, value in shown.items())
    print(f"{settings} {shlex.join(command)}", flush=True)
    os.execve(command[0], command, {**os.environ, **environment, SERVER: str(os.getpid())})


def build(argv: Sequence[str], *, on_cpu: bool) -> tuple[list[str], dict[str, str]]:
    """Return the command of a server and its environment variables.

    Args:
        argv: arguments of this program.
        on_cpu: for vLLM's CPU build, which needs settings that vLLM finds by itself on GPUs.

    Raises:
        ModelError: the model does not exist or is incomplete.
        ConfigError: an option does not suit it, or the token is malformed.
    """
    own, further = _parser().parse_known_args(argv)
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", **_guarded(further)}
    source = _checked(own.model, own.overrides, own.max_tokens)
    options, switches = _options(own, source, on_cpu=on_cpu), list(SWITCHES)
    # `vllm serve`; in vLLM's CPU build that command looks up its version under a package name that is not installed.
    program = ["vllm.entrypoints.cli.main", "serve", source.path]
    if on_cpu:
        program = ["vllm.entrypoints.launchers.api_server.entry", "--model", source.path]
        switches.append("--enforce-eager")
        # By default each server would bind to the trainer's cores.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        environment[VARIABLE] = str(choose(None, None, [os.sched_getaffinity(0)]).count)
    pairs = [str(part) for option in options.items() for part in option]
    return [sys.executable, "-m", *program, *pairs, *switches, *further], environment


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m exgrpo.tools.serve", description=__doc__, allow_abbrev=False)
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


def _guarded(further: Sequence[str]) -> dict[str, str]:
    """Return the guard's environment variables; raise ConfigError for a bad token or an option that bypasses it."""
    for option in further:
        if reason := UNGUARDED.get(option.partition("=")[0].replace("_", "-")):
            raise ConfigError(f"{option}: {reason}")
    if made := made_token():
        print(f"made a token for rollout servers in {made}: the trainer reads it there, on other machines copy it")
    token = server_token()
    return {TOKEN: token, VLLM_KEY: token}


def _options(own: argparse.Namespace, source: ModelSource, *, on_cpu: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "--host": own.host,
        "--port": own.port,
        # Servers with the same seed would draw the same samples.
        "--seed": secrets.randbelow(2**31) if own.seed is None else own.seed,
        "--dtype": str(DTYPES[own.dtype]).removeprefix("torch."),
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",  # of the sampled distribution, at its temperature
        "--weight-transfer-config": json.dumps({"backend": GLOO if on_cpu else PACKED_NCCL}),
        "--worker-extension-cls": "exgrpo.train.rollout.server.worker.WorkerExtension",
        "--middleware": "exgrpo.train.rollout.server.guard.Guard",
    }
    if own.max_tokens is not None:
        options["--max-model-len"] = own.max_tokens
    overrides, cache_gib = dict(source.changes), own.kv_cache_gib
    if on_cpu:
        options["--block-size"] = BLOCK_TOKENS
        # By default a server would take most of a machine's memory.
        cache_gib = cache_gib or CPU_CACHE_GIB
    else:
        overrides, attention = gpu_precision(DTYPES[own.dtype], overrides)
        options |= {"--attention-backend": attention} if attention else {}
    if overrides:
        options["--hf-overrides"] = json.dumps(overrides)
    if cache_gib is not None:
        options["--kv-cache-memory-bytes"] = int(cache_gib * GIB)
    return options


def _checked(path: str, overrides: Sequence[str], length: int | None) -> ModelSource:
    source = find_model(path, from_arguments(overrides))
    if length is not None:
        check_positions(source, length, f"--max-tokens ({length})")
    check_weights(source)
    return source


def _built_for_cpu() -> bool:
    """True if vLLM's CPU build is installed; raise ConfigError if vLLM is missing or of a version that cannot serve."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        on_cpu = "cpu" in name + version
        if version not in SERVERS:
            install = INSTALL["cpu" if on_cpu else "cuda"]
            raise ConfigError(f"vLLM {version} is installed, and a server must be one from {SERVERS}: {install}")
        return on_cpu
    raise ConfigError(f"vLLM is not installed: {INSTALL['cpu']}; {INSTALL['cuda']}")


if __name__ == "__main__":
    main(sys.argv[1:])
