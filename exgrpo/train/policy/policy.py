"""The policy, under DeepSpeed ZeRO-3 where it is sharded: scores, optimiser steps, whole weights."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig
from transformers.utils import GENERATION_CONFIG_NAME

from exgrpo.kernels import LogProb, PolicyLoss
from exgrpo.train.common.distributed import World, agree
from exgrpo.train.common.errors import CheckpointError, ConfigError, os_errors_as, shown
from exgrpo.train.common.functions import Term
from exgrpo.train.common.records import Rollout, Score
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.config.objective import SURROGATES
from exgrpo.train.config.options import Config
from exgrpo.train.policy.adapters import (
    BASE_WEIGHT,
    adapted_layers,
    add_adapters,
    base_name,
    is_adapter,
    load_adapters,
    save_adapters,
    whole_adapters,
)
from exgrpo.train.policy.attention import PACKED
from exgrpo.train.policy.batch import MiniBatch
from exgrpo.train.policy.check import differing_layer
from exgrpo.train.policy.engine import WholeEngine, deepspeed_settings, sharded_engine, trained
from exgrpo.train.policy.flops import EXPERTS
from exgrpo.train.policy.layout import Layout, Packed, Padded, Schedule
from exgrpo.train.policy.loss import LossTerms
from exgrpo.train.policy.model import PolicyModel, compile_layers, dense, layers_of, load_model
from exgrpo.train.policy.source import ModelSource
from exgrpo.train.policy.states import (
    LossScale,
    ShardedStates,
    States,
    WholeStates,
    load_states,
    save_states,
    save_training,
)
from exgrpo.train.policy.update import Tally, UpdateStats

LOG_PROB_GAP = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Mean difference of log-probs, in nats, below which two ways to compute them are taken to give the same."""
COMPILED_ON = ("cuda",)
"""Kinds of devices on which layers are compiled unless an option says otherwise."""
FIRST_TOKENS = 128
"""Of the prompts and answers that layers are compiled for first."""


