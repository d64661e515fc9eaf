"""ExGRPO (arXiv 2510.02245) as a trainer of TRL.

K answers per question (`num_generations`), B questions per generation (`generation_batch_size / K`), C completion
tokens, N rows of this process.
"""

import inspect
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exgrpo.extras import needs
from exgrpo.integrations.trl_loss import FusedLossMixin, PolicyLossInputs, at_temperature

with needs(__name__, "exgrpo[trl]"):
    import numpy as np
    from accelerate.utils import gather_object
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
    from trl import GRPOTrainer
    from trl.trainer.utils import pad

    from exgrpo.integrations.trl_batch import deal, mixed_advantages, places, rebuild, with_stored
    from exgrpo.integrations.trl_config import IMAGES, ExGRPOConfig, check_arguments, in_place_of_turns
    from exgrpo.integrations.trl_replay import (
        Prompts,
        load_replay,
        placed,
        plan_generation,
        save_replay,
        start_replay,
        uncounted,
    )
    from exgrpo.train.common.records import Score
    from exgrpo.train.common.step_batch import StepBatch
    from exgrpo.train.replay import MeanScores, PlannedGroup, Replay
    from exgrpo.train.replay.rules import ImportanceWeighting

__all__ = ["ExGRPOConfig", "ExGRPOTrainer", "FusedLossMixin"]

EXPERIENCE = "experience"
"""Folder of the stored answers in a checkpoint."""


