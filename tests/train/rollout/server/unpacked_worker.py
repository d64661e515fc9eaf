"""The worker extension with a switch for the remedy for tied heads on CPUs, for the regression test."""

from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from exgrpo.train.rollout.server.worker import GlooWeightTransferEngine, RolloutWorker

FINISH = {True: GlooWeightTransferEngine.finish_weight_update, False: NCCLWeightTransferEngine.finish_weight_update}


class SwitchableWorker(RolloutWorker):
    def remedy(self, on):
        GlooWeightTransferEngine.finish_weight_update = FINISH[on]
