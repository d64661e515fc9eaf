"""Rollouts by vLLM inside the trainer's process: one engine per rank, or one per group of neighbouring ranks."""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from exgrpo.train.common.distributed import World
from exgrpo.train.common.errors import ConfigError, shown
from exgrpo.train.common.records import AllowedTokens, EngineCounts, Rollout
from exgrpo.train.common.seeds import derive_seed
from exgrpo.train.config.rollout import RolloutConfig
from exgrpo.train.rollout.engine import EngineSettings, Enough, Finished, Request, Sampling
from exgrpo.train.rollout.vllm.llm import Llm, of_device
from exgrpo.train.rollout.vllm.probe import differing
from exgrpo.train.rollout.vllm.process import Guest, import_vllm, kept_environment

GIB = 2**30
BLOCK_TOKENS = 32
"""Tokens per cache block: prompts share whole blocks, and the attention on CPUs needs a multiple of 32."""
CACHE_SHARE = 0.3
"""Fraction of a GPU's memory for the cache if no memory plan has set it: in evaluations, and for unusual models."""
CPU_CACHE_GIB = 1.0
MOST_SEQUENCES = 1024
"""Maximum number of concurrent answers, vLLM's own default on the largest GPUs: each takes a row of logits in the
buffers of its sampler."""


class VllmEngine:
    """Continuous batching with a paged cache; answers to one prompt share its blocks.

    On CPUs the same call gives the same rollouts bit for bit: vLLM samples with the process's global generators, whose
    state is swapped for its own and seeded per call, and no cached block outlives a call. On GPUs the noise of a token
    depends on its answer's seed and its position alone; with vLLM's older runner it is drawn as on CPUs. On CPUs the
    engine does not sleep.

    The process group must exist already: otherwise vLLM makes a world of one for the whole process. All ranks make
    their engines together, before any HfDeepSpeedConfig exists.

    Raises:
        ConfigError: vLLM cannot take the model, or the cache is too small or too large.
    """

    free_log_prob = True

    def __init__(self, settings: EngineSettings, world: World) -> None:
        on_gpu = world.device.type == "cuda"
        self.unrepeatable = "vLLM's kernels on GPUs do not always add in the same order" if on_gpu else None
        self.ranks = settings.rollout.tensor_parallel
        self.eos = sorted(set(settings.eos))
        self._vocabulary = settings.source.config.get_text_config().vocab_size
        vllm = import_vllm(world.device)
        self._guest = Guest(world.device)
        options, level = arguments(settings, world.device), settings.rollout.sleep_level
        try:
            with self._guest, kept_environment():
                self._llm = Llm(vllm, settings.source.path, options, (2 if level is None else level) if on_gpu else 0)
        except (ValueError, OSError, RuntimeError, AssertionError) as error:
            raise ConfigError(_explain(error, settings, options["kv_cache_memory_bytes"])) from error
        self._own_seeds = on_gpu and self._llm.draws_by_seed
        self._weights: Iterable[tuple[str, torch.Tensor]] | None = None
        self._prompt_tokens = self._cached_tokens = 0

    def generate(self, requests: Sequence[Request], enough: Enough | None = None) -> Iterator[Finished]:
        """Generate as `RolloutEngine.generate`; closing the iterator aborts unfinished answers."""
        if self._llm.asleep:
            raise RuntimeError("the rollout engine is asleep: wake it before it generates")
        asked = {f"{i}.{sample}": (i, sample) for i, one in enumerate(requests) for sample in range(one.count)}
        self._guest.seed(derive_seed(0, "call", *(request.seed for request in requests)))
        with self._guest:
            # Blocks cached by an earlier call would change the shapes of matrix products, and so their rounding.
            self._llm.forget_prompts()
        # Requests without seeds use the process's global generators. Swapping their state is slow, so only then.
        drawing = nullcontext() if self._own_seeds else self._guest
        try:
            with self._guest:
                for name, (i, sample) in asked.items():
                    self._add(name, requests[i], sample, stream=enough is not None)
            begun: dict[str, Any] = {}
            while self._llm.busy() and not (enough and enough()):
                with drawing:
                    outputs = self._llm.step()
                for output in outputs:
                    i, sample = asked[output.request_id]
                    if not output.finished:
                        if not requests[i].sampling.stop.reached(output.outputs[0].token_ids):
                            begun[output.request_id] = output
                            continue
                        self._llm.abort([output.request_id])
                    del asked[output.request_id]
                    begun.pop(output.request_id, None)
                    yield self._answer(i, sample, requests[i], output)
            for name, output in begun.items():
                yield self._answer(*asked[name], requests[asked[name][0]], output)
        finally:
            self._llm.abort(list(asked))

    def _answer(self, i: int, sample: int, request: Request, output: Any) -> Finished:
        self._prompt_tokens += len(request.prompt)
        self._cached_tokens += output.num_cached_tokens or 0
        return Finished(i, sample, _rollout(output.outputs[0], request.sampling))

    def _add(self, name: str, request: Request, sample: int, *, stream: bool) -> None:
        sampling = request.sampling
        self._llm.add(
            name,
            request.prompt.tolist(),
            # Stop strings are searched here, after each token: vLLM has no tokenizer.
            stream=stream or bool(sampling.stop),
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop_token_ids=self.eos,
            # Besides the sampled token's log-prob: those of the top k, which are -inf for ids that are not allowed.
            logprobs=min(sampling.top_k, self._vocabulary)
            if sampling.allowed_tokens
            else 0
            if sampling.log_prob
            else None,
            flat_logprobs=sampling.allowed_tokens,
            # The older runner loops over requests with seeds for every token, and rewinds their generators after
            # chunked prefill, which torch cannot do on CPUs.
            seed=derive_seed(request.seed, "sample", sample) if self._own_seeds else None,
        )

    def push_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights; the iterable is kept, to load them again if the engine drops them in sleep."""
        self._weights = weights
        self._llm.wake_weights()
        with self._guest:
            self._llm.reload(weights)
            if self._guest.device.type == "cpu":
                self._llm.apply(repack_tied_head)

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Return differing weights as `RolloutEngine.differing`.

        Raises:
            RuntimeError: the engine is asleep, so its weights are on the CPU or dropped.
        """
        if self._llm.weights_asleep:
            raise RuntimeError("the rollout engine is asleep: compare its weights before, or wake it")
        names: list[str] = self._llm.apply(lambda model: differing(model, weights))
        return names

    def counts(self) -> EngineCounts:
        counts = EngineCounts(self._prompt_tokens, self._cached_tokens, self._llm.take_seconds())
        self._prompt_tokens = self._cached_tokens = 0
        return counts

    def sleep(self) -> None:
        """Free GPU memory as configured by `rollout.sleep_level`."""
        self._llm.sleep()

    def wake(self) -> None:
        """Get ready to generate; a collective call, since it may load the weights again."""
        if self._llm.weights_lost and self._weights is not None:
            self.push_weights(self._weights)
        self._llm.wake()

    def close(self) -> None:
        """Free the engine and its cache."""
        self._llm.close()
        del self._llm
        gc.collect()