class ExGRPOTrainer(FusedLossMixin, GRPOTrainer):
    """GRPOTrainer with experience replay: it trains on stored successes in addition to fresh answers.

    Takes the arguments of `trl.GRPOTrainer`; tools and environments need compositions that add stored answers to fresh
    ones. An answer is a success if the sum of its weighted rewards is at least `success` (see `bucket_by` for
    continuous rewards); a warning is issued if no answer or every answer is one although rewards differ. Rows of
    `train_dataset` that agree in all columns but `index` are one question; the first row is kept. The data loader only
    sets the number of steps: the experience chooses the questions of a generation, so that replayed ones replace fresh
    ones and solved ones are dropped. Training stops once all are solved.

    Attributes:
        replay: stored answers, solved questions, and whether replay has begun.
        generation: number of generations so far. It takes the place of `exgrpo.train`'s training step: the step of a
            trajectory, and the unit of `max_age`.
        prompts: prompts of questions, if `rollout_func` or an environment makes them.

    Raises:
        TypeError: `args` is no ExGRPOConfig, or `train_dataset` no `datasets.Dataset`.
        ValueError: an option or argument excludes replay; the message names it and the remedy. No model is loaded then.
    """

    train_dataset: Any  # of TRL

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        rows = check_arguments(dict(zip(inspect.signature(GRPOTrainer).parameters, args, strict=False)) | kwargs)
        super().__init__(*args, **kwargs)
        if len(rows) < len(self.train_dataset):
            if self.accelerator.is_main_process:
                print(f"train_dataset: {len(self.train_dataset)} rows, {len(rows)} questions", flush=True)
            self.train_dataset = self.train_dataset.select(rows)
        self.replay = Replay(self.args.method, len(self.train_dataset), self.args.seed)
        micro_batches = self.args.steps_per_generation * self.num_iterations
        self.importance_weighting = ImportanceWeighting(
            self.args.method,
            lambda rows: self.replay.rescored(rows, self._scores(rows, self.temperature).log_prob),
            one_update=self.args.gradient_accumulation_steps % micro_batches == 0,
        )
        self.generation = 0
        self.prompts = Prompts()
        self._rollout_func: Any = self.rollout_func
        self.rollout_func: Any = self._rollout_func and self._roll_out
        # While a generation is made:
        self._questions: list[int] = []  # question of each row of this process
        self._stored: dict[int, list[int]] = {}  # tokens of stored answers, by row of this process
        self._rewards = np.empty(0)  # rewards of all rows of all processes
        self._mixed = False  # True if a stored answer replaces a fresh one on any process
        # While it is trained on:
        self._replays = False  # True if it has replayed answers
        self._rows = math.nan  # mean rows per micro-batch, without padding rows

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        if self.generation == 0 and (started := start_replay(self)) and self.accelerator.is_main_process:
            print(started, flush=True)
        samples, processes = self.num_generations, self.accelerator.num_processes
        questions = len(inputs) * processes // samples
        multiple = processes // math.gcd(processes, samples)
        plan = plan_generation(self.replay, questions, self.generation, multiple)
        stored = self.replay.select(plan.groups, self._mean_scores)
        output, batch = self._answer(plan.groups, stored)
        batch = self._refilled(batch, questions, multiple)
        report = self.replay.store(batch, self.generation)
        left_out = np.isin(batch.question, list(plan.fillers)) & self.replay.settles
        among = np.flatnonzero(~left_out)
        refills = self.args.refills > 0
        if refills and not batch.has_signal[among].any():  # micro-batches stay as small as they were planned
            among = among[:questions]
        refilled = batch.groups - len(plan.groups)
        batch = self.replay.settle(batch, questions, self.generation, among=among, refilled=refills)
        output = self._trained_batch(output, batch, len(plan.groups))
        self.generation += 1
        if report.note and self.accelerator.is_main_process:
            warnings.warn(report.note, stacklevel=2)
        self._log_experience(report.pass_rate, int(batch.replayed.sum()), refilled)
        self.control.should_training_stop |= self.replay.finished
        return output

    def _refilled(self, batch: StepBatch, questions: int, multiple: int) -> StepBatch:
        """Append groups of further questions to the batch while too few groups have a gradient."""
        for _ in range(self.args.refills):
            more = self.replay.refill(batch, questions, self.generation, multiple)
            if not more:
                break
            with uncounted(self):
                _, further = self._answer(more, self.replay.select(more, self._mean_scores), late=True)
            batch = batch.append_groups(further)
        return batch

    def _answer(
        self, groups: Sequence[PlannedGroup], stored: StepBatch, *, late: bool = False
    ) -> tuple[dict[str, Tensor], StepBatch]:
        """Return TRL's batch of K rows per planned group, and the graded answers of all processes.

        With `late`, they join TRL's batch of an earlier call, which lacks their importance ratios: these become
        factors.
        """
        place = placed(groups, stored, self.num_generations)
        self._mixed = bool((place >= 0).any())
        of_row = np.repeat([group.question for group in groups], self.num_generations)
        rows = len(of_row) // self.accelerator.num_processes
        first = self.accelerator.process_index * rows
        mine = np.flatnonzero((place >= first) & (place < first + rows))
        self._stored = {int(place[i]) - first: stored.token[stored.at(i)].tolist() for i in mine.tolist()}
        self._questions = of_row[first : first + rows].tolist()
        if self._mixed and (self.tools or self.environment_factories):  # by a user's own `compose` function
            raise ValueError(in_place_of_turns("tools, environment_factory", self.args.compose))
        output = super()._generate_and_score_completions([self.train_dataset[one] for one in self._questions])
        if "old_per_token_logps" not in output:
            output["old_per_token_logps"] = self._log_probs(output)
        written = self._written(output, first)
        if late and "importance_sampling_ratio" in output:
            mask = output["completion_mask"].bool()
            written["factor"] = output["importance_sampling_ratio"].expand(mask.shape)[mask].float().cpu().numpy()
        if self.rollout_func is not None or self.environment_factories is not None:
            prompts = zip(self._questions, output["prompt_ids"], output["prompt_mask"], strict=True)
            asked = [(question, ids[mask.bool()].tolist()) for question, ids, mask in prompts]
            self.prompts.learn(pair for pairs in gather_object([asked]) for pair in pairs)
        parts = gather_object([written])
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return output, StepBatch(stored.question, **columns).append_rows(stored)

    def _written(self, output: dict[str, Tensor], first: int) -> dict[str, np.ndarray]:
        """Return this process's fresh answers as columns of a batch; answers masked by TRL have no tokens."""
        rows = np.array([i for i in range(len(output["completion_ids"])) if i not in self._stored], np.int64)
        names = ("completion_ids", "completion_mask", "old_per_token_logps")
        ids, mask, log_probs = (output[name].cpu()[rows] for name in names)
        own = output["tool_mask"].cpu()[rows] if "tool_mask" in output else torch.ones_like(mask)
        inside, length = mask.bool(), mask.sum(1).numpy()
        last = ids.numpy()[np.arange(len(rows)), length - 1]
        return {
            "group": (first + rows) // self.num_generations,
            "length": length,
            "finished": np.isin(last, self.eos_token_ids) & (length > 0),
            "reward": self._rewards[first + rows],
            "penalty": np.zeros(len(rows)),
            "step": np.full(len(rows), self.generation),
            "token": ids[inside].numpy(),
            "response_mask": own[inside].bool().numpy(),
            "old_log_prob": log_probs[inside].float().numpy(),
        }

    def _trained_batch(self, output: dict[str, Tensor], batch: StepBatch, planned: int) -> dict[str, Tensor]:
        """Return this process's share of the training batch, from TRL's batch of the first `planned` groups."""
        samples, steps = self.num_generations, self.args.steps_per_generation
        index, processes = self.accelerator.process_index, self.accelerator.num_processes
        place = places(batch, planned, samples)
        given = self.accelerator.gather(output["advantages"]).cpu().numpy()
        mixed_advantages(batch, place, given, self.replay.options)
        batch.fill(ratio_log_prob=batch.old_log_prob.copy())
        self.importance_weighting(batch)
        rows = batch.rows_of(batch.trained)
        self._replays = bool(batch.replayed[rows].any())
        # TRL splits a process's rows into equal micro-batches, and gathers metrics of all processes row by row.
        per_process = len(output["advantages"])
        dealt = deal(rows, place, per_process, processes)
        size = steps * max(1, math.ceil(max(map(len, dealt)) / steps))
        # Means over the rows or tokens of a generation must not count padding rows. (bnpo is a mean over the unmasked
        # tokens of each micro-batch, so it needs no correction.)
        self._rows = max(1, len(rows)) / (processes * steps)
        output["num_items_in_batch"] = torch.full_like(output["num_items_in_batch"], int(batch.num_tokens[rows].sum()))
        mine = dealt[index]
        return rebuild(output, batch.take(mine), place[mine] - index * per_process, size, self._collate)

    def _generate_single_turn(
        self, prompt_ids: list, images: Any, multimodal_fields: dict[str, Any], num_generations: int, **kwargs: Any
    ) -> tuple[list, list | None]:
        """Generate as TRL does, but only for fresh rows."""
        if self.model.training and images:  # within messages, or given by a tool
            raise ValueError(IMAGES)
        generate = super()._generate_single_turn
        if not (self.model.training and self._mixed):
            return generate(prompt_ids, images, multimodal_fields, num_generations, **kwargs)
        rows = self._fresh_rows(len(prompt_ids))
        fields = {name: [values[i] for i in rows] for name, values in multimodal_fields.items()}
        completions, log_probs = generate([prompt_ids[i] for i in rows], images, fields, 1, **kwargs)
        # TRL takes None as an unknown sampling probability, with importance weight 1.
        return with_stored(rows, completions, self._stored), log_probs and with_stored(rows, log_probs, self._unknown())

    def _roll_out(self, prompts: list, trainer: Any) -> dict[str, Any]:
        """Call the user's rollout function, but only for fresh rows."""
        if not (self.model.training and self._mixed):
            return self._rollout_func(prompts, trainer)
        rows = self._fresh_rows(len(prompts))
        given = dict(self._rollout_func([prompts[i] for i in rows], trainer))
        if extra := sorted(given.keys() - {"prompt_ids", "completion_ids", "logprobs", "env_mask"}):
            raise ValueError(
                f"rollout_func: returns {', '.join(extra)} for rewards, which stored answers in the places of fresh "
                f"ones lack; instead of compose={self.args.compose!r} use one that adds stored answers, as 'appended'"
            )
        prompt_ids = dict(zip(self._stored, self._prompt_ids([self._questions[i] for i in self._stored]), strict=True))
        output = {
            "prompt_ids": with_stored(rows, given["prompt_ids"], prompt_ids),
            "completion_ids": with_stored(rows, given["completion_ids"], self._stored),
            "logprobs": given["logprobs"] and with_stored(rows, given["logprobs"], self._unknown()),
        }
        if given.get("env_mask") is not None:  # the mask of stored answers is added with the batch
            ones = {i: [1] * len(ids) for i, ids in self._stored.items()}
            output["env_mask"] = with_stored(rows, given["env_mask"], ones)
        return output

    def _unknown(self) -> dict[int, list[None]]:
        return {i: [None] * len(ids) for i, ids in self._stored.items()}

    def _fresh_rows(self, count: int) -> list[int]:
        """Return the rows of this process to generate, padded to the same number on all processes, as TRL requires."""
        fresh = [i for i in range(count) if i not in self._stored]
        most = int(self.accelerator.gather(torch.tensor([len(fresh)], device=self.accelerator.device)).max())
        return [*fresh, *([0] * (most - len(fresh)))]

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        of_function = super()._calculate_rewards(*args, **kwargs)
        self._rewards = (of_function * self.reward_weights.to(of_function.device)).nansum(1).double().cpu().numpy()
        return of_function

    def _log_probs(self, batch: dict[str, Tensor], *, entropy: bool = False) -> Any:
        """Return [N, C] log-probs of the completions under the current policy; with `entropy`, also entropies."""
        with torch.no_grad():
            log_probs, entropies, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
                torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
                batch["completion_ids"].shape[1],
                batch_size=self.args.per_device_train_batch_size,
                compute_entropy=entropy,
            )
        return (log_probs, entropies) if entropy else log_probs

    def _objective(self, inputs: dict[str, Any]) -> PolicyLossInputs:
        objective = super()._objective({**inputs, "tool_mask": inputs["response_mask"]})
        term = self.importance_weighting.term
        clip = objective.clip if self.args.clip_with_replay or term == "clipped" or not self._replays else None
        replayed = None if term == "clipped" else inputs["replayed"]
        return objective._replace(
            replayed=replayed, beta=self.args.replay_beta if term == "shaped" else None, clip=clip
        )

    def _mean_rows(self, inputs: dict[str, Any]) -> float:
        return self._rows

    def _mean_scores(self, candidates: StepBatch) -> MeanScores:
        # Selection is defined at temperature 1.
        return MeanScores.from_scores(candidates, self._scores(candidates, 1.0))

    def _scores(self, batch: StepBatch, temperature: float) -> Score:
        """Return scores of a batch's tokens under the current policy, and store them in it, on all processes."""
        count, size = self.accelerator.num_processes, self.args.per_device_train_batch_size
        longest_first = np.argsort(-batch.length, kind="stable")
        # All processes make the same number of passes, because a pass gathers parameters collectively.
        dealt = np.append(longest_first, np.repeat(longest_first[:1], -len(batch) % count))
        mine = dealt[self.accelerator.process_index :: count]
        passes = []
        for start in range(0, len(mine), size):
            rows = mine[start : start + size]
            inputs = self._collate(batch.take(rows))
            with at_temperature(self._causal_lm(self.model), temperature):
                both = self._log_probs(inputs, entropy=True)
            passes.append((rows, *(values[inputs["completion_mask"].bool()].float().cpu().numpy() for values in both)))
        for rows, log_prob, entropy in gather_object(passes):
            batch.put(rows, log_prob=log_prob, entropy=entropy)
        return Score(batch.log_prob, batch.entropy)

    def _collate(self, batch: StepBatch) -> dict[str, Tensor]:
        questions = batch.question[batch.group].tolist()
        sides = {
            "prompt": ([torch.tensor(ids) for ids in self._prompt_ids(questions)], "left"),
            "completion": ([torch.from_numpy(batch.token[batch.at(i)]).long() for i in range(len(batch))], "right"),
        }
        inputs = {}
        for name, (ids, side) in sides.items():
            whole = {"padding_side": side, "pad_to_multiple_of": self.pad_to_multiple_of}
            inputs[f"{name}_ids"] = pad(ids, padding_value=self._tokenizer.pad_token_id, **whole)
            inputs[f"{name}_mask"] = pad([torch.ones_like(one) for one in ids], padding_value=0, **whole)
        return {name: tensor.to(self.accelerator.device) for name, tensor in inputs.items()}

    def _prompt_ids(self, questions: Sequence[int]) -> list[list[int]]:
        known = dict(self.prompts.ids)
        if lacking := [question for question in dict.fromkeys(questions) if question not in known]:
            prompts, _, _ = self._tokenize_prompts([self.train_dataset[question]["prompt"] for question in lacking])
            known.update(zip(lacking, prompts, strict=True))
        return [known[question] for question in questions]

    def _log_experience(self, pass_rate: float, replayed: int, refilled: int) -> None:
        memory = self.replay.memory
        numbers = {
            "pass_rate": pass_rate,
            "replayed": replayed,
            "refilled": refilled,
            "replay_open": float(self.replay.open),
            "buffer_questions": len(memory),
            "buffer_trajectories": len(memory.table),
            "retired": int(memory.retired.sum()),
        }
        for name, value in numbers.items():
            self._metrics["train"][f"experience/{name}"].append(value)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.args.should_save:  # before TRL's state, so that a checkpoint with that state is complete
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            save_replay(folder / EXPERIENCE, self.replay, self.generation, self.prompts.ids)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.generation, prompts = load_replay(Path(checkpoint) / EXPERIENCE, self.replay)
            self.prompts.ids = {question: ids.tolist() for question, ids in prompts.items()}
