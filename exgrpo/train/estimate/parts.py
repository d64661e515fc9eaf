"""What an estimate is made of: hardware, assumptions, amounts of memory and time."""

from dataclasses import dataclass, field
from typing import Literal

GIB = 1 << 30
MOMENTS = ("rollout", "loss", "backward", "step")
"""When memory peaks: generating; the head, after the last layer; a layer's backward; AdamW."""

NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Of a weight in 4 bits: each block of 64 has a scale of 8 bits, and 256 scales share one of 32."""


@dataclass(frozen=True)
class Hardware:
    """GPUs, all of one kind; or the CPU of one machine, of which each process has a share.

    Attributes:
        gpus: how many GPUs, one rank each; or how many processes.
        memory: bytes of each that tensors can take.
        flops: peak FLOP/s of each, dense, in the recipe's compute dtype.
        bandwidth: memory bandwidth of each, bytes per second.
        kind: what each is.
        words: what the figures are of, and where they come from.
    """

    gpus: int
    memory: float
    flops: float
    bandwidth: float
    kind: Literal["GPU", "process"] = "GPU"
    words: str = field(default="", compare=False)


@dataclass(frozen=True)
class Assumptions:
    """What no configuration says.

    Attributes:
        prompt_tokens, response_tokens: mean lengths.
        success_rate: share of fresh answers that are right and stored.
        candidates: mean number of stored successes of a replayed question.
        mfu: share of the peak FLOP/s that passes through the model reach, communication included.
        bandwidth_use: share of the memory bandwidth that decoding reaches.
        layer_launch: seconds to launch the kernels of one layer in decoding.
        host_bandwidth: bytes per second between GPU and CPU memory.
    """

    prompt_tokens: float
    response_tokens: float
    success_rate: float
    candidates: float
    mfu: float
    bandwidth_use: float
    layer_launch: float
    host_bandwidth: float


@dataclass(frozen=True)
class MemoryItem:
    """Bytes per GPU of one thing at each of the `MOMENTS`."""

    name: str
    rollout: float = 0
    loss: float = 0
    backward: float = 0
    step: float = 0


@dataclass(frozen=True)
class Amount:
    """Bytes of one thing in CPU memory or on disk, of all ranks together."""

    name: str
    bytes: float


@dataclass(frozen=True)
class Phase:
    """One phase of a step.

    Attributes:
        name: as in metrics.jsonl.
        seconds: estimated.
        flops: over all GPUs; 0 where none are counted.
    """

    name: str
    seconds: float
    flops: float = 0


@dataclass(frozen=True)
class Work:
    """Sequences of one step with replay under way: sampled, trained, and stored ones that are scored to choose."""

    fresh: int
    rows: int
    candidates: float


def peak(items: tuple[MemoryItem, ...], moment: str) -> float:
    """Bytes per GPU at a moment."""
    return sum(float(getattr(item, moment)) for item in items)
