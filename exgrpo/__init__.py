"""ExGRPO: reinforcement learning from verifiable rewards with experience replay, and the kernels under it."""

__version__ = "0.1.0"
