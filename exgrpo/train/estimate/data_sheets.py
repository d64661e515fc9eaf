"""The GPUs that can be named, by their data sheets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A data sheet: memory in GiB, dense peaks in TFLOP/s (bf16 on tensor cores, fp32 without), bandwidth in GB/s."""

    memory: float
    bf16: float
    fp32: float
    bandwidth: float


GPUS = {
    "A100-40": Gpu(40, 312, 19.5, 1555),
    "A100-80": Gpu(80, 312, 19.5, 2039),
    "H100": Gpu(80, 989, 67, 3350),
    "H200": Gpu(141, 989, 67, 4800),
    "B200": Gpu(180, 2250, 75, 8000),
    "L40S": Gpu(48, 362, 91.6, 864),
    "A6000": Gpu(48, 155, 38.7, 768),
    "RTX4090": Gpu(24, 165, 82.6, 1008),
}
"""NVIDIA's figures, of the SXM boards where there are several. A sheet's gigabytes of memory are taken as GiB."""