def arguments(settings: EngineSettings, device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments of `vllm.LLM`."""
    rollout, changes = settings.rollout, settings.source.changes
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None
    cache = int(cache_gib(rollout, memory) * GIB)
    common = {
        "dtype": str(settings.dtype).removeprefix("torch."),
        "max_model_len": settings.length,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",  # after temperature, top-k, top-p and min-p
        **({"max_logprobs": rollout.top_k} if rollout.cut else {}),
        "enable_prefix_caching": True,
        "block_size": BLOCK_TOKENS,
        "kv_cache_memory_bytes": cache,
        # Every rank drives its own engine; GPU and tensor-parallel group follow from the launcher's ranks.
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": rollout.tensor_parallel,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if memory is None:
        # The answers of a call share one generator, so the batch size decides which numbers each one gets.
        rows = max(1, rollout.batch_tokens // settings.length)
        return {**common, "max_num_seqs": rows, "hf_overrides": dict(changes), "enforce_eager": True}
    overrides, attention = gpu_precision(settings.dtype, changes)
    return {
        **common,
        **({"attention_backend": attention} if attention else {}),
        "max_num_seqs": sequences(rollout, settings.max_prompt_tokens, cache, token_bytes(settings)),
        "hf_overrides": overrides,
        "enable_sleep_mode": rollout.sleep_level != 0,
        # With a given cache size, this is only the memory that must be free at the start.
        "gpu_memory_utilization": min(1.0, cache / memory),
    }


def gpu_precision(dtype: torch.dtype, changes: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return configuration overrides and the attention with which vLLM's log-probs on GPUs match the trainer's.

    The head's sums are in fp32 as the trainer's; this is free on GPUs and costs a copy of the head per token on CPUs.
    For fp32, vLLM's default Triton attention would multiply in TF32; flex attention multiplies in fp32.
    """
    return {**changes, "head_dtype": "float32"}, "FLEX_ATTENTION" if dtype == torch.float32 else None


def cache_gib(rollout: RolloutConfig, memory: float | None) -> float:
    """Return GiB of the key/value cache: the option, or a share of the GPU's `memory` in bytes (None: a CPU)."""
    if rollout.kv_cache_gib is not None:
        return rollout.kv_cache_gib
    return CPU_CACHE_GIB if memory is None else CACHE_SHARE * memory / GIB


def sequences(rollout: RolloutConfig, prompt_tokens: int, cache: float, per_token: float) -> int:
    """Return how many answers are generated concurrently on a GPU: as many half-written ones as fit into the cache.

    `cache` and `per_token` are in bytes. If the cache overflows all the same, vLLM preempts the last answers and
    recomputes their keys and values later.
    """
    return max(1, min(MOST_SEQUENCES, int(cache / sequence_bytes(rollout, prompt_tokens, per_token))))


def sequence_bytes(rollout: RolloutConfig, prompt_tokens: int, per_token: float) -> float:
    """Return the bytes of the keys and values of the longest prompt with a half-written answer."""
    return per_token * (prompt_tokens + rollout.max_tokens / 2)


def token_bytes(settings: EngineSettings) -> float:
    """Return the bytes of the keys and values of a token on one rank, which has at least one head."""
    shape = settings.source.config.get_text_config()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    on_rank = max(1, heads / settings.rollout.tensor_parallel)
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return 2 * shape.num_hidden_layers * on_rank * width * settings.dtype.itemsize


def repack_tied_head(model: Any) -> None:
    """Repack a head that is tied to the embedding: on CPUs a reload leaves its packed copy stale."""
    if model.config.tie_word_embeddings:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def _rollout(answer: Any, sampling: Sampling) -> Rollout:
    tokens = list(answer.token_ids)
    log_prob = allowed_tokens = None
    if sampling.allowed_tokens:
        log_prob, allowed_tokens = tokens_left(answer.logprobs)
    elif sampling.log_prob:
        of_tokens = zip(tokens, answer.logprobs, strict=True)
        log_prob = np.array([candidates[token].logprob for token, candidates in of_tokens], np.float32)
    rollout = Rollout(
        np.array(tokens, np.int32), answer.finish_reason == "stop", log_prob, allowed_tokens=allowed_tokens
    )
    return sampling.stop.cut(rollout)


def tokens_left(flat: Any) -> tuple[npt.NDArray[np.float32], AllowedTokens]:
    """Return [R] log-probs of the sampled tokens, and the set of ids that each was sampled from.

    `flat` is vLLM's `FlatLogprobs`: for each token its own log-prob, then those of the top k, which may repeat it and
    are -inf for ids that are not allowed.
    """
    first, ids = np.array(flat.start_indices, np.int64), np.array(flat.token_ids, np.int32)
    log_prob = np.array(flat.logprobs, np.float32)
    token = np.repeat(np.arange(len(first)), np.diff([*first, len(ids)]))
    left = (log_prob > -np.inf) & (ids != ids[first][token])
    left[first] = True
    return log_prob[first], AllowedTokens.from_sizes(np.bincount(token[left], minlength=len(first)), ids[left])


def _explain(error: Exception, settings: EngineSettings, cache: int) -> str:
    reason = shown(error)
    if isinstance(error, torch.OutOfMemoryError) or "memory" in reason.lower():
        gib = settings.rollout.kv_cache_gib or cache / GIB
        return (
            f"kv_cache_gib ({gib:g}) does not suit sequences of {settings.length} tokens and this machine's memory: "
            f"{reason}"
        )
    if of_device(error):
        return f"engine: vLLM cannot use the GPU: {reason}; `exgrpo doctor` looks for the cause"
    return f"engine: vLLM cannot take the model: {reason or type(error).__name__}; the engine transformers may"
