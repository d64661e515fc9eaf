"""Signatures of vLLM's functions and classes, read from a wheel or an installed package without importing it.

`python -m tests.train.rollout.vllm.signatures WHEEL ...` adds those of wheels to `signatures.json`.
"""

import ast
import inspect
import json
import sys
import zipfile
from functools import cache
from pathlib import Path

from exgrpo.train.rollout.vllm.availability import SERVERS

RECORD = Path(__file__).with_suffix(".json")


def within(file: str, *names: str) -> dict[str, str]:
    return {name: f"{file}:{name}" for name in names}


def of_class(place: str, *methods: str) -> dict[str, str]:
    return {f"{place.partition(':')[2]}.{name}": f"{place}.{name}" for name in methods}


LLM_ENGINE = ("add_request", "step", "abort_request", "reset_prefix_cache", "has_unfinished_requests")
PLACES = {
    "LLM": "entrypoints/llm.py:LLM.__init__",
    **of_class("entrypoints/llm.py:LLM", "collective_rpc", "apply_model", "sleep", "wake_up"),
    **of_class("v1/engine/llm_engine.py:LLMEngine", *LLM_ENGINE),
    **within("engine/arg_utils.py", "EngineArgs", "EngineArgs.create_model_config"),
    **within("sampling_params.py", "SamplingParams", "RequestOutputKind"),
    **within("inputs/engine.py", "tokens_input"),
    **within("config/vllm.py", "set_current_vllm_config", "VllmConfig.use_v2_model_runner"),
    **within("v1/worker/gpu_model_runner.py", "GPUModelRunner.reload_weights"),
    "GPUModelRunnerV2.reload_weights": "v1/worker/gpu/model_runner.py:GPUModelRunner.reload_weights",
    **within("v1/engine/core_client.py", "InprocClient.shutdown"),
    "RequestOutput": "outputs.py:RequestOutput.__init__",
    **within("outputs.py", "CompletionOutput"),
    **within("v1/attention/backends/registry.py", "AttentionBackendEnum"),
}
"""What generation in the process calls, by where it is in vLLM."""
TRANSFER, NCCL = "distributed/weight_transfer", "distributed/weight_transfer/nccl_engine.py:NCCLWeightTransferEngine"
SERVED = {
    **within("*/cli_args.py", "FrontendArgs", "BaseFrontendArgs"),
    **within("entrypoints/scale_out/token_in_token_out/protocol.py", "GenerateRequest", "GenerateChoiceBase"),
    **within(f"{TRANSFER}/nccl_common.py", "NCCLWeightTransferInitInfo", "stateless_init_process_group"),
    **within(f"{TRANSFER}/nccl_engine.py", "NCCLWeightTransferUpdateInfo"),
    **{name: f"{NCCL}.{name}" for name in ("receive_weights", "shutdown", "finish_weight_update")},
    "update_weights": f"{TRANSFER}/base.py:WeightTransferEngine.update_weights",
    "register_engine": f"{TRANSFER}/factory.py:WeightTransferEngineFactory.register_engine",
    **of_class("distributed/device_communicators/pynccl.py:PyNcclCommunicator", "broadcast", "destroy"),
}
"""What servers are started with and called by."""
ROUTES = ("rl/online", "serve/dev/rpc", "serve/instrumentator", "scale_out/token_in_token_out")
Record = dict[str, str]
"""By name: the parameters of a function as in its source, all defaults None; the fields of a class likewise."""


def signatures(root: Path | zipfile.Path, serves: bool) -> Record:
    """Return the signatures of vLLM's functions and classes in a folder.

    Args:
        root: the folder, or the content of a wheel.
        serves: True to include those of servers, and the routes.
    """
    found = {name: parameters(root, place) for name, place in (PLACES | (SERVED if serves else {})).items()}
    if serves:
        texts = (file.read_text(encoding="utf-8") for part in ROUTES for file in walk(root / "entrypoints" / part))
        found["routes"] = " ".join(sorted({route for text in texts for route in routes_in(ast.parse(text))}))
    return found


def parameters(root: Path | zipfile.Path, place: str) -> str:
    """Return the parameters of a function, or the fields of a class or enumeration."""
    path, _, names = place.partition(":")
    files = [root / path] if "*" not in path else [f for f in walk(root / "entrypoints") if f.name == "cli_args.py"]
    for file in files:
        node: ast.AST | None = ast.parse(file.read_text(encoding="utf-8"))
        for name in names.split("."):
            node = next((one for one in node.body if getattr(one, "name", None) == name), None) if node else None
        if isinstance(node, ast.ClassDef):
            return ", ".join(["*", *filter(None, map(field, node.body))])
        if node is not None:
            return arguments(node.args, bound="." in names)
    raise LookupError(f"{root} has no {place}")


def arguments(of: ast.arguments, bound: bool) -> str:
    """The parameters of a function, but the first one if it is bound."""
    plain = [ast.arg(one.arg) for one in of.args[bound:]]
    alone = [ast.arg(one.arg) for one in of.kwonlyargs]
    none = ast.Constant(None)
    given = [default and none for default in of.kw_defaults]
    rest = [one and ast.arg(one.arg) for one in (of.vararg, of.kwarg)]
    return ast.unparse(ast.arguments([], plain, rest[0], alone, given, rest[1], [none] * len(of.defaults)))


def field(statement: ast.stmt) -> str:
    """Return the name of a class's annotated field or of an enumeration's member; "": neither."""
    if isinstance(statement, ast.AnnAssign) and not statement.target.id.startswith("_"):
        return statement.target.id + ("=None" if statement.value else "")
    if isinstance(statement, ast.Assign) and statement.targets[0].id.isupper():
        return f"{statement.targets[0].id}=None"
    return ""


def routes_in(tree: ast.AST) -> list[str]:
    """The paths of `@router.get(...)` and `@router.post(...)`."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
    return [
        call.args[0].value
        for call in calls
        if call.func.attr in ("get", "post") and call.args and isinstance(call.args[0], ast.Constant)
        if str(call.args[0].value).startswith("/")
    ]


def walk(folder):
    """The files of Python in a folder and below."""
    for one in folder.iterdir():
        if one.is_dir():
            yield from walk(one)
        elif one.name.endswith(".py"):
            yield one


@cache
def recorded() -> dict[str, Record]:
    """The record, by version."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


@cache
def signature(version: str, name: str) -> inspect.Signature:
    """Return the signature of a version's function or class."""
    return inspect.signature(eval(f"lambda {recorded()[version][name]}: None"))


def main(wheels: list[str]) -> None:
    record = dict(recorded()) if RECORD.exists() else {}
    for wheel in wheels:
        version = Path(wheel).name.split("-")[1]
        record[version] = signatures(zipfile.Path(wheel, "vllm/"), version in SERVERS)
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
