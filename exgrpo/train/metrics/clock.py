"""How long the phases of a step take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Adds up seconds by phase: `with clock("update"): ...`; a phase may be entered more than once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time what is done inside as part of a phase."""
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
