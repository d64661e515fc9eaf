"""Rollouts by vLLM inside the trainer's process: one engine per rank, or one per group of neighbouring ranks."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from exgrpo.train.common.distributed import World
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.records import EngineCounts, Rollout
from exgrpo.train.common.seeds import derive_seed
from exgrpo.train.rollout.engine import EngineSettings, Finished, Request, Sampling
from exgrpo.train.rollout.vllm.probe import differing
from exgrpo.train.rollout.vllm.process import Guest, import_vllm, kept_environment, kept_process_group, one_line
from exgrpo.train.rollout.vllm.sleep import Sleep

GIB = 2**30
BLOCK_TOKENS = 32
"""Tokens of a cache block: prompts share whole blocks, and the CPU's attention wants a multiple of 32."""


class VllmEngine:
    """Continuous batching with a paged cache; answers to one prompt share its blocks.

    On CPUs the same call gives the same rollouts bit for bit: vLLM draws from the process's global generators, of which
    it has a state of its own that is seeded for each call, and no cached block outlives a call. On GPUs each answer has
    a generator of its own.

    The process group must exist already: without one vLLM makes a world of one for the whole process. All ranks make
    their engines together.

    Args:
        settings: the model and how to generate. Make the engine before any HfDeepSpeedConfig exists, as the other
            engine. CPUs do not sleep, whatever the sleep level is.
        world: the ranks.

    Raises:
        ConfigError: vLLM cannot take the model, or the cache is too small or too large.
    """

    free_log_prob = True

    def __init__(self, settings: EngineSettings, world: World) -> None:
        on_gpu = world.device.type == "cuda"
        self.unrepeatable = "vLLM's kernels on GPUs do not always add in the same order" if on_gpu else None
        self.ranks = settings.rollout.tensor_parallel
        self.eos = sorted(set(settings.eos))
        self._vllm = import_vllm(world.device)
        self._guest = Guest(world.device)
        try:
            with self._guest, kept_environment():
                self._llm = self._vllm.LLM(settings.source.path, **_arguments(settings, world.device))
        except (ValueError, OSError, torch.OutOfMemoryError) as error:
            raise ConfigError(_explain(error, settings)) from None
        self._engine = self._llm.llm_engine
        self._sleep = Sleep(self._llm, settings.rollout.sleep_level if on_gpu else 0)
        self._weights: Iterable[tuple[str, torch.Tensor]] | None = None
        self._prompt_tokens = self._cached_tokens = 0

    def generate(self, requests: Sequence[Request]) -> Iterator[Finished]:
        """See `RolloutEngine.generate`. What is not finished when the iterator is closed is given up."""
        if self._sleep.asleep:
            raise RuntimeError("the rollout engine is asleep: wake it before it generates")
        if self._engine.has_unfinished_requests():
            raise RuntimeError("the rollout engine still generates for an earlier call: finish or close that first")
        asked = {f"{i}.{sample}": (i, sample) for i, one in enumerate(requests) for sample in range(one.count)}
        self._guest.seed(derive_seed(0, "call", *(request.seed for request in requests)))
        try:
            with self._guest:
                # What an earlier call has cached would change the shapes of the products, and so their rounding.
                self._engine.reset_prefix_cache()
                for name, (i, sample) in asked.items():
                    self._add(name, requests[i], sample)
            while self._engine.has_unfinished_requests():
                with self._guest:
                    outputs = self._engine.step()
                for output in outputs:
                    answer = output.outputs[0]
                    i, sample = asked[output.request_id]
                    request = requests[i]
                    if not output.finished:
                        if not request.sampling.stop.reached(answer.token_ids):
                            continue
                        with self._guest:
                            self._engine.abort_request([output.request_id])
                    del asked[output.request_id]
                    self._prompt_tokens += len(request.prompt)
                    self._cached_tokens += output.num_cached_tokens or 0
                    yield Finished(i, sample, _rollout(answer, request.sampling))
        finally:
            with self._guest:
                self._engine.abort_request(list(asked))

    def _add(self, name: str, request: Request, sample: int) -> None:
        kind, sampling = self._vllm.sampling_params.RequestOutputKind, request.sampling
        parameters = self._vllm.SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop_token_ids=self.eos,
            logprobs=0 if sampling.log_prob else None,
            detokenize=False,
            # Stop strings are looked for here, after each token: vLLM has no tokenizer.
            output_kind=kind.CUMULATIVE if sampling.stop else kind.FINAL_ONLY,
            # vLLM sets such a generator back where a prompt is read in parts, which torch's on CPUs cannot do.
            seed=derive_seed(request.seed, "sample", sample) if self._guest.device.type == "cuda" else None,
        )
        self._engine.add_request(name, self._vllm.inputs.tokens_input(request.prompt.tolist()), parameters)

    def push_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `RolloutEngine.push_weights`.

        An iterable that can be run through again is kept: an engine that wakes after it has dropped its weights, with
        no push in between, takes them from there.
        """
        self._weights = None if isinstance(weights, Iterator) else weights
        self._sleep.wake_weights()
        with self._guest:
            self._reload(weights)
            if self._guest.device.type == "cpu":
                self._llm.apply_model(repack_tied_head)
        self._sleep.loaded()

    def _reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        # vLLM keeps the parts of a fused matrix until all have come; a gathered weight lives until the next one.
        copies = ((name, weight.detach().clone()) for name, weight in weights)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": copies})

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """See `RolloutEngine.differing`.

        Raises:
            RuntimeError: the engine is asleep, and its weights are elsewhere or dropped.
        """
        if self._sleep.weights_asleep:
            raise RuntimeError("the rollout engine is asleep: compare its weights before, or wake it")
        (names,) = self._llm.apply_model(lambda model: differing(model, weights))
        return names

    def counts(self) -> EngineCounts:
        """See `RolloutEngine.counts`."""
        counts = EngineCounts(self._prompt_tokens, self._cached_tokens, self._sleep.take_seconds())
        self._prompt_tokens = self._cached_tokens = 0
        return counts

    def sleep(self) -> None:
        """Give the GPU's memory back, as `sleep_level` says."""
        self._sleep.sleep()

    def wake(self) -> None:
        """See `RolloutEngine.wake`. All ranks call it together, for it may run through the weights."""
        if self._sleep.weights_lost and self._weights is not None:
            self.push_weights(self._weights)
        self._sleep.wake()

    def close(self) -> None:
        """Free the engine and its cache."""
        with kept_process_group():
            self._engine.engine_core.shutdown()
        del self._llm, self._engine
        gc.collect()


