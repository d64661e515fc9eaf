"""The card of an exported experience: what a hub reads at its head, and what a person should know."""

from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from exgrpo.train.experience_data.of_run import RunExperience
from exgrpo.train.hub import installed

SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M")
"""The hub's names of sizes, each ten times the one before."""
PACKAGES = ("exgrpo", "torch", "transformers", "deepspeed")
COLUMNS = {
    "question": "text of the question",
    "prompt_ids": "token ids of its prompt, as the model reads it",
    "answer": "its right answer",
    "source": "data set that the question comes from",
    "response_ids": "token ids of the answer, with the token that ends it",
    "response": "text of the answer, without what ends it",
    "log_prob": "log-probs of these tokens under the policy that wrote them, at the rollout temperature",
    "written": "whether the policy wrote each token, or an environment, whose tokens have log-probs of 0; empty: the "
    "policy wrote all of them",
    "behaviour": "who computed them: the trainer, before the update of that step, or the rollout engine, in sampling; "
    "unknown: nobody, and they are 0",
    "model": "where the policy began; together with the step it names the policy that wrote the answer",
    "finished": "whether the answer ended by itself and was not cut at the length limit",
    "reward": "what the verifier gave",
    "step": "training step in which it was written",
    "advantage": "in the group that it was written in",
    "group_successes": "successes among the answers of that group that count",
    "group_answers": "number of those answers; 0: not known",
    "replays": "how often it was replayed",
    "key": "hash of the solution that it gives: answers that differ only in form have the same one; 0: none",
}


def card(experience: RunExperience, schema: pa.Schema) -> str:
    """The text of README.md."""
    head = yaml.safe_dump(_head(experience, schema), sort_keys=False, allow_unicode=True)
    columns = "\n".join(f"| {name} | {COLUMNS[name]} |" for name in schema.names)
    facts = "\n".join(f"- {name}: {value}" for name, value in _facts(experience).items())
    return f"""---
{head}---

# Experience of a reinforcement learning run

Answers of a language model to questions whose answers can be verified, as a run of exgrpo has stored them for replay
(ExGRPO, arXiv 2510.02245). Such a buffer is a selection: by default it has successes alone, and no questions that the
model already solves.

{facts}

| column | meaning |
|---|---|
{columns}

Another run begins with it by `--experience.start FOLDER`. The licence of the questions is that of their sources, and
the licence of the model may bind what is done with its answers.
"""


def size_category(rows: int) -> str:
    """The hub's name for a data set of so many rows."""
    return SIZES[min(len(SIZES) - 1, max(0, len(str(rows)) - 3))]


def _head(experience: RunExperience, schema: pa.Schema) -> dict[str, Any]:
    return {
        "license": "unknown",
        "pretty_name": "Experience of a reinforcement learning run",
        "size_categories": [size_category(len(experience))],
        "tags": ["exgrpo", "rlvr", "grpo", "reinforcement-learning", "experience-replay"],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*"}]}],
        "dataset_info": {"features": [_feature(field) for field in schema]},
    }


def _feature(field: pa.Field) -> dict[str, str]:
    if pa.types.is_list(field.type):
        return {"name": field.name, "list": _dtype(field.type.value_type)}
    return {"name": field.name, "dtype": _dtype(field.type)}


def _dtype(kind: pa.DataType) -> str:
    return {"float": "float32", "double": "float64"}.get(str(kind), str(kind))


def _facts(experience: RunExperience) -> dict[str, object]:
    config, arrays = experience.config, experience.arrays
    return {
        "model": config.policy.path,
        "questions": ", ".join(config.data.train),
        "reward": config.reward.function or "that of each source",
        "training step": experience.step,
        "seed of the run": config.seed,
        "answers per question": config.rollout.samples,
        "rollout temperature": config.rollout.temperature,
        "stored answers": len(experience),
        "questions with stored answers": len(np.unique(experience.columns["question"])),
        "questions of the run": len(arrays["count"]),
        "questions that have left, since all fresh answers were right": int(arrays["retired"].sum()),
        "tokens of the answers": int(experience.columns["length"].sum()),
        "versions": installed(*PACKAGES),
    }
