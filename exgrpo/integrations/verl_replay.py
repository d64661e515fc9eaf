"""Experience replay in verl's own trainer: `trainer.v1.trainer_mode=exgrpo`; see docs/verl.md for the command.

B questions per step (`data.train_batch_size`), K answers per question (`rollout.n`), G groups, N rows. verl's rows are
in its TransferQueue under keys `{uid}_{session}_{output}`, with one uid per group.
"""

import math
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from exgrpo.extras import needs
from exgrpo.integrations.verl_method import (
    KEY,
    PACKAGES,
    answer_columns,
    begin,
    check_prompt,
    configure,
    replay_loss,
    solution_keys,
)

with needs(__name__, *PACKAGES):
    import numpy as np
    import torch
    import transfer_queue as tq
    from omegaconf import DictConfig, OmegaConf, open_dict
    from tensordict import TensorDict
    from torch.utils.data import Subset
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.debug import marked_timer
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict
    from verl.workers.utils.padding import response_from_nested

    from exgrpo.integrations.trl_replay import distinct_rows, load_replay, plan_generation, save_replay
    from exgrpo.train.common.errors import ConfigError
    from exgrpo.train.common.functions import Needs
    from exgrpo.train.common.records import Score
    from exgrpo.train.common.step_batch import Ints, StepBatch
    from exgrpo.train.config.objective import SURROGATES, overlong_penalty
    from exgrpo.train.policy.loss import LossTerms
    from exgrpo.train.replay import MeanScores, PlannedGroup, Replay, replay_metrics
    from exgrpo.train.replay.groups import fill_advantages
    from exgrpo.train.replay.rules import ImportanceWeighting

EXPERIENCE = "experience"
"""Folder of the stored answers in a checkpoint, with the prompts of their questions."""
SCORED = "exgrpo"
"""Partition of the TransferQueue for rows to be scored only."""


