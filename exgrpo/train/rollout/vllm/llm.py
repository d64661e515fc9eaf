"""vLLM's engine in this process: all calls of vLLM to generate, and what differs between its versions.

The versions from 0.26 on have the calls that are made here. What differs is met in one way for all of them:

- 0.26 does not set its configuration around a reload of weights, and its layers ask for it: `Llm.reload` sets it;
- 0.26 wakes memory without giving back what torch has cached and nobody uses: `Sleep.wake` gives it back before;
- up to 0.30 an engine of which a part is awake does not fall asleep: `Sleep.sleep` wakes the rest before.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from exgrpo.train.common.errors import RolloutError, shown
from exgrpo.train.rollout.vllm.process import kept_process_group

STEPS_BEHIND = 2
"""Steps after which vLLM has given up the blocks of a request that was aborted while it was computed."""
OF_DEVICE = ("cuda", "cumem", "cublas", "nccl", "out of memory", "memory usage increased")
"""What is in the message of an error of the GPU or of the pool from which vLLM takes its memory."""


@contextmanager
def clear_errors(doing: str) -> Iterator[None]:
    """Give an error of the GPU, or of vLLM's memory pool, in one line.

    Raises:
        RolloutError: of such an error; other ones are defects and stay as they are.
    """
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
    """Whether an error is one of the GPU, or of vLLM's memory pool."""
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error).lower() for word in OF_DEVICE)


class Llm:
    """An engine of vLLM, whose steps this process makes.

    Args:
        vllm: the module.
        path: of the model.
        arguments: of `vllm.LLM`, by name.

    Attributes:
        engine: vLLM's `LLMEngine`.
    """

    def __init__(self, vllm: Any, path: str, arguments: dict[str, Any]) -> None:
        self._vllm = vllm
        self._llm = vllm.LLM(path, **arguments)
        self.engine = self._llm.llm_engine

    def busy(self) -> bool:
        """Whether a request has not ended."""
        return bool(self.engine.has_unfinished_requests())

    def add(self, name: str, prompt: list[int], *, stream: bool, **sampling: Any) -> None:
        """Ask for an answer.

        Args:
            name: of the request, in `step` and `abort`.
            prompt: token ids.
            stream: whether each step gives what there is of it, else the last one gives all.
            sampling: of `vllm.SamplingParams`, by name.
        """
        kind = self._vllm.sampling_params.RequestOutputKind
        parameters = self._vllm.SamplingParams(
            detokenize=False, output_kind=kind.CUMULATIVE if stream else kind.FINAL_ONLY, **sampling
        )
        self.engine.add_request(name, self._vllm.inputs.tokens_input(prompt), parameters)

    def step(self) -> list[Any]:
        """Compute a token of each answer that has a place; vLLM's `RequestOutput`s."""
        with clear_errors("generate"):
            return list(self.engine.step())

    def abort(self, names: Sequence[str]) -> None:
        """Give requests up."""
        self.engine.abort_request(list(names))

    def forget_prompts(self) -> None:
        """Forget the keys and values of all prompts; there are no requests.

        Raises:
            RolloutError: vLLM keeps some. Answers would mix them with those of other weights.
        """
        for _ in range(1 + STEPS_BEHIND):
            if self.engine.reset_prefix_cache():
                return
            self.step()
        raise RolloutError(
            "vLLM keeps keys and values of an earlier call, which may be those of other weights: go on with --resume "
            "auto, and with --rollout.engine transformers if it happens again"
        )

    def reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights; names are those of the Hugging Face model."""
        # vLLM keeps the parts of a fused matrix until all have come; a gathered weight lives until the next one.
        copies = ((name, weight.detach().clone()) for name, weight in weights)
        with clear_errors("take new weights"), self._vllm.config.set_current_vllm_config(self.engine.vllm_config):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": copies})

    def apply(self, function: Callable[[Any], Any]) -> Any:
        """What a function of the model's module gives, or of this rank's part of it."""
        (result,) = self._llm.apply_model(function)
        return result

    def sleep(self, level: int) -> None:
        """Give the memory of cache and weights back; level 1 keeps the weights in CPU memory."""
        with clear_errors("give its memory back"):
            self._llm.sleep(level=level)

    def wake(self, tag: str) -> None:
        """Take the memory of "weights" or "kv_cache" again."""
        with clear_errors(f"take the memory of its {tag} again"):
            self._llm.wake_up(tags=[tag])

    def close(self) -> None:
        """Free the engine."""
        with kept_process_group():
            self.engine.engine_core.shutdown()
        del self._llm, self.engine


class Sleep:
    """The states of an engine that sleeps while the trainer has its GPU.

    awake -> `sleep` -> asleep -> `wake_weights` -> weights there -> `wake` -> awake; any of them may be asked for in
    any state. Level 1 keeps the weights in CPU memory meanwhile. Level 2 drops them: they must be loaded, and not be
    `weights_lost` any more, before the engine wakes. Level 0 never sleeps.

    Args:
        llm: whose memory it is.
        level: 0, 1 or 2.
    """

    def __init__(self, llm: Llm, level: int) -> None:
        self._level = level
        self.weights_lost = False
        """Whether the weights were dropped and none were loaded since."""
        self._llm = llm
        self.weights_asleep = False
        """Whether the weights' memory was given back."""
        self._cache_asleep = False
        self._since = 0.0
        self._seconds = 0.0

    def take_seconds(self) -> float:
        """Seconds without weights, of the sleeps that have ended since the last call of this method."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @property
    def asleep(self) -> bool:
        """Whether any memory was given back."""
        return self.weights_asleep or self._cache_asleep

    def sleep(self) -> None:
        """Give the memory of weights and cache back."""
        if self._level == 0 or self.weights_asleep:
            return
        self._wake_cache()
        self._llm.sleep(self._level)
        self.weights_asleep = self._cache_asleep = True
        self.weights_lost = self._level == 2
        self._since = time.perf_counter()

    def wake_weights(self) -> None:
        """Have the memory of the weights, and at level 1 what was in it."""
        if self.weights_asleep:
            torch.cuda.empty_cache()
            self._llm.wake("weights")
            self.weights_asleep = False
            self._seconds += time.perf_counter() - self._since

    def wake(self) -> None:
        """Be ready to generate.

        Raises:
            RuntimeError: the weights were dropped; push them first.
        """
        if self.weights_lost:
            raise RuntimeError("the rollout engine dropped its weights (sleep_level 2): push them before it wakes")
        self.wake_weights()
        self._wake_cache()

    def _wake_cache(self) -> None:
        if self._cache_asleep:
            torch.cuda.empty_cache()
            self._llm.wake("kv_cache")
            self._cache_asleep = False