class Policy:
    """The trained model, its optimiser and its schedule: sharded by DeepSpeed ZeRO-3, or whole in a world of one.

    Args:
        config: the run.
        source: the model to start from.
        world: the processes that share it.
    """

    def __init__(self, config: Config, source: ModelSource, world: World) -> None:
        self.world = world
        self.budget = config.pass_tokens
        self.temperature = config.rollout.temperature
        # A surrogate is looked for once: one of a user's own may keep a state.
        self.surrogate = SURROGATES.find(config.objective.surrogate)
        self.method = config.method
        whole = world.size == 1
        if config.lora.quantised != "none" and not whole:
            raise ConfigError(
                f"lora.quantised {config.lora.quantised}: ZeRO-3 does not cut weights in 4 bits; take one process, "
                "or lora.quantised none"
            )
        self.compiled, self.plain_layers = False, ""
        """True if the layers of passes are compiled (rollouts have plain ones); and why a trial refused that."""
        experts = any(getattr(source.config.get_text_config(), name, None) for name in EXPERTS)
        plain_alone = not whole or experts or config.lora.quantised != "none"
        if plain_alone and config.policy.compile == "inductor":
            raise ConfigError(
                "policy.compile inductor is for one process, dense layers and weights that are not in 4 bits: take none"
            )
        # What a model with adapters is saved as. It is made while models still have their whole shapes.
        self.merged = source.empty() if config.lora.rank and config.lora.result == "merged" else None
        # Alive: from_pretrained then loads each rank its shard.
        self._zero3 = None if whole else HfDeepSpeedConfig(deepspeed_settings(config))
        model = load_model(config, source)
        if config.policy.checkpointing:
            try:
                # Its name before transformers 5.23 is the second one.
                enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
                enable({"use_reentrant": False})
            except ValueError as error:
                raise ConfigError(f"policy.gradient_checkpointing: {error}") from error
        if self.merged:
            self.merged.generation_config = model.generation_config
        if config.lora.rank:
            add_adapters(model, config.lora, config.seed)
            if whole:
                for parameter in trained(model).values():
                    parameter.data = parameter.data.float()  # beside weights of another dtype
            if config.lora.path:
                load_adapters(config.lora.path, model)
        wrapped = PolicyModel(model, config.policy.kernel_backend, config.policy.kernel_memory)
        self.engine: Any
        self.states: States
        if whole:
            head = model.get_output_embeddings().weight
            self.engine = WholeEngine(wrapped.to(world.device), config, head)
            self.states = WholeStates(self.engine)
        else:
            self.engine = sharded_engine(wrapped, config)
            self.states = ShardedStates(self.engine, world.rank)
        self.layout: Layout = Padded()
        self.packs = self._packs()
        """Whether a pass reads rows without padding."""
        self.layout = Packed() if self.packs else Padded()
        on_device = config.policy.compile == "auto" and world.device.type in COMPILED_ON
        if not plain_alone and (on_device or config.policy.compile == "inductor"):
            self._compile(config)

    def _packs(self) -> bool:
        """Try whether packed sequences give what padded ones do: any layer could look at its neighbours."""
        if self.model.config._attn_implementation != PACKED:
            return False
        # Each rank has the same rows: one without any would go on alone where the others fail.
        batch = _random_rows(self.model, [(5, 4, 1), (3, 6, 2)] * self.world.size)
        padded = self.score(batch, 1.0).log_prob
        self.layout = Packed()
        try:
            packed = self.score(batch, 1.0).log_prob
        except RuntimeError:  # the attention does not know what the model asks of it, or a GPU has no kernel for it
            return False
        except TypeError as error:
            if "segments" not in str(error):
                raise
            return False  # the decoder has no place for them
        return bool(np.abs(padded - packed).mean() < LOG_PROB_GAP[self.model.dtype])

    def _compile(self, config: Config) -> None:
        """Have the layers compiled, for passes with a gradient and without, if they then give what plain ones do.

        The first pass has always the same sizes, near those of a full one: the kernels, and with them the order of
        sums, depend on the first sizes that a layer is compiled for.

        Raises:
            ConfigError: they cannot be compiled, or give something else, and the option asks for them.
        """
        length = max(1, min(FIRST_TOKENS, config.longest // 2))
        count = max(1, self.budget // (2 * length))
        rows = _random_rows(self.model, [(length, length)] * count)
        layers, calls = layers_of(self.model), []
        try:
            with ExitStack() as hooks:
                for layer in layers[:1]:
                    hook = layer.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
                    hooks.callback(hook.remove)
                plain = self.score(rows, 1.0).log_prob
            compile_layers(self.model)
            gap = np.abs(self.score(rows, 1.0).log_prob - plain).mean()
            self.engine.module.train()  # not the engine: what a head adds by itself would stay for the first step
            total = self.engine(self.layout.tokens(rows, self.world.device), 1.0).log_prob.sum()
            parts = (*layers_of(self.model), self.model)  # adapters may be in the head alone
            weights = next(filter(None, (list(trained(part).values()) for part in parts)))
            torch.autograd.grad(total, weights)
            problem = differing_layer(layers[0], *calls[0]) if calls else ""
            if not gap < LOG_PROB_GAP[self.model.dtype]:
                problem = f"log-probs differ from those of plain layers by {gap:.1e}"
        except Exception as error:  # of whatever kind: of a compiler, or of what it has made
            problem = shown(error)
        self.compiled = not problem
        if problem and config.policy.compile != "auto":
            raise ConfigError(f"policy.compile {config.policy.compile} fails: {problem}; take none")
        if problem:
            self.plain_layers = problem
            for layer in layers:
                layer._compiled_call_impl = None

    @property
    def model(self) -> PreTrainedModel:
        """The wrapped causal LM."""
        return self.engine.module.model

    @property
    def learning_rate(self) -> float:
        """The rate of the next optimiser step."""
        return float(self.engine.get_lr()[0])

    @property
    def checkpoint_bytes(self) -> int:
        """Least size of a checkpoint: weights and both moments, in fp32."""
        return 4 * 3 * sum(self.states.numel(name) for name in self.states.parameters)

    def score(self, batch: StepBatch, temperature: float) -> Score:
        """Log-probs and entropies of all response tokens at a temperature; all ranks share the work."""
        return self.score_with(self.engine, batch, temperature)

    @torch.no_grad()
    def score_with(self, engine: Any, batch: StepBatch, temperature: float) -> Score:
        """The same under another model of this architecture, as a `PolicyModel` that an engine may have wrapped."""
        plan = self.layout.plan(batch, self.budget, self.world.size)
        engine.eval()
        mine = []
        for rows in plan[self.world.rank]:
            of_pass = batch.take(np.array(rows, np.int64))
            result = engine(self.layout.tokens(of_pass, self.world.device), temperature)
            mine.append((of_pass, _scores(result)))
        return self._whole(batch, plan, mine)

    def _whole(self, batch: StepBatch, plan: Schedule, mine: Sequence[tuple[StepBatch, torch.Tensor]]) -> Score:
        """Log-probs and entropies of all passes, from those of this rank; only here a GPU is waited for."""
        found = [scores.cpu().numpy()[:, self.layout.places(of_pass)] for of_pass, scores in mine]
        values = np.empty((2, len(batch.token)), np.float32)
        for passes, of_rank in zip(plan, self.world.gather(found), strict=True):
            for rows, scores in zip(passes, of_rank, strict=False):
                values[:, batch.places(np.array(rows, np.int64))] = scores
        return Score(*values)

    def update(
        self, minibatch: MiniBatch, *, clip: bool, term: Term = "shaped", keep_scores: bool = False
    ) -> UpdateStats:
        """Take an optimiser step on the mini-batch, for the policy at the rollout temperature.

        The loss is a sum over the mini-batch divided by constants of the whole of it, so neither the packing nor the
        number of ranks changes it. `term` is that of replayed tokens. The scores of its rows before the step are kept
        if asked.
        """
        terms = LossTerms.from_minibatch(
            minibatch, self.method, self.surrogate, ranks=self.world.size, clip=clip, term=term
        )
        plan = self.layout.plan(minibatch.batch, self.budget, self.world.size)
        self.engine.train()
        tally = Tally(terms)
        mine = []
        for rows in plan[self.world.rank] or [[]]:
            of_pass = minibatch.batch.take(np.array(rows, np.int64))
            batch = self.layout.rows(of_pass, self.world.device)
            result = self.engine(batch, terms)
            if keep_scores:
                mine.append((of_pass, _scores(result)))
            self.engine.backward(result.loss, scale_wrt_gas=False)
            tally.add(batch, result)
        skipped, scaled = self.engine.skipped_steps, self.states.loss_scale
        self.engine.step()
        return tally.stats(
            self.world,
            grad_norm=self.engine.get_global_grad_norm(),
            applied=self.engine.skipped_steps == skipped,
            loss_scale=scaled.scale if scaled else math.nan,
            scores=self._whole(minibatch.batch, plan, mine) if keep_scores else None,
        )

    def weights(self) -> "WholeWeights":
        """Every parameter of the causal LM whole, adapters added to it; see `WholeWeights`."""
        return WholeWeights(self.model)

    def save_checkpoint(self, folder: Path) -> None:
        """Write this rank's part of the states of training. Raises OSError."""
        save_states(self.states, folder, self.world.rank)
        if self.world.is_main:
            save_training(self.states, self.engine.lr_scheduler, self.engine.skipped_steps, folder)

    def load_checkpoint(self, folder: Path) -> None:
        """Go on from what any number of ranks has written; all ranks call it together.

        Raises:
            CheckpointError: on every rank, where the files of one cannot be read or are of another model.
        """

        def load() -> dict[str, Any]:
            with os_errors_as(CheckpointError, f"{folder} cannot be loaded"):
                return load_states(self.states, folder)

        training = agree(self.world, load)
        self.states.apply()
        self.engine.skipped_steps = training["skipped"]
        if self.states.loss_scale and training.get("loss_scale"):
            self.states.set_loss_scale(LossScale(**training["loss_scale"]))
        scheduler = self.engine.lr_scheduler
        scheduler.load_state_dict(training["schedule"])
        groups = (scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas)
        for group, rate, factor in zip(*groups, strict=True):  # the run may have other steps now, and so another rate
            group["lr"] = rate * factor(scheduler.last_epoch)

    def end_with(self, ids: Sequence[int]) -> None:
        """Have the models that are saved end their answers with any of these tokens."""
        self.model.generation_config.eos_token_id = ids[0] if len(ids) == 1 else list(ids)

    def save(self, folder: Path) -> None:
        """Write the model in Hugging Face format, or its adapters in peft's (all ranks must call it; rank 0 writes)."""
        adapters = self.merged is None and adapted_layers(self.model)
        state: dict[str, torch.Tensor] = {}
        for name, weight in whole_adapters(self.model) if adapters else self.weights():
            if self.world.is_main:
                state[name] = weight.detach().cpu().clone()
        if self.world.is_main and adapters:
            save_adapters(folder, self.model, state)
        elif self.world.is_main:
            saved = self.model if self.merged is None else self.merged.to(self.model.dtype)
            # Written here: transformers refuses to save flags without effect, with which some models come.
            generation, saved.generation_config = saved.generation_config, GenerationConfig()
            saved.save_pretrained(folder, state_dict=state)
            saved.generation_config = generation
            generation.to_json_file(folder / GENERATION_CONFIG_NAME)


@dataclass(frozen=True, eq=False)
class WholeWeights:
    """Name and whole tensor of every parameter, one at a time; all ranks must run through them together.

    Tied parameters appear once. A tensor is valid until the next one is asked for. They can be run through again, and
    then are what they have become meanwhile.
    """

    model: PreTrainedModel

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        layers = adapted_layers(self.model)
        for name, parameter in self.model.named_parameters():
            if is_adapter(name):
                continue
            layer = layers.get(name.removesuffix(BASE_WEIGHT))
            with deepspeed.zero.GatheredParameters([parameter, *((layer.down, layer.up) if layer else ())]):
                weight = dense(parameter)
                yield base_name(name), layer.added_to(weight) if layer else weight


def _scores(result: LogProb | PolicyLoss) -> torch.Tensor:
    """[2, targets] log-probs and entropies of a pass, by target."""
    return torch.stack([result.log_prob.detach(), result.entropy.detach()]).flatten(1)


def _random_rows(model: PreTrainedModel, lengths: Sequence[Sequence[int]]) -> StepBatch:
    """Random tokens, always the same; of each question the length of the prompt and those of its answers."""
    rng, size = np.random.default_rng(0), model.config.get_text_config().vocab_size

    def tokens(length: int) -> npt.NDArray[np.int32]:
        return rng.integers(size, size=length).astype(np.int32)

    pairs = [(prompt, tokens(length)) for first, *others in lengths for prompt in [tokens(first)] for length in others]
    return StepBatch.from_answers([prompt for prompt, _ in pairs], [Rollout(one, finished=True) for _, one in pairs])
