"""Rollouts by `generate` of transformers on an unsharded copy of the model, one per rank."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from exgrpo.train.distributed import World
from exgrpo.train.records import Rollout, TokenIds
from exgrpo.train.rollout.engine import EngineCounts, Finished, Sampling
from exgrpo.train.rollout.settings import EngineSettings
from exgrpo.train.rollout.stops import Stops
from exgrpo.train.seeds import derive_seed


class TransformersEngine:
    """Batched, length-sorted generation.

    Args:
        settings: the model and how to generate. Make the engine before any HfDeepSpeedConfig exists, which would shard
            the model.
        world: the ranks, of which each has an engine of its own.
    """

    unrepeatable: str | None = None
    free_log_prob = False
    ranks = 1

    def __init__(self, settings: EngineSettings, world: World) -> None:
        self.device = world.device
        self.eos = np.array(sorted(set(settings.eos)), dtype=np.int32)
        self.pad = settings.pad
        self.batch_tokens = settings.rollout.batch_tokens
        model = settings.source.load(settings.dtype, settings.attention)
        self.model: PreTrainedModel = model.to(self.device).eval().requires_grad_(False)
        self._counts = EngineCounts()
        self._slept: float | None = None

    def generate(
        self, prompts: Sequence[TokenIds], counts: Sequence[int], sampling: Sampling, seed: int
    ) -> Iterator[Finished]:
        """See `RolloutEngine.generate`; the answers of a batch come together."""
        jobs = [(i, sample) for i, count in enumerate(counts) for sample in range(count)]
        jobs.sort(key=lambda job: len(prompts[job[0]]))
        batches = 0
        while jobs:
            # The last job has the longest prompt: it sets the width of the batch.
            rows = max(1, self.batch_tokens // (len(prompts[jobs[-1][0]]) + sampling.max_tokens))
            jobs, batch = jobs[:-rows], jobs[-rows:]
            with torch_seed(derive_seed(seed, "batch", batches), self.device):
                rollouts = self._generate_batch([prompts[i] for i, _ in batch], sampling)
            batches += 1
            self._count(prompt_tokens=sum(len(prompts[i]) for i, _ in batch))
            yield from (Finished(i, sample, r) for (i, sample), r in zip(batch, rollouts, strict=True))

    @torch.inference_mode()
    def _generate_batch(self, prompts: Sequence[TokenIds], sampling: Sampling) -> list[Rollout]:
        width = max(len(prompt) for prompt in prompts)
        tokens = np.full((len(prompts), width), self.pad, np.int64)
        mask = np.zeros_like(tokens)
        for i, prompt in enumerate(prompts):
            tokens[i, width - len(prompt) :] = prompt
            mask[i, width - len(prompt) :] = 1
        output: Any = self.model.generate(
            input_ids=torch.from_numpy(tokens).to(self.device),
            attention_mask=torch.from_numpy(mask).to(self.device),
            max_new_tokens=sampling.max_tokens,
            do_sample=True,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=0,
            eos_token_id=self.eos.tolist(),
            pad_token_id=self.pad,
            stopping_criteria=StoppingCriteriaList([_Stopped(sampling.stop, width, self.eos)] if sampling.stop else []),
            # Ranks generate different amounts: they must not wait for each other token by token.
            synced_gpus=False,
            return_dict_in_generate=True,
            output_scores=sampling.log_prob,
        )
        responses = output.sequences[:, width:].cpu().numpy().astype(np.int32)
        log_probs = _token_log_probs(output.scores, output.sequences[:, width:]) if sampling.log_prob else None
        return [
            sampling.stop.cut(self._cut(response, None if log_probs is None else log_probs[i]))
            for i, response in enumerate(responses)
        ]

    def _cut(self, response: TokenIds, log_prob: np.ndarray | None) -> Rollout:
        ends = np.flatnonzero(np.isin(response, self.eos))
        length = int(ends[0]) + 1 if len(ends) else len(response)
        return Rollout(
            response=response[:length].copy(),
            finished=len(ends) > 0,
            log_prob=None if log_prob is None else log_prob[:length].copy(),
        )

    def push_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `RolloutEngine.push_weights`."""
        own = dict(self.model.named_parameters())
        for name, weight in weights:
            if name not in own:
                raise ValueError(f"weights: the rollout model has no parameter {name!r} left to take")
            own.pop(name).data.copy_(weight)
        if own:
            raise ValueError(f"weights: nothing came for {', '.join(sorted(own)[:5])} ({len(own)} parameters)")

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """See `RolloutEngine.differing`."""
        own = dict(self.model.named_parameters())
        return [name for name, weight in weights if not torch.equal(own[name], weight.to(own[name].device))]

    def counts(self) -> EngineCounts:
        """See `RolloutEngine.counts`."""
        counts, self._counts = self._counts, EngineCounts()
        return counts

    def _count(self, *, prompt_tokens: int = 0, asleep_seconds: float = 0.0) -> None:
        old = self._counts
        self._counts = EngineCounts(
            old.prompt_tokens + prompt_tokens, old.cached_tokens, old.asleep_seconds + asleep_seconds
        )

    def sleep(self) -> None:
        """Move the copy to CPU memory."""
        if self.device.type != "cpu":
            self.model.to("cpu")
            self._slept = time.perf_counter()

    def wake(self) -> None:
        """Move the copy back to its device."""
        self.model.to(self.device)
        if self._slept is not None:
            self._count(asleep_seconds=time.perf_counter() - self._slept)
            self._slept = None

    def close(self) -> None:
        """Drop the copy."""
        del self.model


class _Stopped(StoppingCriteria):
    """Ends the rows of a batch that hold a stop string; where each of them ends is found afterwards.

    Args:
        stop: the strings.
        width: of the prompts.
        eos: rows with one of these tokens have ended, and are filled up.
    """

    def __init__(self, stop: Stops, width: int, eos: TokenIds) -> None:
        self._stop = stop
        self._width = width
        self._eos = eos
        self._ended: set[int] = set()

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """[n] bool: which rows of [n, P + R] token ids have ended."""
        for row, response in enumerate(input_ids[:, self._width :].cpu().numpy()):
            if row not in self._ended and (response[-1] in self._eos or self._stop.reached(response)):
                self._ended.add(row)
        ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        ended[list(self._ended)] = True
        return ended


def _token_log_probs(scores: Sequence[torch.Tensor], tokens: torch.Tensor) -> np.ndarray:
    """[n, R] fp32 log-probs of the sampled tokens from one [n, V] tensor per step, which the tokens were drawn from."""
    per_step = [
        torch.log_softmax(step.float(), dim=-1).gather(-1, token[:, None])
        for step, token in zip(scores, tokens.T, strict=True)
    ]
    return torch.cat(per_step, dim=-1).cpu().numpy()


@contextmanager
def torch_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators inside the block and leave them untouched outside."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
