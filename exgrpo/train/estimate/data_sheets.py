"""The GPUs that can be named, by their data sheets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A data sheet.

    Attributes:
        memory: in GiB.
        bf16: dense peak on tensor cores, TFLOP/s.
        fp32: peak without them, TFLOP/s.
        bandwidth: of the memory, GB/s.
        multiprocessors: how many.
        architecture: as tables of settings name it.
    """

    memory: float
    bf16: float
    fp32: float
    bandwidth: float
    multiprocessors: int
    architecture: str


GPUS = {
    "A100-40": Gpu(40, 312, 19.5, 1555, 108, "sm_80"),
    "A100-80": Gpu(80, 312, 19.5, 2039, 108, "sm_80"),
    "H100": Gpu(80, 989, 67, 3350, 132, "sm_90"),
    "H200": Gpu(141, 989, 67, 4800, 132, "sm_90"),
    "B200": Gpu(180, 2250, 75, 8000, 148, "sm_100"),
    "L40S": Gpu(48, 362, 91.6, 864, 142, "sm_89"),
    "A6000": Gpu(48, 155, 38.7, 768, 84, "sm_86"),
    "RTX3090": Gpu(24, 71, 35.6, 936, 82, "sm_86"),
    "RTX4090": Gpu(24, 165, 82.6, 1008, 128, "sm_89"),
    "RTX5090": Gpu(32, 209.5, 104.8, 1792, 170, "sm_120"),
}
"""NVIDIA's figures, of the SXM boards where there are several. A sheet's gigabytes of memory are taken as GiB."""


def machine(words: str) -> tuple[str, int | None]:
    """A GPU by its name, and how many there are (None: it is not said): h100x8, A100-80.

    Raises:
        ValueError: it has no data sheet here.
    """
    known = {name.lower(): name for name in GPUS}
    asked = words.lower()
    name, _, count = asked.rpartition("x")
    if asked in known:
        return known[asked], None
    if name in known and count.isdecimal() and int(count):
        return known[name], int(count)
    raise ValueError(f"give a GPU and how many of them, as h100x8; known ones are {', '.join(GPUS)}")