def _arguments(settings: EngineSettings, device: torch.device) -> dict[str, Any]:
    """What vLLM is told beside the model's path."""
    rollout, changes = settings.rollout, settings.source.changes
    cache = int(rollout.kv_cache_gib * GIB)
    common = {
        "dtype": str(settings.dtype).removeprefix("torch."),
        "max_model_len": settings.length,
        "max_num_seqs": max(1, rollout.batch_tokens // settings.length),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",  # of the policy that is sampled from, at its temperature
        "enable_prefix_caching": True,
        "block_size": BLOCK_TOKENS,
        "kv_cache_memory_bytes": cache,
        # Every rank calls its own engine; the launcher's ranks say on which GPU, and which of them share one.
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": rollout.tensor_parallel,
        "hf_overrides": dict(changes),
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if device.type != "cuda":
        return {**common, "enforce_eager": True}
    return {
        **common,
        "enable_sleep_mode": rollout.sleep_level > 0,
        # A bound for the memory that must be free at the start, where the size of the cache is given.
        "gpu_memory_utilization": min(1.0, cache / torch.cuda.mem_get_info(device)[1]),
        # Sums of the head in fp32 as the trainer's, which on GPUs costs nothing and on CPUs a copy of it per token.
        "hf_overrides": {**changes, "head_dtype": "float32"},
    }


def repack_tied_head(model: Any) -> None:
    """Pack the head anew where it is the embedding: on CPUs a reload leaves its packed copy as it was."""
    if model.config.tie_word_embeddings:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def _rollout(answer: Any, sampling: Sampling) -> Rollout:
    tokens = list(answer.token_ids)
    log_prob = None
    if sampling.log_prob:
        of_tokens = zip(tokens, answer.logprobs, strict=True)
        log_prob = np.array([candidates[token].logprob for token, candidates in of_tokens], np.float32)
    rollout = Rollout(np.array(tokens, np.int32), finished=answer.finish_reason == "stop", log_prob=log_prob)
    return sampling.stop.cut(rollout)


def _explain(error: Exception, settings: EngineSettings) -> str:
    reason = one_line(error)
    if isinstance(error, torch.OutOfMemoryError) or "memory" in reason.lower():
        return (
            f"kv_cache_gib ({settings.rollout.kv_cache_gib:g}) does not suit sequences of {settings.length} tokens and "
            f"this machine's memory: {reason}"
        )
    return f"engine: vLLM cannot take the model: {reason}; the engine transformers may"
