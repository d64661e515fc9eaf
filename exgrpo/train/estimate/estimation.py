"""All that a recipe takes on given GPUs, in one object."""

from dataclasses import dataclass

from exgrpo.train.config import Config
from exgrpo.train.estimate.budget import cpu_memory, disk, gpu_memory, phases
from exgrpo.train.estimate.parts import MOMENTS, Amount, Assumptions, Hardware, MemoryItem, Phase, peak
from exgrpo.train.estimate.shape import ModelShape


@dataclass(frozen=True)
class Estimate:
    """What a recipe takes. Memory per GPU, everything else of all ranks together; bytes and seconds."""

    memory: tuple[MemoryItem, ...]
    available: float
    cpu: tuple[Amount, ...]
    disk: tuple[Amount, ...]
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> float:
        """Bytes per GPU at the moment that takes most."""
        return max(peak(self.memory, moment) for moment in MOMENTS)

    @property
    def fits(self) -> bool:
        """Whether that is there."""
        return self.peak <= self.available

    @property
    def seconds(self) -> float:
        """Of one step."""
        return sum(phase.seconds for phase in self.phases)


def estimate(config: Config, shape: ModelShape, hardware: Hardware, assumptions: Assumptions) -> Estimate:
    """What the recipe takes on these GPUs."""
    return Estimate(
        memory=gpu_memory(config, shape, hardware),
        available=hardware.memory,
        cpu=cpu_memory(config, shape, hardware.gpus, assumptions),
        disk=disk(config, shape, assumptions),
        phases=phases(config, shape, hardware, assumptions),
    )
