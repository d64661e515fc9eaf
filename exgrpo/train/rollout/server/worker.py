"""Extension of vLLM's worker processes for rollouts.

`vllm serve --worker-extension-cls exgrpo.train.rollout.server.worker.WorkerExtension` imports this module in each
worker before the model is made. This registers the backends of `--weight-transfer-config '{"backend": "packed_nccl"}'`
(on CPUs "gloo"), and makes the worker end when the server is killed.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from exgrpo.extras import needs
from exgrpo.train.common.process import SERVER, end_with_ancestor
from exgrpo.train.rollout.server.channel import join_gloo, packed_bytes, unpack
from exgrpo.train.rollout.server.check import GLOO, PACKED_NCCL, gpu_of, model_facts
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


class PackedWeightTransferEngine(NCCLWeightTransferEngine):
    """vLLM's weight transfer over NCCL, but with all weights of an update in one broadcast.

    vLLM's own packed transfer keeps up to a bucket of memory per stream between updates in 0.32.
    """

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive and load a bucket; on failure leave the group, so that the trainer gets an error at once."""
        try:
            for name, weight in _received(self, update_info.names, update_info.dtype_names, update_info.shapes):
                self.model.load_weights([(name, weight)])
        except BaseException:
            self.shutdown()
            raise


class GlooWeightTransferEngine(PackedWeightTransferEngine):
    """Packed weight transfer over gloo, for CPUs."""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the trainer's group."""
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.model_update_group = join_gloo(init_info.master_address, init_info.master_port, rank, init_info.world_size)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load a bucket, without the wait for an accelerator of vLLM's own method."""
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        """End the update and repack a tied head."""
        super().finish_weight_update()
        repack_tied_head(self.model)


def _received(
    engine: NCCLWeightTransferEngine, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Receive a bucket from the trainer and yield its weights on the worker's device."""
    over_gloo, types = isinstance(engine, GlooWeightTransferEngine), [getattr(torch, dtype) for dtype in dtypes]
    device = torch.device("cpu") if over_gloo else engine.device
    bucket = torch.empty(packed_bytes(types, shapes), dtype=torch.uint8, device=device)
    engine.model_update_group.broadcast(bucket, src=0, stream=None if over_gloo else torch.cuda.current_stream(device))
    yield from zip(names, unpack(bucket, types, shapes), strict=True)


class WorkerExtension:
    """Methods that `/collective_rpc` can call on a worker; vLLM adds it to the bases of its worker class."""

    vllm_config: Any
    weight_transfer_engine: NCCLWeightTransferEngine | None
    model_runner: Any

    def rollout_facts(self) -> dict[str, Any]:
        """Return the facts that the trainer checks, as JSON values."""
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
            "gpu": gpu_of(config.device_config.device),
        }

    def rollout_differing(self, buckets: list[dict[str, Any]]) -> list[str]:
        """Receive the weights of all buckets and return the names of those that differ from this worker's."""
        transfer = self.weight_transfer_engine
        weights = chain.from_iterable(
            _received(transfer, bucket["names"], bucket["dtype_names"], bucket["shapes"]) for bucket in buckets
        )
        try:
            return differing(self.model_runner.get_model(), weights)
        finally:
            for _ in weights:  # receive the rest, also after an error: the trainer sends all buckets
                pass


WeightTransferEngineFactory.register_engine(GLOO, GlooWeightTransferEngine)
WeightTransferEngineFactory.register_engine(PACKED_NCCL, PackedWeightTransferEngine)
request_tiles()
if server := os.environ.get(SERVER):
    end_with_ancestor(int(server))
