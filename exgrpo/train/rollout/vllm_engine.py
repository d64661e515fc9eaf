"""Rollouts by vLLM inside the trainer's process, one engine per rank, on the CPU.

Nothing here imports vLLM before an engine is wanted: the import reads its environment and changes the process.
"""

import gc
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig

from exgrpo.train.records import Rollout, TokenIds
from exgrpo.train.rollout.engine import Sampling
from exgrpo.train.rollout.vllm_probe import differing

GIB = 2**30
HEAD_WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of attention heads that vLLM's attention on CPUs is compiled for."""
BLOCK_TOKENS = 32
"""Tokens of a cache block: prompts share whole blocks, and the CPU's attention wants a multiple of 32."""

# In one process, threads and cache size as the trainer sets them, and nothing told to anyone.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def import_vllm() -> Any:
    """The module `vllm`, imported with the environment that an engine inside the trainer's process needs.

    Raises:
        ImportError: it cannot be imported, or this build of it is not one for CPUs.
    """
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would overrule the size that the engine is given
    with untouched_process():
        import vllm
        from vllm.platforms import current_platform
    if not current_platform.is_cpu():
        raise ImportError("this build of vLLM is not one for CPUs")
    return vllm


@contextmanager
def untouched_process() -> Iterator[None]:
    """What vLLM does to the random state and the threads of the process is undone at the end."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    with torch.random.fork_rng([]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002
            torch.set_num_threads = set_threads  # vLLM makes it do nothing
            torch.set_num_threads(threads)


class VllmEngine:
    """Continuous batching with a paged cache; answers to one prompt share its blocks.

    The same seed and prompts give the same rollouts in the same process layout: vLLM draws from torch's global
    generator, which is seeded for each call, and no cached block outlives a call.

    The process group must exist already: without one vLLM makes a world of one for the whole process.

    Args:
        path: folder or hub name of the model. Load it before any HfDeepSpeedConfig exists, as the other engine.
        dtype: compute dtype.
        eos: token ids that end a response; at least one.
        max_prompt_tokens: longest prompt.
        max_tokens: longest response.
        batch_tokens: prompt + response tokens generated at once.
        kv_cache_gib: size of the cache of keys and values.

    Raises:
        ValueError: the model is too short for such sequences, or the cache too small or too large.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: torch.dtype,
        eos: Sequence[int],
        max_prompt_tokens: int,
        max_tokens: int,
        batch_tokens: int,
        kv_cache_gib: float,
    ) -> None:
        if not eos:
            raise ValueError("eos: a rollout engine needs at least one token id that ends a response")
        self.eos = sorted(set(eos))
        length = max_prompt_tokens + max_tokens
        _check_length(path, max_prompt_tokens, max_tokens)
        self._vllm = import_vllm()
        with untouched_process():
            try:
                self._llm = self._vllm.LLM(
                    model=path,
                    skip_tokenizer_init=True,
                    dtype=str(dtype).removeprefix("torch."),
                    max_model_len=length,
                    max_num_seqs=max(1, batch_tokens // length),
                    block_size=BLOCK_TOKENS,
                    kv_cache_memory_bytes=int(kv_cache_gib * GIB),
                    enable_prefix_caching=True,
                    enforce_eager=True,
                    generation_config="vllm",
                    logprobs_mode="raw_logprobs",  # at temperature 1, as the trainer computes them
                    disable_log_stats=True,
                    use_tqdm_on_load=False,
                )
            except ValueError as error:
                raise ValueError(_explain(error, kv_cache_gib, length)) from None

    def generate(
        self, prompts: Sequence[TokenIds], counts: Sequence[int], sampling: Sampling, seed: int
    ) -> list[list[Rollout]]:
        """See `RolloutEngine.generate`."""
        asked = [i for i, count in enumerate(counts) if count]
        answers: list[list[Rollout]] = [[] for _ in prompts]
        if not asked:
            return answers
        with untouched_process():
            # What an earlier call has cached would change the shapes of the products, and so their rounding.
            self._llm.reset_prefix_cache()
            torch.manual_seed(seed)
            outputs = self._llm.generate(
                [{"prompt_token_ids": prompts[i].tolist()} for i in asked],
                [self._parameters(counts[i], sampling) for i in asked],
                use_tqdm=False,
            )
        for i, output in zip(asked, outputs, strict=True):
            answers[i] = [_rollout(answer, sampling) for answer in sorted(output.outputs, key=lambda a: a.index)]
        return answers

    def _parameters(self, count: int, sampling: Sampling) -> Any:
        return self._vllm.SamplingParams(
            n=count,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop_token_ids=self.eos,
            logprobs=0 if sampling.log_prob else None,
            detokenize=False,
        )

    def push_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `RolloutEngine.push_weights`."""
        with untouched_process():
            self._reload(weights)
            self._llm.apply_model(_repack_tied_head)
        self._llm.reset_prefix_cache()

    def _reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        # vLLM keeps the parts of a fused matrix until all have come; a gathered weight lives until the next one.
        copies = ((name, weight.detach().clone()) for name, weight in weights)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": copies})

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """See `RolloutEngine.differing`."""
        (names,) = self._llm.apply_model(lambda model: differing(model, weights))
        return names

    def sleep(self) -> None:
        """Nothing: there is no accelerator memory to give back."""

    def wake(self) -> None:
        """Nothing; see `sleep`."""

    def close(self) -> None:
        """Free the engine and its cache."""
        with _kept_process_group():
            self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()


@contextmanager
def _kept_process_group() -> Iterator[None]:
    """vLLM may leave its own groups, but not end the trainer's world with them."""
    destroy = dist.destroy_process_group
    dist.destroy_process_group = lambda group=None: group and destroy(group)
    try:
        yield
    finally:
        dist.destroy_process_group = destroy


def _repack_tied_head(model: Any) -> None:
    """Pack the head anew where it is the embedding: on CPUs a reload leaves its packed copy as it was."""
    if model.config.tie_word_embeddings:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def _rollout(answer: Any, sampling: Sampling) -> Rollout:
    tokens = list(answer.token_ids)
    log_prob = None
    if sampling.log_prob:
        of_tokens = zip(tokens, answer.logprobs, strict=True)
        log_prob = np.array([candidates[token].logprob for token, candidates in of_tokens], np.float32)
    return Rollout(np.array(tokens, np.int32), finished=answer.finish_reason == "stop", log_prob=log_prob)


def _check_length(path: str, max_prompt_tokens: int, max_tokens: int) -> None:
    longest = getattr(AutoConfig.from_pretrained(path).get_text_config(), "max_position_embeddings", None)
    if longest is not None and max_prompt_tokens + max_tokens > longest:
        raise ValueError(
            f"data.max_prompt_tokens + rollout.max_tokens ({max_prompt_tokens} + {max_tokens}) exceed the "
            f"{longest} positions of {path}: lower one of them"
        )


def _explain(error: ValueError, kv_cache_gib: float, length: int) -> str:
    reason = " ".join(str(error).split())
    if "kv cache" in reason.lower():
        return (
            f"rollout.kv_cache_gib ({kv_cache_gib:g}) does not suit sequences of {length} tokens and this machine's "
            f"memory: {reason}"
        )
    return f"rollout.engine: vLLM cannot take the model: {reason}; --rollout.engine transformers may"
