"""Trainers of TRL on a tiny random model, the same in every process."""

from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer

from exgrpo.integrations.trl import ExGRPOConfig, ExGRPOTrainer
from exgrpo.train.data.tasks.arithmetic import MODEL_FOLDER

QUESTIONS = 12
COMPLETION = 9  # tokens at most
ACCUMULATION = 2


@lru_cache
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL_FOLDER)


def save_model(folder: Path, *, tied: bool = False, head_width: int = 8) -> None:
    torch.manual_seed(0)
    own = tokenizer()
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "head_dim": head_width, "tie_word_embeddings": tied, "initializer_range": 0.2}
    special = {"bos_token_id": own.bos_token_id, "eos_token_id": own.eos_token_id, "pad_token_id": own.pad_token_id}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(own), **shape, **more, **special)).save_pretrained(folder)


def questions() -> Dataset:
    return Dataset.from_dict({"prompt": ["What is " + "12345"[: 1 + i % 5] + f"+{i}?" for i in range(QUESTIONS)]})


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A success of about one answer in three, by its tokens alone."""
    return [float(sum(ids) % 3 == 0) for ids in completion_ids]


def options(folder: Path, **changes: Any) -> dict[str, Any]:
    device = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    quiet = {"report_to": [], "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": COMPLETION}
    return {"output_dir": str(folder), **device, **quiet, **sizes, **changes}


def grpo(kind: type[GRPOTrainer], folder: Path, model: Path, **changes: Any) -> GRPOTrainer:
    config = GRPOConfig(**options(folder, **changes))
    return kind(str(model), reward, config, questions(), processing_class=tokenizer())


class WrittenAnswers(GRPOTrainer):
    """Answers as a function of the question, of its earlier requests in the call, and of the step.

    The processes of a call are taken in order, so that their number does not matter.
    """

    asked: int = 0
    log_prob: float | None = None  # what the sampler says of every token

    def _generate_single_turn(self, prompt_ids: list, *_: Any, **__: Any) -> tuple[list, list | None]:
        self.asked += len(prompt_ids)
        earlier = gather_object([prompt_ids])[: self.accelerator.process_index]
        before: Counter = Counter(tuple(ids) for of_process in earlier for ids in of_process)
        answers = []
        for ids in prompt_ids:
            before[tuple(ids)] += 1
            seed = hash((tuple(ids), before[tuple(ids)], self.state.global_step))
            draw = torch.Generator().manual_seed(seed % 2**32)
            length = int(torch.randint(2, COMPLETION, (1,), generator=draw))
            answers.append([*torch.randint(3, 290, (length,), generator=draw).tolist(), tokenizer().eos_token_id])
        return answers, self.log_prob and [[self.log_prob] * len(answer) for answer in answers]


class WrittenExGRPO(ExGRPOTrainer, WrittenAnswers):
    """ExGRPO on written answers."""

    def _generate_and_score_completions(self, inputs: list) -> dict[str, Any]:
        self.use_vllm = self.log_prob is not None  # which says how probable what it sampled was
        return super()._generate_and_score_completions(inputs)


def exgrpo(
    folder: Path, model: Path, kind: type[ExGRPOTrainer] = WrittenExGRPO, data: Dataset | None = None, **changes: Any
) -> ExGRPOTrainer:
    changes = {"start_pass_rate": 0.0, "per_device_train_batch_size": 16, **changes}
    config = ExGRPOConfig(**options(folder, **changes))
    return kind(str(model), reward, config, data or questions(), processing_class=tokenizer())


class Outcome(NamedTuple):
    loss: Tensor
    gradient: Tensor
    metrics: dict[str, float]


def outcome(trainer: GRPOTrainer, inputs: dict[str, Tensor]) -> Outcome:
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = ACCUMULATION
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradient = torch.cat([parameter.grad.double().flatten() for parameter in trainer.model.parameters()])
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    return Outcome(loss.detach().double(), gradient, metrics)