@register_trainer("exgrpo")
class ExGRPOTrainer(PPOTrainerSync):
    """verl's synchronous trainer in which `exgrpo.train.replay` chooses questions, joined answers and trained rows.

    Its options are those of a recipe of `exgrpo.train`, under the key `exgrpo` of verl's configuration; see
    `verl_method.configure`.

    Attributes:
        options: the resulting configuration of `exgrpo.train`.
        replay: stored answers, solved questions, and whether replay has begun.
        prompts: [P] token ids of questions with stored answers, and of this step's questions.

    Raises:
        ConfigError: an option is wrong, or one of verl excludes replay; one line.
    """

    # Set by verl:
    train_dataset: Any
    steps_per_epoch: int
    total_training_steps: int
    parameter_sync_step: int

    def __init__(self, config: DictConfig) -> None:
        self.options = configure(config, OmegaConf.to_container(config.get(KEY) or OmegaConf.create()))
        super().__init__(config)
        self.importance_weighting = ImportanceWeighting.from_config(
            self.options, lambda rows: self.replay.rescored(rows, self.scores(rows).log_prob)
        )
        surrogate = SURROGATES.find(self.options.objective.surrogate)
        self.terms = LossTerms(self.options.method, 1.0, term=self.importance_weighting.term, surrogate=surrogate)
        self.prompts: dict[int, np.ndarray] = {}
        self._groups: list[PlannedGroup] = []
        self._uids: list[str] = []  # of the planned groups
        self._template: dict[str, Any] = {"tag": {}}  # a row of verl, for columns that are not tensors of an answer
        self._row: dict[str, int] = {}  # rows of the batch, by key
        self._trained = 0  # number of trained rows; 0 until it is known

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        rows = distinct_rows(getattr(self.train_dataset, "dataframe", self.train_dataset))
        if len(rows) < len(self.train_dataset):
            self._merge(rows)
        method, seed, option = self.options.method, self.options.seed, "exgrpo.reward.success"
        self.replay = Replay(method, len(self.train_dataset), seed, success_option=option)

    def _merge(self, rows: list[int]) -> None:
        """Keep one row per question, and count steps per epoch in questions."""
        count, trainer, batch = len(rows), self.config.trainer, self.config.data.train_batch_size
        print(f"data.train_files: {len(self.train_dataset)} rows, {count} questions", flush=True)
        if count < batch:
            raise ConfigError(f"data.train_batch_size={batch}: data.train_files has {count} questions; lower it")
        self.train_dataset = Subset(self.train_dataset, rows)
        if trainer.total_training_steps is None:
            self.steps_per_epoch = count // batch
            self.total_training_steps = self.steps_per_epoch * trainer.total_epochs
            with open_dict(self.config):
                optimizer = self.config.actor_rollout_ref.actor.optim
                optimizer.total_training_steps = self.total_training_steps * self.parameter_sync_step

    def on_init_end(self) -> None:
        """Set the workers' loss, and fill the experience of a new run."""
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        loss = partial(replay_loss, config=actor, terms=self.terms)
        self.actor_rollout_wg.set_loss_fn(loss)
        if not self.global_steps and (started := begin(self)):
            print(started, flush=True)
            self._keep_prompts(set())
        super().on_init_end()

    def on_step_end(self) -> None:
        """End the training once all questions are solved."""
        if self.replay.finished and self.global_steps < self.total_training_steps:
            self.total_training_steps = self.global_steps
            if self.config.trainer.save_freq > 0 and self.global_steps % self.config.trainer.save_freq:
                self._save_checkpoint()
        super().on_step_end()

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        """Return the planned questions as verl's data loader would."""
        self._trained, self._groups, self._uids = 0, [], []
        batch = self._asked(plan_generation(self.replay, self.options.questions, self.global_steps).groups)
        if batch is None:
            raise ConfigError(f"compose={self.options.experience.compose!r}: verl needs a fresh answer in every step")
        return batch

    def _asked(self, groups: Sequence[PlannedGroup]) -> TensorDict | None:
        """Add planned groups, and return the rows of those with fresh answers; None: no group has one."""
        asked, batch = [group for group in groups if group.fresh], None
        if asked:
            rows = self.train_dataloader.collate_fn([self.train_dataset[group.question] for group in asked])
            rows["__rollout_n__"] = np.array([group.fresh for group in asked], object)
            self.train_dataloader_it = iter([rows])
            batch = super()._next_train_batch()
        uids = iter([] if batch is None else batch["uid"])
        self._uids += [str(next(uids) if group.fresh else uuid4()) for group in groups]
        self._groups += groups
        return batch

    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> KVBatchMeta:
        planned = len(self._groups)
        with marked_timer("gen", timing_raw):
            for _ in range(self.options.rollout.refills):
                if not self._refilled():
                    break
        metrics["experience/refilled"] = len(self._groups) - planned
        return super()._step_once(metrics, timing_raw, sum(group.fresh > 0 for group in self._groups))

    def _refilled(self) -> bool:
        """Ask further questions if too few groups have a gradient; return True if any are asked."""
        step, uids = self.global_steps, [uid for uid, one in zip(self._uids, self._groups, strict=True) if one.fresh]
        batch, _ = self.replay_buffer.sample(global_steps=step, partition_id="train", batch_size=len(uids))
        # The buffer forgets the questions that it has given, and is to give them again.
        told = {"is_prompt": True, "status": "finished", "global_steps": step}
        tq.kv_batch_put(keys=uids, partition_id="train", tags=[told] * len(uids))
        more = self.replay.refill(self._fresh(batch)[0], self.options.questions, step)
        if (asked := self._asked(more)) is not None:
            self._submit_batch_to_rollout(asked)
        return bool(more)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Keep the number of optimiser steps of a whole batch when rows are dropped."""
        names = ("actor.ppo_micro_batch_size_per_gpu", "rollout.log_prob_micro_batch_size_per_gpu")
        part = self.config.actor_rollout_ref
        fixed = () if part.actor.use_dynamic_bsz else (*names, "ref.log_prob_micro_batch_size_per_gpu")
        whole = math.lcm(dp_size, *(dp_size * (OmegaConf.select(part, name) or 1) for name in fixed))
        if not self._trained:
            return whole
        samples, steps = self.options.rollout.samples, self.options.optimizer.minibatches
        unit = whole // math.gcd(whole, samples)
        part.actor.ppo_mini_batch_size = unit * math.ceil(self._trained / (steps * samples * unit))
        return super()._get_required_batch_multiple(dp_size)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Choose the trained rows: verl's log-probs of the fresh rows are the last input needed."""
        batch = super()._compute_old_log_prob(batch, metrics)
        fresh, keys = self._fresh(batch)
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["old_log_probs"])
        fresh.fill(old_log_prob=torch.cat(list(data["old_log_probs"].unbind())).numpy())
        self._batch = fresh.append_rows(self.replay.select(self._groups, self._mean_scores))
        report = self.replay.store(self._batch, self.global_steps)
        if report.note:
            warnings.warn(report.note, stacklevel=2)
        questions, refilled = self.options.questions, self.options.rollout.refills > 0
        self._batch = self.replay.settle(self._batch, questions, self.global_steps, refilled=refilled)
        self._keep_prompts(set(self._batch.question.tolist()))
        numbers = {"pass_rate": report.pass_rate, **replay_metrics(self.replay, self._batch, self.global_steps)}
        metrics.update({f"experience/{name}": value for name, value in numbers.items()})
        return self._to_train(batch, keys, metrics)

    def _fresh(self, batch: KVBatchMeta) -> tuple[StepBatch, list[str]]:
        """Return verl's graded rows, ordered by group, and their keys."""
        group_of, rows = {uid: group for group, uid in enumerate(self._uids)}, []
        for key, tag in zip(batch.keys, batch.tags, strict=True):
            uid, session, output = key.rsplit("_", 2)
            if output != "0":
                raise ConfigError("an agent loop has returned several outputs of a session; replay supports only one")
            if not tag.get("is_padding"):
                rows.append((group_of[uid], int(session), key, tag))
        if not rows:
            raise ConfigError(f"step {self.global_steps} has no answer: every session of its agent loop has failed")
        groups, _, keys, tags = zip(*sorted(rows, key=lambda row: row[:2]), strict=True)
        whole = tq.kv_batch_get(keys=list(keys[:1]), partition_id=batch.partition_id)[0]
        self._template = {name: whole[name] for name in list(whole.keys())} | {"tag": tags[0]}
        if self._template.get("multi_modal_inputs"):
            raise ConfigError("data.train_files: questions have images, videos or sounds; replay supports only text")
        names = ["prompts", "responses", "response_mask", "rm_scores", "extra_fields"]
        data = tq.kv_batch_get(keys=list(keys), partition_id=batch.partition_id, select_fields=names)
        columns = {name: [values.numpy() for values in data[name].unbind()] for name in names[:-1]}
        extras = [extra.get("reward_extra_info", {}) for extra in data["extra_fields"]]
        for group, prompt in zip(groups, columns["prompts"], strict=True):
            question = self._groups[group].question
            if self.global_steps == 1 and self.options.experience.start:
                check_prompt(question, prompt, self.prompts)
            self.prompts[question] = prompt.astype(np.int32)
        length = np.array([len(answer) for answer in columns["responses"]])
        longest, last = self.config.data.max_response_length, [answer[-1] for answer in columns["responses"]]
        return StepBatch(
            np.array([group.question for group in self._groups]),
            np.array(groups),
            length,
            **dict.fromkeys(("replayed", "replays", "old_log_probs_from"), np.zeros(len(keys))),
            key=solution_keys(extras, self.options.experience.admit),
            step=np.full(len(keys), self.global_steps),
            finished=(length < longest) | (np.array(last) == self.tokenizer.eos_token_id),
            reward=[float(scores.sum()) for scores in columns["rm_scores"]],
            penalty=[overlong_penalty(n, longest, self.options.objective) for n in length.tolist()],
            token=np.concatenate(columns["responses"]),
            response_mask=np.concatenate(columns["response_mask"]),
        ), list(keys)

    def _keep_prompts(self, asked: set[int]) -> None:
        """Drop the prompts of questions without a stored answer, except those in `asked`."""
        held = self.replay.memory.table.held
        self.prompts = {one: ids for one, ids in self.prompts.items() if one in asked or held[one]}

    def _to_train(self, batch: KVBatchMeta, keys: Sequence[str], metrics: dict) -> KVBatchMeta:
        """Return verl's rows to train on; if there are none, return the batch and skip the update."""
        whole, rows = self._batch, self._batch.rows_of(self._batch.trained)
        self._trained, replayed = len(rows), rows[whole.replayed[rows]]
        self._row = dict(zip(keys, np.flatnonzero(whole.fresh).tolist(), strict=True))
        if not self._trained:
            return batch
        uids = [*self._uids, *(str(uuid4()) for _ in range(whole.groups - len(self._uids)))]
        of_replayed = [uids[group] for group in whole.group[replayed].tolist()]
        added = self._put(whole, replayed, of_replayed, batch.partition_id)
        self._row |= dict(zip(added.keys, replayed.tolist(), strict=True))
        tags, trained = dict(zip(batch.keys, batch.tags, strict=True)), set(rows.tolist())
        kept = [key for key in keys if self._row[key] in trained]
        if left := list(set(batch.keys) - set(kept)):
            tq.kv_clear(keys=left, partition_id=batch.partition_id)
        all_tags = [tags[key] for key in kept] + added.tags
        both = KVBatchMeta(kept + added.keys, all_tags, batch.partition_id, batch.fields, batch.extra_info)
        return self._balance_batch(both, metrics)

    def _put(self, batch: StepBatch, rows: Ints, uids: Sequence[str], partition: str) -> KVBatchMeta:
        """Put stored answers into the TransferQueue as rows of verl."""
        keys, fields, tags = [], [], []
        names, tag = set(self._template) - {"tag"}, self._template["tag"]  # names are empty before the first row
        for row, uid in zip(rows.tolist(), uids, strict=True):
            question = int(batch.question[batch.group[row]])
            columns = answer_columns(batch, row, self.prompts[question])
            values = self._template | self.train_dataset[question] | columns | {"uid": uid}
            fields.append({name: values[name] for name in names or columns})
            keys.append(f"{uid}_{self.options.rollout.samples + row}_0")  # sessions of fresh rows have smaller numbers
            prompt, answer = len(columns["prompts"]), len(columns["responses"])
            lengths = {"prompt_len": prompt, "response_len": answer, "seq_len": prompt + answer}
            written = int(batch.step[row]) - 1
            tags.append(tag | lengths | {"min_global_steps": written, "max_global_steps": written})
        if keys:
            tq.kv_batch_put(keys=keys, partition_id=partition, fields=list_of_dict_to_tensordict(fields), tags=tags)
        return KVBatchMeta(keys=keys, tags=tags, partition_id=partition)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Replace verl's advantages and old log-probs by those of `exgrpo.train`."""
        result = super()._compute_advantage(batch, metrics)
        whole, objective = self._batch, self.options.objective
        if not self._trained:
            return result
        fill_advantages(whole, objective)
        whole.fill(ratio_log_prob=whole.old_log_prob.copy(), factor=np.ones(len(whole.token)))
        self.importance_weighting(whole)
        trained = self.replay.in_band(whole, objective.train_on)[whole.group]
        trained &= whole.finished | (not objective.overlong_filter)
        share = 1 / whole.num_tokens.clip(min=1) if objective.normalize == "sequence" else np.ones(len(whole))
        weight = whole.by_token(trained * share) * whole.factor
        rows = [self._row.get(key) for key in batch.keys]

        def of_rows(values: np.ndarray) -> torch.Tensor:  # padding has no row and gets weight 0
            known = zip(rows, batch.tags, strict=True)
            parts = [np.zeros(tag["response_len"]) if row is None else values[whole.at(row)] for row, tag in known]
            tensors = [torch.from_numpy(part.astype(np.float32)) for part in parts]
            return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

        columns = {"old_log_probs": whole.ratio_log_prob, "advantages": whole.by_token(whole.advantage)}
        nested = {name: of_rows(values) for name, values in {**columns, "weights": weight}.items()}
        replayed = torch.tensor([row is not None and bool(whole.replayed[row]) for row in rows])
        fields = TensorDict({**nested, "replayed": replayed}, batch_size=len(batch))
        result = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        clip = objective.clip_with_replay or self.importance_weighting.term == "clipped" or not replayed.any()
        of_step = self.config.actor_rollout_ref.actor.ppo_mini_batch_size * self.options.rollout.samples
        result.extra_info |= {"clip": bool(clip), "rows": self._trained * of_step / len(batch)}
        signal = nested["advantages"].values() * nested["weights"].values()
        if not (Needs.of(self.terms.surrogate).all_rows or signal.any()):
            self._trained = 0
        return result

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return super()._update_actor(batch, metrics) if self._trained else batch

    def _mean_scores(self, candidates: StepBatch) -> MeanScores:
        return MeanScores.from_scores(candidates, self.scores(candidates, 1.0))  # selection is defined at temperature 1

    def scores(self, batch: StepBatch, temperature: float | None = None) -> Score:
        """Score stored answers under the current policy; temperature None: that of the rollout."""
        trained, self._trained = self._trained, 0  # only an update needs whole mini-batches
        rows = self._put(batch, np.arange(len(batch)), [str(uuid4())] * len(batch), SCORED)
        padded = self._balance_batch(rows, {})
        temperature = temperature or self.options.rollout.temperature
        padded.extra_info = {"calculate_entropy": True, "compute_loss": False, "temperature": temperature}
        self.actor_rollout_wg.compute_log_prob(padded)
        names = ["log_probs", "entropy", "response_mask"]
        data = tq.kv_batch_get(keys=rows.keys, partition_id=SCORED, select_fields=names)
        of_answers = [response_from_nested(data[name], data["response_mask"]).values().numpy() for name in names[:2]]
        tq.kv_clear(keys=padded.keys, partition_id=SCORED)
        self._trained = trained
        return Score(*of_answers)

    def _save_checkpoint(self) -> None:
        # Before verl's own state, so that a checkpoint that verl considers complete has the experience.
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}" / EXPERIENCE
        save_replay(folder, self.replay, self.global_steps, self.prompts)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps:
            trainer, name = self.config.trainer, f"global_step_{self.global_steps}"
            named = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
            folder = Path(named or Path(trainer.default_local_dir) / name) / EXPERIENCE
            _, self.prompts = load_replay(folder, self.replay)
            if self.replay.finished:
                self.total_training_steps = self.global_steps
