"""verl's own command on this CPU: a platform, a rollout that makes answers up, and a trainer that writes what it saw.

verl imports this module in all its processes (VERL_USE_EXTERNAL_MODULES). Answers are drawn by the numbers of the
prompt and of the answer, so that two runs generate the same ones.
"""

import json
import os
import random
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed
import transfer_queue as tq
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

EOS, FIRST, WORDS = 2, 5, 10
"""Of the vocabulary of the tiny model."""
TRACE = "EXGRPO_TRACE"
"""Folder of what the trainer writes."""
GRADED = ("question", "group", "length", "replayed", "reward", "key", "finished", "token", "old_log_prob", "trained")
"""Columns of the batch of a step that it writes."""


class _Device(SimpleNamespace):
    """The functions of torch.cuda that verl calls, where there is nothing to do."""

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 1, 2

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: 0


@contextmanager
def _range(*_: Any) -> Any:
    yield


def _constant(value: Any) -> Any:
    return lambda *_, **__: value


PLATFORM = {
    "device_name": property(_constant("cpu")),
    "vendor_name": property(_constant("none")),
    "device_module": property(_constant(_Device())),
    "is_available": _constant(True),
    "current_device": _constant("cpu"),
    "device_count": _constant(1),
    "get_device_capability": _constant((None, None)),
    "communication_backend_name": _constant("gloo"),
    "visible_devices_envvar": _constant("CUDA_VISIBLE_DEVICES"),
    "nvtx_range": _range,
    "ray_resource_name": _constant("GPU"),
    "ray_resource_options": lambda self, count: {"num_gpus": count},
    "ray_noset_envvars": _constant([]),
    "is_ipc_supported": _constant(False),
}
nothing = {name: _constant(None) for name in PlatformBase.__abstractmethods__ if name not in PLATFORM}
PlatformRegistry.register(platform="cpu")(type("Cpu", (PlatformBase,), nothing | PLATFORM))
_init_process_group = torch.distributed.init_process_group


def _with_one_backend(*arguments: Any, backend: str | None = None, **more: Any) -> None:
    """Pass one backend: verl requests one for the CPU and one for its device, which are the same here."""
    _init_process_group(*arguments, backend="gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **more)


torch.distributed.init_process_group = _with_one_backend

from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout  # noqa: E402
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput  # noqa: E402

from exgrpo.integrations.verl_replay import ExGRPOTrainer  # noqa: E402


class Weights(BaseRollout):
    """Takes weights and leaves them."""

    async def resume(self, tags: Any) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(self, weights: Any, **_: Any) -> None:
        for _ in weights:
            pass


@ray.remote(num_cpus=0)
class Server:
    """Makes up answers: two to five words and the end, by the prompt and its number of requests."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[int, ...]] = Counter()

    async def generate(self, prompt_ids: list[int], *_: Any, **__: Any) -> TokenOutput:
        self.asked[tuple(prompt_ids)] += 1
        rng = random.Random(str((prompt_ids, self.asked[tuple(prompt_ids)])))
        words = [rng.randrange(FIRST, FIRST + WORDS) for _ in range(rng.randint(2, 5))]
        return TokenOutput(
            token_ids=[*words, EOS],
            log_probs=[-2.0] * (len(words) + 1),
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"global_steps": 0},
        )

    async def wake_up(self) -> None:
        pass

    async def sleep(self) -> None:
        pass


class Replica(RolloutReplica):
    """A replica of this server."""

    async def launch_servers(self) -> None:
        self._server_handle = Server.remote()
        self._server_address, self.servers = f"cpu{self.replica_rank}", [self._server_handle]


_ROLLOUT_REGISTRY["cpu", "async"] = f"{__name__}.Weights"
RolloutReplicaRegistry.register("cpu", lambda: Replica)


class Traced(ExGRPOTrainer):
    """Writes each step's plan, scored rows, inputs of the update, and metrics."""

    scored: tuple[Any, ...] = ()

    def _mean_scores(self, candidates: Any) -> Any:
        scores, groups = super()._mean_scores(candidates), candidates.group.tolist()
        answers = [candidates.token[candidates.at(row)].tolist() for row in range(len(candidates))]
        self.scored = tuple(zip(groups, answers, scores.entropy.tolist(), strict=True))
        return scores

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        folder, step = Path(os.environ[TRACE]), self.global_steps
        plan = [[group.question, group.fresh, group.choose, *group.rows] for group in self._groups]
        if self._trained:  # the policy before the update, as the workers see it
            batch.extra_info |= {"calculate_entropy": False, "compute_loss": False, "temperature": 1.0}
            self.actor_rollout_wg.compute_log_prob(batch)
            names = ["uid", "log_probs", "old_log_probs", "advantages", "weights", "response_mask", "prompts"]
            names += ["responses", "rm_scores"]
            data = tq.kv_batch_get(batch.keys, batch.partition_id, [*names, "replayed"])
            columns = {name: np.array([v.tolist() for v in data[name].unbind()], object) for name in names[1:]}
            columns |= {"uid": np.array(list(data["uid"])), "replayed": data["replayed"].numpy()}
            columns["padding"] = np.array([bool(tag.get("is_padding")) for tag in batch.tags])
            np.savez(folder / f"{step}.npz", clip=batch.extra_info["clip"], rows=batch.extra_info["rows"], **columns)
        result = super()._update_actor(batch, metrics)
        numbers = {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}
        graded = {name: getattr(self._batch, name).tolist() for name in GRADED}
        told = {"plan": plan, "uids": self._uids, "scored": self.scored, "metrics": numbers, "graded": graded}
        (folder / f"{step}.json").write_text(json.dumps(told))
        self.scored = ()
        return result


from verl.trainer.ppo.v1 import register_trainer  # noqa: E402

register_trainer("traced")(Traced)
