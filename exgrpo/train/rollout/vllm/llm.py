"""Wrapper of vLLM's engine in this process; handles the differences between its versions.

All versions from 0.26 on have the calls made here. Workarounds, applied for all of them:

- 0.26 does not set its configuration during a reload of weights, though its layers need it: `Llm.reload` sets it;
- 0.26 wakes without freeing torch's unused cached memory: `Llm.wake` frees it before;
- up to 0.30 a partly awake engine does not fall asleep: `Llm.sleep` wakes the rest before.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from exgrpo.train.common.errors import RolloutError, shown
from exgrpo.train.rollout.vllm.probe import are_copies, copy_weights
from exgrpo.train.rollout.vllm.process import kept_process_group

STEPS_BEHIND = 2
"""Steps after which vLLM has freed the blocks of a request that was aborted during its computation."""
OF_DEVICE = ("cuda", "cumem", "cublas", "nccl", "out of memory", "memory usage increased")
"""Texts in messages of errors of the GPU or of vLLM's memory pool."""


@contextmanager
def clear_errors(doing: str) -> Iterator[None]:
    """Turn errors of the GPU and of vLLM's memory pool into a RolloutError of one line; others are defects."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        if not of_device(error):
            raise
        raise RolloutError(
            f"vLLM could not {doing}: {shown(error)}: lower rollout.kv_cache_gib, or what the trainer "
            "holds meanwhile (optimizer.micro_batch_tokens)"
        ) from error


def of_device(error: BaseException) -> bool:
    """True for an error of the GPU or of vLLM's memory pool."""
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error).lower() for word in OF_DEVICE)


class Llm:
    """An engine of vLLM that is stepped by this process and may sleep while the trainer uses the GPU.

    awake -> `sleep` -> asleep -> `wake_weights` -> weights allocated -> `wake` -> awake; each method may be called in
    any state. Level 1 keeps the weights in CPU memory meanwhile. Level 2 drops them: they must be reloaded before the
    engine wakes. Level 0 never sleeps.

    Args:
        arguments: keyword arguments of `vllm.LLM`.
        level: of sleep: 0, 1 or 2.

    Attributes:
        weights_lost: True if the weights were dropped and not reloaded since.
        weights_asleep: True if the weights' memory is freed.
    """

    def __init__(self, vllm: Any, path: str, arguments: dict[str, Any], level: int) -> None:
        self._vllm = vllm
        self._llm = vllm.LLM(path, **arguments)
        self.engine = self._llm.llm_engine
        self._level = level
        self.weights_lost = self.weights_asleep = self._cache_asleep = False
        self._copies: bool | None = None
        self._since = self._seconds = 0.0

    @property
    def draws_by_seed(self) -> bool:
        """True if one kernel draws for all requests by their seeds, as in vLLM's second model runner."""
        return bool(self.engine.vllm_config.use_v2_model_runner)

    def busy(self) -> bool:
        """True if there are unfinished requests."""
        return bool(self.engine.has_unfinished_requests())

    def add(self, name: str, prompt: list[int], *, stream: bool, **sampling: Any) -> None:
        """Add a request for an answer; with `stream` each step returns it so far, else the last step does."""
        kind = self._vllm.sampling_params.RequestOutputKind
        parameters = self._vllm.SamplingParams(
            detokenize=False, output_kind=kind.CUMULATIVE if stream else kind.FINAL_ONLY, **sampling
        )
        self.engine.add_request(name, self._vllm.inputs.tokens_input(prompt), parameters)

    def step(self) -> list[Any]:
        """Generate a token of each scheduled answer; returns vLLM's `RequestOutput`s."""
        with clear_errors("generate"):
            return list(self.engine.step())

    def abort(self, names: Sequence[str]) -> None:
        """Abort requests."""
        self.engine.abort_request(list(names))

    def forget_prompts(self) -> None:
        """Drop the cached keys and values of all prompts; raise RolloutError if later weights would reuse some."""
        for _ in range(1 + STEPS_BEHIND):
            if self.engine.reset_prefix_cache():
                return
            self.step()
        raise RolloutError(
            "vLLM keeps keys and values of an earlier call, which may be those of other weights: go on with --resume "
            "auto, and with --rollout.engine transformers if it happens again"
        )

    def reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights; names are those of the Hugging Face model, and the iterable can be run through again."""
        with clear_errors("take new weights"), self._vllm.config.set_current_vllm_config(self.engine.vllm_config):
            if self._copies:
                self.apply(lambda model: copy_weights(model, weights))
            else:
                # vLLM keeps the parts of a fused matrix until it has all; a gathered weight lasts until the next one.
                copies = ((name, weight.detach().clone()) for name, weight in weights)
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": copies})
        self.weights_lost = False
        if self._copies is None:
            self._copies = self.apply(lambda model: are_copies(model, weights))

    def apply(self, function: Callable[[Any], Any]) -> Any:
        """Apply a function to the model's module, or this rank's part of it, and return its result."""
        (result,) = self._llm.apply_model(function)
        return result

    def take_seconds(self) -> float:
        """Return the seconds without weights, over the sleeps that ended since the last call of this method."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @property
    def asleep(self) -> bool:
        """True if any memory is freed."""
        return self.weights_asleep or self._cache_asleep

    def sleep(self) -> None:
        """Free the memory of weights and cache."""
        if self._level == 0 or self.weights_asleep:
            return
        self._wake_cache()
        with clear_errors("give its memory back"):
            self._llm.sleep(level=self._level)
        self.weights_asleep = self._cache_asleep = True
        self.weights_lost = self._level == 2
        self._since = time.perf_counter()

    def wake_weights(self) -> None:
        """Allocate the memory of the weights; at level 1 with its content."""
        if self.weights_asleep:
            self._allocate("weights")
            self.weights_asleep = False
            self._seconds += time.perf_counter() - self._since

    def wake(self) -> None:
        """Get ready to generate; raise RuntimeError if the weights were dropped and not reloaded."""
        if self.weights_lost:
            raise RuntimeError("the rollout engine dropped its weights (sleep_level 2): push them before it wakes")
        self.wake_weights()
        self._wake_cache()

    def _wake_cache(self) -> None:
        if self._cache_asleep:
            self._allocate("kv_cache")
            self._cache_asleep = False

    def _allocate(self, tag: str) -> None:
        torch.cuda.empty_cache()
        with clear_errors(f"take the memory of its {tag} again"):
            self._llm.wake_up(tags=[tag])

    def close(self) -> None:
        """Free the engine."""
        with kept_process_group():
            self.engine.engine_core.shutdown()
        del self._llm, self.engine
