"""What vLLM's worker processes need beyond vLLM to serve rollouts.

`vllm serve --worker-extension-cls exgrpo.train.rollout.server.worker.RolloutWorker` imports this module in each worker
before the model is made, so that `--weight-transfer-config '{"backend": "gloo"}'` is known there, and so that the
worker ends when the server is killed.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from exgrpo.extras import needs
from exgrpo.train.common.process import SERVER, end_with_ancestor
from exgrpo.train.rollout.server.channel import join_gloo
from exgrpo.train.rollout.server.check import model_facts
from exgrpo.train.rollout.vllm.engine import repack_tied_head
from exgrpo.train.rollout.vllm.probe import differing
from exgrpo.train.rollout.vllm.process import request_tiles

with needs(__name__, "exgrpo[vllm]"):
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLWeightTransferEngine,
        NCCLWeightTransferInitInfo,
        NCCLWeightTransferUpdateInfo,
    )


class GlooWeightTransferEngine(NCCLWeightTransferEngine):
    """vLLM's weight transfer with gloo in the place of NCCL: for CPUs."""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the trainer's group."""
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.model_update_group = join_gloo(init_info.master_address, init_info.master_port, rank, init_info.world_size)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load a bucket; vLLM's own waits for an accelerator afterwards."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive and load a bucket; where it fails, the trainer hears it at once."""
        try:
            for name, weight in _received(self, update_info.names, update_info.dtype_names, update_info.shapes):
                self.model.load_weights([(name, weight)])
        except BaseException:
            self.shutdown()
            raise

    def finish_weight_update(self) -> None:
        """End the update, and pack a tied head anew."""
        super().finish_weight_update()
        repack_tied_head(self.model)


def _received(
    engine: NCCLWeightTransferEngine, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that the trainer sends, each on the worker's device."""
    over_gloo = isinstance(engine, GlooWeightTransferEngine)
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        weight = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu" if over_gloo else engine.device)
        engine.model_update_group.broadcast(
            weight, src=0, stream=None if over_gloo else torch.cuda.current_stream(engine.device)
        )
        yield name, weight.to(engine.device)


class RolloutWorker:
    """Methods that `/collective_rpc` can call on a worker; vLLM makes it a base of its worker class."""

    vllm_config: Any
    weight_transfer_engine: NCCLWeightTransferEngine | None
    model_runner: Any

    def rollout_facts(self) -> dict[str, Any]:
        """What the trainer checks before it takes the server: all of it is JSON."""
        config = self.vllm_config
        transfer = config.weight_transfer_config
        return {
            "model": model_facts(config.model_config.hf_config),
            "path": config.model_config.model,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "max_model_len": config.model_config.max_model_len,
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "backend": transfer.backend if transfer else None,
            "workers": config.parallel_config.world_size_across_dp,
            "sequences": config.scheduler_config.max_num_seqs,
        }

    def rollout_differing(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> list[str]:
        """Names of those weights, which the trainer sends, with which this worker does not compute."""
        weights = _received(self.weight_transfer_engine, names, dtypes, shapes)
        try:
            return differing(self.model_runner.get_model(), weights)
        finally:
            for _ in weights:  # the trainer sends all of them, whatever went wrong here
                pass


WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)
request_tiles()
if server := os.environ.get(SERVER):
    end_with_ancestor(int(server))
