"""Rollouts by an unsharded model per rank: a copy of the policy, or the policy itself in a single process."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from exgrpo.train.common.distributed import World
from exgrpo.train.common.records import EngineCounts, shared_prefix
from exgrpo.train.config.options import Config
from exgrpo.train.policy.attention import ONE_TOKEN
from exgrpo.train.rollout.engine import EngineSettings, Enough, Finished, Request
from exgrpo.train.rollout.transformers.decode import decode, keeps_all
from exgrpo.train.rollout.transformers.draws import Noise

if TYPE_CHECKING:
    from exgrpo.train.policy.policy import Policy


class TransformersEngine:
    """Generates in batches of prompts of similar length.

    Without a given model it loads a copy, before any HfDeepSpeedConfig exists, which would shard it.
    """

    unrepeatable: str | None = None
    free_log_prob = True
    ranks = 1

    def __init__(self, settings: EngineSettings, world: World, model: PreTrainedModel | None = None) -> None:
        self.device = world.device
        self.eos = np.array(sorted(set(settings.eos)), dtype=np.int32)
        self.pad = settings.pad
        self.batch_tokens = settings.rollout.batch_tokens
        self.model = self._copy(settings) if model is None else model
        self._shares = keeps_all(self.model.config)
        self._prompt_tokens = self._read_tokens = 0
        self._asleep_seconds = 0.0
        self._slept: float | None = None

    def _copy(self, settings: EngineSettings) -> PreTrainedModel:
        model = settings.source.load(settings.dtype, settings.attention)
        if attends_one_token(settings, model):
            model.set_attn_implementation(ONE_TOKEN)
        return model.to(self.device).eval().requires_grad_(False)

    def generate(self, requests: Sequence[Request], enough: Enough | None = None) -> Iterator[Finished]:
        """Generate as `RolloutEngine.generate`, in batches by the length of the prompts."""
        jobs = [(i, sample) for i, request in enumerate(requests) for sample in range(request.count)]
        jobs.sort(key=lambda job: len(requests[job[0]].prompt))
        while jobs and not (enough and enough()):
            # The last job has the longest prompt: it sets the width of the batch.
            longest = max(requests[i].sampling.max_tokens for i, _ in jobs)
            rows = max(1, self.batch_tokens // (len(requests[jobs[-1][0]].prompt) + longest))
            jobs, batch = jobs[:-rows], jobs[-rows:]
            asked = sorted({i for i, _ in batch})
            prompts = [requests[i].prompt for i in asked]
            shared = shared_prefix(prompts) if self._shares else 0
            self._prompt_tokens += sum(len(requests[i].prompt) for i, _ in batch)
            self._read_tokens += sum(map(len, prompts)) - shared * (len(prompts) - 1)
            answers = decode(
                self.model,
                prompts,
                np.searchsorted(asked, [i for i, _ in batch]),
                [requests[i].sampling for i, _ in batch],
                Noise([(requests[i].seed, sample) for i, sample in batch]),
                eos=self.eos,
                pad=self.pad,
                shared=shared,
                enough=enough,
            )
            for number, rollout in answers:
                i, sample = batch[number]
                yield Finished(i, sample, requests[i].sampling.stop.cut(rollout))

    def push_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.model.named_parameters())
        for name, weight in weights:
            if name not in own:
                raise ValueError(f"weights: the rollout model has no parameter {name!r} left to take")
            own.pop(name).data.copy_(weight)
        if own:
            raise ValueError(f"weights: nothing came for {', '.join(sorted(own)[:5])} ({len(own)} parameters)")

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        own = dict(self.model.named_parameters())
        return [name for name, weight in weights if not torch.equal(own[name], weight.to(own[name].device))]

    def counts(self) -> EngineCounts:
        prompt_tokens = self._prompt_tokens
        counts = EngineCounts(prompt_tokens, prompt_tokens - self._read_tokens, self._asleep_seconds)
        self._prompt_tokens = self._read_tokens = 0
        self._asleep_seconds = 0.0
        return counts

    def sleep(self) -> None:
        """Move the copy to CPU memory."""
        if self.device.type != "cpu":
            self.model.to("cpu")
            self._slept = time.perf_counter()

    def wake(self) -> None:
        """Move the copy back to its device."""
        self.model.to(self.device)
        if self._slept is not None:
            self._asleep_seconds += time.perf_counter() - self._slept
            self._slept = None

    def close(self) -> None:
        """Drop the copy."""
        del self.model


def attends_one_token(settings: EngineSettings, model: PreTrainedModel) -> bool:
    """True if the model shall generate with the attention `ONE_TOKEN`."""
    return settings.attention == "sdpa" and model._can_set_attn_implementation()


class SharedEngine(TransformersEngine):
    """Generates with the policy's own module (with adapters on 4-bit weights, too), so no weights are pushed.

    Awake, the module is configured as a copy would be, so that answers are the same: evaluation mode, plain layers, the
    attention for one token, and no parameter requires a gradient, since PyTorch selects matrix kernels by that, too.
    Asleep, it is as the trainer left it. So nothing else may use the policy while the engine is awake: `rollout.ahead`
    needs servers.
    """

    def __init__(self, settings: EngineSettings, world: World, policy: "Policy") -> None:
        super().__init__(settings, world, policy.model)
        self._policy = policy
        self._one_token = attends_one_token(settings, policy.model)
        # The trainer's mode, attention and trained parameters, to be restored in `sleep`; None while asleep.
        self._trainers: tuple[bool, str, list[nn.Parameter]] | None = None

    def push_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Do nothing: the module has the weights."""

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        pairs = zip(weights, self._policy.weights(), strict=True)
        return [name for (name, weight), (_, own) in pairs if not torch.equal(own, weight.to(own.device))]

    def wake(self) -> None:
        """Take the module from the trainer."""
        if self._trainers is None:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self._trainers = self.model.training, self.model.config._attn_implementation, trained
            self.model.eval().requires_grad_(False)
            if self._policy.compiled:  # the growing cache would cause a recompilation for each length
                torch.compiler.set_stance("force_eager")
            if self._one_token:
                self.model.set_attn_implementation(ONE_TOKEN)

    def sleep(self) -> None:
        """Give the module back."""
        if self._trainers is not None:
            (training, attention, trained), self._trainers = self._trainers, None
            self.model.train(training)
            for parameter in trained:
                parameter.requires_grad_()
            if self._policy.compiled:
                torch.compiler.set_stance("default")
            if self._one_token:
                self.model.set_attn_implementation(attention)

    def close(self) -> None:
        """Drop the references to the module."""
        del self.model, self._policy


def shares_policy(config: Config, ranks: int) -> bool:
    """True if the policy itself generates: engine transformers in a single process."""
    return config.rollout.engine == "transformers" and ranks == 1
