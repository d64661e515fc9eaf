"""Which memory of a vLLM engine is there: all, the weights alone, or none."""

import time
from typing import Any


class Sleep:
    """The states of an engine that sleeps while the trainer has its GPU.

    awake -> `sleep` -> asleep -> `wake_weights` -> weights there -> `wake` -> awake; any of them may be asked for in
    any state. Level 1 keeps the weights in CPU memory meanwhile. Level 2 drops them: they must be loaded, and `loaded`
    be called, before the engine wakes. Level 0 never sleeps.

    Args:
        llm: has vLLM's `sleep(level=...)` and `wake_up(tags=[...])`.
        level: 0, 1 or 2.
    """

    def __init__(self, llm: Any, level: int) -> None:
        self.level = level
        self.weights_lost = False
        """Whether the weights were dropped and none were loaded since."""
        self._llm = llm
        self.weights_asleep = False
        """Whether the weights' memory was given back."""
        self._cache_asleep = False
        self._since = 0.0
        self._seconds = 0.0

    def take_seconds(self) -> float:
        """Seconds without weights since the last call of this method, up to now."""
        if self.weights_asleep:
            now = time.perf_counter()
            self._seconds, self._since = self._seconds + now - self._since, now
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @property
    def asleep(self) -> bool:
        """Whether any memory was given back."""
        return self.weights_asleep or self._cache_asleep

    def sleep(self) -> None:
        """Give the memory of weights and cache back."""
        if self.level == 0 or self.weights_asleep:
            return
        self._llm.sleep(level=self.level)
        self.weights_asleep = self._cache_asleep = True
        self.weights_lost = self.weights_lost or self.level == 2
        self._since = time.perf_counter()

    def wake_weights(self) -> None:
        """Have the memory of the weights, and at level 1 what was in it."""
        if self.weights_asleep:
            self._llm.wake_up(tags=["weights"])
            self.weights_asleep = False
            self._seconds += time.perf_counter() - self._since

    def loaded(self) -> None:
        """All weights were loaded."""
        self.weights_lost = False

    def wake(self) -> None:
        """Be ready to generate.

        Raises:
            RuntimeError: the weights were dropped; push them first.
        """
        if self.weights_lost:
            raise RuntimeError("the rollout engine dropped its weights (sleep_level 2): push them before it wakes")
        self.wake_weights()
        if self._cache_asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._cache_asleep = False
