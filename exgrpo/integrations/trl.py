"""ExGRPO (arXiv 2510.02245) as a trainer of TRL.

K answers per question (`num_generations`), B questions per generation (`generation_batch_size / K`), C completion
tokens, N rows of this process.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exgrpo.extras import needs
from exgrpo.integrations.trl_loss import FusedLossMixin, Objective, at_temperature

with needs(__name__, "exgrpo[train]", "trl>=1.16,<2"):
    import numpy as np
    from accelerate.utils import gather_object
    from datasets import Dataset
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import pad

    from exgrpo.integrations.trl_replay import load_replay, plan_generation, save_replay
    from exgrpo.train.config import ExperienceConfig, ObjectiveConfig, RewardConfig, Section
    from exgrpo.train.experience import MeanScore, Replay
    from exgrpo.train.records import Group, Trajectory

__all__ = ["ExGRPOConfig", "ExGRPOTrainer", "FusedLossMixin"]

EXPERIENCE = "experience"
"""Folder of the experience in a checkpoint."""


def _of_recipe(section: type[Section], name: str) -> Any:
    of_recipe = section.model_fields[name]
    return field(default=of_recipe.default, metadata={"help": of_recipe.description})


_experience = partial(_of_recipe, ExperienceConfig)


@dataclass
class ExGRPOConfig(GRPOConfig):
    """GRPOConfig with the options of experience replay, which are named as in the recipes of `exgrpo.train`.

    Its defaults are the paper's: loss type dr_grpo, advantages that are not scaled, an entropy bonus of 0.001.

    Raises:
        ValueError: an option of the replay is out of its range; the message names it.
    """

    loss_type: str = field(default="dr_grpo", metadata={"help": "dr_grpo, dapo, bnpo or grpo."})
    scale_rewards: str = field(default="none", metadata={"help": "none, group or batch."})
    entropy_coef: float = field(default=0.001, metadata={"help": "Weight of the mean token entropy bonus."})
    ratio: float = _experience("ratio")
    start_pass_rate: float = _experience("start_pass_rate")
    question_weight: str = _experience("question_weight")
    mu: float = _experience("mu")
    sigma: float = _experience("sigma")
    trajectory: str = _experience("trajectory")
    count_replayed: bool = _experience("count_replayed")
    retire: bool = _experience("retire")
    bucket_by: str = _experience("bucket_by")
    max_per_question: int | None = _experience("max_per_question")
    max_age: int | None = _experience("max_age")
    success: float = _of_recipe(RewardConfig, "success")
    clip_with_replay: bool = _of_recipe(ObjectiveConfig, "clip_with_replay")
    replay_beta: float | None = field(default=0.1, metadata={"help": ObjectiveConfig.model_fields["beta"].description})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replay_beta is not None and self.replay_beta <= 0:
            raise ValueError(f"replay_beta: expected a number above 0 or None, got {self.replay_beta}")
        if not math.isfinite(self.success):
            raise ValueError(f"success: expected a finite number, got {self.success}")
        _ = self.experience

    @property
    def experience(self) -> ExperienceConfig:
        """The options of the experience as a section of a recipe."""
        return ExperienceConfig(**{name: getattr(self, name) for name in ExperienceConfig.model_fields})


class ExGRPOTrainer(FusedLossMixin, GRPOTrainer):
    """GRPOTrainer that replays earlier successes beside fresh answers.

    Takes the arguments of `trl.GRPOTrainer` except `rollout_func`, `tools` and `environment_factory`. An answer is a
    success if the sum of its weighted rewards is at least `success` (see `bucket_by` for continuous rewards); where no
    answer is one, or every one, although rewards differ, a warning says so. The data loader only says how many steps
    there are: which rows of `train_dataset` make a generation is decided by the experience, so that questions give way
    to replayed ones and solved ones leave. Training stops once all are solved.

    Attributes:
        replay: what is stored, which questions are solved, and whether replay has begun.
        generation: number of generations taken in so far. What is a training step to `exgrpo.train` is one here, so
            this is the step of a trajectory, and what `max_age` counts.

    Raises:
        TypeError: `args` is no ExGRPOConfig, or `train_dataset` no `datasets.Dataset`.
        ValueError: an option or argument excludes replay; the message names it and the remedy.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check()
        self.replay = Replay(
            self.args.experience,
            len(self.train_dataset),
            self.num_generations,
            self.args.seed,
            success=self.args.success,
        )
        self.generation = 0
        self._stored: dict[int, Trajectory] = {}  # by row of this process, while a generation is made
        self._rewards = np.empty(0)  # of all rows of all processes in that generation
        self._mixed = False  # whether any process has a replayed row in it

    def _check(self) -> None:
        if not isinstance(self.args, ExGRPOConfig):
            raise TypeError(f"args: expected an ExGRPOConfig, got {type(self.args).__name__}")
        if not isinstance(self.train_dataset, Dataset):
            raise TypeError(
                f"train_dataset: expected a datasets.Dataset, got {type(self.train_dataset).__name__}: experience "
                "belongs to questions by index; a streamed one can be made a Dataset by Dataset.from_generator"
            )
        questions = self.args.generation_batch_size // self.num_generations
        if len(self.train_dataset) < questions:
            raise ValueError(
                f"train_dataset: a generation takes {questions} different questions and there are "
                f"{len(self.train_dataset)}; lower generation_batch_size"
            )
        if self.rollout_func is not None or self.tools or self.environment_factories is not None:
            raise ValueError(
                "rollout_func, tools, environment_factory: replay stores answers of one turn; use GRPOTrainer with "
                "FusedLossMixin for these"
            )
        if {"image", "images"} & set(self.train_dataset.column_names):
            raise ValueError("train_dataset: has images, and replay is of text; use GRPOTrainer with FusedLossMixin")
        if truncated := self._truncated_sampling():
            raise ValueError(
                f"{', '.join(truncated)}: importance ratios compare probabilities under the whole distribution; leave "
                "it at its default, and lower temperature for likelier answers"
            )
        if beyond := self._beyond_kernel():
            raise ValueError(f"{', '.join(beyond)}: not part of the objective with replay; leave it at its default")

    def _truncated_sampling(self) -> list[str]:
        """The options, with their values, by which answers are not sampled from the whole distribution."""
        whole = {"top_p": (None, 1), "top_k": (None, 0, -1), "min_p": (None, 0)}
        given = {name: getattr(self.args, name) for name in whole} | (self.args.generation_kwargs or {})
        return [f"{name}={given[name]}" for name, values in whole.items() if given[name] not in values]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        samples, first = self.num_generations, self.accelerator.process_index * len(inputs)
        plan = plan_generation(self.replay, len(inputs) * self.accelerator.num_processes // samples)
        chosen = [one.trajectory for one in self.replay.select(plan.replayed, self._score)]
        self._mixed = len(chosen) > 0
        questions = plan.questions
        # The last answer of a question that is replayed is the stored one.
        stored = {(len(plan.fresh) + i) * samples + samples - 1: row for i, row in enumerate(chosen)}
        self._stored = {i: stored[first + i] for i in range(len(inputs)) if first + i in stored}
        of_row = np.repeat(questions, samples)[first : first + len(inputs)].tolist()
        output = super()._generate_and_score_completions([self.train_dataset[question] for question in of_row])
        if "old_per_token_logps" not in output:
            output["old_per_token_logps"] = self._log_probs(output)
        written = gather_object(self._written(output, of_row, first))
        groups = [
            Group(question, tuple(row for row in written[end - samples : end] if row), stored.get(end - 1))
            for question, end in zip(questions, range(samples, len(written) + 1, samples), strict=True)
        ]
        taken_in = self.replay.take_in(groups, self.generation)
        self.generation += 1
        if taken_in.note and self.accelerator.is_main_process:
            warnings.warn(taken_in.note, stacklevel=2)
        self._log_experience(taken_in.pass_rate, chosen)
        self._put_stored(output)
        self.control.should_training_stop |= self.replay.finished
        return output

    def _generate_single_turn(
        self, prompt_ids: list, images: Any, multimodal_fields: dict[str, Any], num_generations: int, **kwargs: Any
    ) -> tuple[list, list | None]:
        """TRL's, without generating for rows that are replayed."""
        generate = super()._generate_single_turn
        if not (self.model.training and self._mixed):
            return generate(prompt_ids, images, multimodal_fields, num_generations, **kwargs)
        fresh = [i for i in range(len(prompt_ids)) if i not in self._stored]
        most = int(self.accelerator.gather(torch.tensor([len(fresh)], device=self.accelerator.device)).max())
        # Processes generate together, so all do the same number of rows.
        rows = [*fresh, *([0] * (most - len(fresh)))]
        fields = {name: [values[i] for i in rows] for name, values in multimodal_fields.items()}
        completions, log_probs = generate([prompt_ids[i] for i in rows], images, fields, 1, **kwargs)
        by_row = dict(zip(fresh, completions, strict=False))
        by_row |= {i: row.response.tolist() for i, row in self._stored.items()}
        completions = [by_row[i] for i in range(len(prompt_ids))]
        if log_probs is not None:
            # To TRL None is a token whose sampling probability is unknown: its importance weight is 1.
            by_row = {i: [None] * len(ids) for i, ids in enumerate(completions)}
            by_row |= dict(zip(fresh, log_probs, strict=False))
            log_probs = [by_row[i] for i in range(len(prompt_ids))]
        return completions, log_probs

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        of_function = super()._calculate_rewards(*args, **kwargs)
        self._rewards = (of_function * self.reward_weights.to(of_function.device)).nansum(1).double().cpu().numpy()
        return of_function

    def _log_probs(self, batch: dict[str, Tensor], *, entropy: bool = False) -> Any:
        """[N, C] log-probs of the completions under the current policy; with `entropy`, entropies too."""
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

    def _written(self, output: dict[str, Tensor], questions: Sequence[int], first: int) -> list[Trajectory | None]:
        """The fresh answers of this process, by row; None where a row is replayed."""
        lengths = output["completion_mask"].sum(1).tolist()
        ids, log_probs = output["completion_ids"].cpu().numpy(), output["old_per_token_logps"].float().cpu().numpy()
        rows: list[Trajectory | None] = []
        for i, (question, length) in enumerate(zip(questions, lengths, strict=True)):
            row = Trajectory(
                question=question,
                response=ids[i, :length].astype(np.int32),
                log_prob=log_probs[i, :length].astype(np.float32),
                finished=length > 0 and int(ids[i, length - 1]) in self.eos_token_ids,
                # What mask_truncated_completions leaves out has no token to learn from.
                reward=float(self._rewards[first + i]) if length else 0.0,
                step=self.generation,
            )
            rows.append(None if i in self._stored else row)
        return rows

    def _put_stored(self, output: dict[str, Tensor]) -> None:
        """Give replayed rows the log-probs of the policy that wrote them, and mark them."""
        mask = output["completion_mask"]
        replayed = torch.zeros(len(mask), dtype=torch.bool, device=mask.device)
        for i, row in self._stored.items():
            replayed[i] = True
            output["old_per_token_logps"][i, : len(row.log_prob)] = torch.from_numpy(row.log_prob).to(mask.device)
        output["replayed"] = replayed
        # TRL's entropies and clip ratios are means over the tokens that this mask leaves: the fresh ones.
        output["tool_mask"] = torch.ones_like(mask) * ~replayed[:, None]

    def _objective(self, inputs: dict[str, Any]) -> Objective:
        objective = super()._objective({name: value for name, value in inputs.items() if name != "tool_mask"})
        clip = objective.clip if self.args.clip_with_replay or not self._mixed else None
        return objective._replace(replayed=inputs["replayed"], beta=self.args.replay_beta, clip=clip)

    def _score(self, trajectories: Sequence[Trajectory]) -> list[MeanScore]:
        """Mean entropy and negative log-prob of each trajectory under the current policy, on all processes.

        Trajectories are compared at temperature 1, whatever the temperature of sampling.
        """
        count, size = self.accelerator.num_processes, self.args.per_device_train_batch_size
        longest_first = sorted(range(len(trajectories)), key=lambda i: -len(trajectories[i].response))
        # Every process makes as many passes: they gather parameters together.
        dealt = longest_first + longest_first[:1] * (-len(longest_first) % count)
        mine = dealt[self.accelerator.process_index :: count]
        scores: list[tuple[int, float, float]] = []
        for start in range(0, len(mine), size):
            batch = self._collate([trajectories[i] for i in mine[start : start + size]])
            with at_temperature(self._causal_lm(self.model), 1.0):
                log_prob, entropy = self._log_probs(batch, entropy=True)
            tokens = batch["completion_mask"].sum(1)
            means = torch.stack([entropy.sum(1) / tokens, -log_prob.sum(1) / tokens], dim=1).tolist()
            scores += [(i, *of_row) for i, of_row in zip(mine[start : start + size], means, strict=True)]
        by_index = {i: MeanScore(entropy, nll) for i, entropy, nll in gather_object(scores)}
        return [by_index[i] for i in range(len(trajectories))]

    def _collate(self, rows: Sequence[Trajectory]) -> dict[str, Tensor]:
        prompts, _, _ = self._tokenize_prompts([self.train_dataset[row.question]["prompt"] for row in rows])
        sides = {
            "prompt": ([torch.tensor(ids) for ids in prompts], "left"),
            "completion": ([torch.from_numpy(row.response).long() for row in rows], "right"),
        }
        batch = {}
        for name, (ids, side) in sides.items():
            batch[f"{name}_ids"] = pad(ids, padding_value=self._tokenizer.pad_token_id, padding_side=side)
            batch[f"{name}_mask"] = pad([torch.ones_like(one) for one in ids], padding_value=0, padding_side=side)
        return {name: tensor.to(self.accelerator.device) for name, tensor in batch.items()}

    def _log_experience(self, pass_rate: float, chosen: Sequence[Trajectory]) -> None:
        memory = self.replay.memory
        numbers = {
            "pass_rate": pass_rate,
            "replayed": len(chosen),
            "replay_open": float(self.replay.latch.open),
            "buffer_questions": len(memory),
            "buffer_trajectories": memory.trajectory_count,
            "retired": int(memory.retired.sum()),
        }
        for name, value in numbers.items():
            self._metrics["train"][f"experience/{name}"].append(value)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.args.should_save:  # first, so that a checkpoint with a trainer state has its experience
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            save_replay(folder / EXPERIENCE, self.replay, self.generation)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.generation = load_replay(Path(checkpoint) / EXPERIENCE, self.replay)
