"""Check before training that a server can generate for this run."""

import shlex
from contextlib import suppress
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import urlsplit

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from exgrpo.train.common.errors import SHOWN, ConfigError, cut, shown
from exgrpo.train.common.limits import MOST_PROCESSES
from exgrpo.train.config.pretrained import to_arguments
from exgrpo.train.config.section import explain
from exgrpo.train.policy.tokenizer import DTYPES
from exgrpo.train.rollout.engine import EngineSettings, Sampling
from exgrpo.train.rollout.server.client import ServerClient, ServerError, part
from exgrpo.train.rollout.vllm.availability import SERVERS

COMPARED = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
    "max_position_embeddings",
    "rope_parameters",
)
"""Fields of a model's configuration that must be equal in the trainer and in a server."""
GLOO, PACKED_NCCL = "gloo", "packed_nccl"
"""The transports of weights to servers on CPUs and on GPUs, as `exgrpo.train.rollout.server.worker` registers them."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
FRESH = "default"
"""vLLM's label for the weights with which a server starts."""
INCOMPLETE = "incomplete"
"""Label of a server's weights while they are being replaced: answers with it are discarded."""


class ServerFacts(BaseModel):
    """Result of `WorkerExtension.rollout_facts` of a server's worker, and the label of its weights."""

    model_config = ConfigDict(frozen=True, strict=True, protected_namespaces=())

    model: dict[str, Any]
    path: str
    dtype: str
    max_model_len: PositiveInt
    logprobs_mode: str
    backend: str | None
    workers: Annotated[int, Field(ge=1, le=MOST_PROCESSES)]
    sequences: PositiveInt
    gpu: str
    label: str = ""


def start_command(settings: EngineSettings, url: str) -> str:
    """Return, for messages, the command that starts a fitting server at the address."""
    address = urlsplit(url)
    dtype = next(name for name, dtype in DTYPES.items() if dtype == settings.dtype)
    listen = "" if address.hostname in LOOPBACK else " --host 0.0.0.0"
    options = f"--dtype {dtype} --max-tokens {settings.length} --port {address.port}{listen}"
    if settings.source.overrides:
        options += f" --overrides {shlex.join(to_arguments(settings.source.overrides))}"
    return f"`python -m exgrpo.tools.serve {settings.source.path} {options}`"


def check_server(client: ServerClient, settings: EngineSettings, device: torch.device) -> ServerFacts:
    """Check everything about a server that a run depends on.

    Raises:
        ConfigError: the server does not fit; the message has the command that starts a fitting one.
    """
    remedy = f"start it with {start_command(settings, client.url)}"

    def refuse(problem: str) -> ConfigError:
        return ConfigError(f"rollout.servers: {client.url} {problem}: {remedy}")

    try:
        version = part(client.get("version"), "version", str)
    except ServerError as error:
        if error.status == HTTPStatus.UNAUTHORIZED:  # the server's message has the remedy
            raise ConfigError(f"rollout.servers: {client.url} refuses the trainer: {error}") from None
        raise refuse(f"cannot be reached as a server of vLLM ({error})") from None
    if version not in SERVERS:
        raise refuse(f"runs vLLM {cut(version, SHOWN)}, and a server must be one from {SERVERS}")
    try:
        facts, *others = map(ServerFacts.model_validate, client.call_workers("rollout_facts") or [None])
    except ServerError as error:
        raise refuse(f"lacks vLLM's development routes or this package's worker extension ({error})") from None
    except ValidationError as error:
        raise refuse(f"has facts that are not understood: {explain(error, ServerFacts, 'rollout_facts')}") from None
    if problem := _differs(facts, settings, device):
        raise refuse(problem)
    gpu = gpu_of(device)
    if gpu and gpu in {one.gpu for one in (facts, *others)}:  # NCCL cannot join two processes on one GPU
        raise refuse(
            f"computes on the GPU of the trainer's first process, {gpu}: give it another by CUDA_VISIBLE_DEVICES"
        )
    try:
        label = client.weight_version()
        if label == INCOMPLETE:
            end_update(client)
        eos = sorted(set(settings.eos))
        client.post("resume")  # a trainer that paused it may have died
        probe = client.generate("check", np.array(eos[:1], np.int32), 1, Sampling(1), eos)
    except ServerError as error:
        raise refuse(f"does not generate ({error})") from None
    if probe.versions != {label}:
        raise refuse("does not say which weights wrote an answer")
    return facts.model_copy(update={"label": label})


def end_update(client: ServerClient) -> None:
    """End an update of weights that stopped halfway, during which the model cannot compute; raise ServerError."""
    with suppress(ServerError):  # an update that did not stop by an error has been started already
        client.post("start_weight_update")
    client.post("finish_weight_update")


def _differs(facts: ServerFacts, settings: EngineSettings, device: torch.device) -> str | None:
    dtype, log_probs = str(settings.dtype).removeprefix("torch."), "processed_logprobs"  # at the sampling temperature
    wanted = {**model_facts(settings.source.config), "dtype": dtype, "logprobs_mode": log_probs}
    given = {**facts.model, "dtype": facts.dtype, "logprobs_mode": facts.logprobs_mode}
    for name, value in wanted.items():
        if (found := given.get(name)) != value:
            text = found if isinstance(found, str) else shown(found)
            return f"has {name} {cut(text, SHOWN)} and not {value}, with the model {cut(facts.path, SHOWN)}"
    if facts.max_model_len < settings.length:
        return (
            f"takes {facts.max_model_len} tokens, and data.max_prompt_tokens + rollout.max_tokens are {settings.length}"
        )
    if facts.backend not in (GLOO, PACKED_NCCL):
        return f"has no weight transfer by {PACKED_NCCL} or {GLOO} but {cut(str(facts.backend), SHOWN)}"
    if facts.backend == PACKED_NCCL and device.type != "cuda":
        return "takes weights over NCCL, and the trainer has no GPU"
    return None


def gpu_of(device: torch.device) -> str:
    """Return the globally unique id of a GPU; "" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def model_facts(config: Any) -> dict[str, Any]:
    """Return the `COMPARED` fields that a Hugging Face configuration has."""
    text = config.get_text_config()
    return {name: getattr(text, name) for name in COMPARED if hasattr(text, name)}
