"""Write model folders of a run in Hugging Face format, with model cards.

A folder appears only when it is complete. Its card is README.md with the metadata that the hub reads.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from exgrpo.train.checkpoint.listing import DELETED, UNFINISHED
from exgrpo.train.common.distributed import agree
from exgrpo.train.common.durable import flush, flush_tree
from exgrpo.train.common.errors import OutputError, os_errors_as
from exgrpo.train.config.hub import installed
from exgrpo.train.config.options import Config, held_out_sets
from exgrpo.train.config.policy import on_hub
from exgrpo.train.config.rollout import TEST
from exgrpo.train.data.files import SUFFIXES, from_hub
from exgrpo.train.metrics.run_log import GO_ON
from exgrpo.train.policy.policy import Policy

MODEL, BEST, EXPORTS = "model", "best", "exports"
"""Folders in a run's folder: the trained model, the best one, and exports of earlier steps."""
PACKAGES = ("exgrpo", "torch", "transformers", "peft", "deepspeed")
NO_SCORES = "The run has made no evaluation after this step."


def export_folder(run: Path, step: int) -> Path:
    """Return the folder for the model after `step` training steps."""
    return run / EXPORTS / f"step_{step:08d}"


def uploads(run: Path) -> dict[str, Path]:
    """Return the model folders of a finished run by their paths in a repository, for `upload`."""
    return {".": run / MODEL} | ({BEST: run / BEST} if (run / BEST).is_dir() else {})


def write_model(folder: Path, policy: Policy, tokenizer: Any, card: ModelCard) -> None:
    """Write the model, or its adapters, with tokenizer and card; a collective call.

    An earlier model in the folder is deleted once the new one is complete.

    Raises:
        OutputError: on every rank, if it cannot be written.
    """
    work, before = (folder.with_name(folder.name + end) for end in (UNFINISHED, DELETED))

    def write() -> None:
        with os_errors_as(OutputError, f"{folder} cannot be written", GO_ON):
            if policy.world.is_main:
                for remains in (work, before):  # old files must not mix with new ones: adapters with a model
                    shutil.rmtree(remains, ignore_errors=True)
            policy.save(work)
            if policy.world.is_main:
                tokenizer.save_pretrained(work)
                card.save(work / "README.md")
                flush_tree(work)
                if folder.exists():
                    folder.replace(before)
                work.replace(folder)
                flush(folder.parent)
                shutil.rmtree(before, ignore_errors=True)

    agree(policy.world, write)


class Cards:
    """Writes the model cards of a run. It is made at the start, since it checks which files exist."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.sets = held_out_sets(config)
        path = config.policy.path
        self.base_on_hub = on_hub(path)
        self.base = _short(path) if Path(path).expanduser().exists() else path
        self.hub_sets = [source.partition(":")[0] for source in config.data.train if from_hub(source)]

    def card(self, step: int, found: Mapping[str, float]) -> ModelCard:
        """Return the card of the model after `step` training steps; an evaluation of another step is ignored."""
        found = found if found.get("step") == step else {}
        config = self.config
        adapters = bool(config.lora.rank) and config.lora.result == "adapters"
        head = ModelCardData(
            base_model=self.base if self.base_on_hub else None,
            datasets=self.hub_sets or None,
            library_name="peft" if adapters else "transformers",
            model_name=f"{self.base} after {step} steps",
            pipeline_tag="text-generation",
            tags=["exgrpo", "grpo", "rlvr", "reinforcement-learning", *(["lora"] if config.lora.rank else [])],
        )
        facts = "\n".join(f"- {name}: {value}" for name, value in self._facts(step).items())
        return ModelCard(f"""---
{head.to_yaml()}
---

# {self.base} after {step} steps of reinforcement learning

{"LoRA adapters for a" if adapters else "A"} language model, trained by exgrpo on questions with answers to verify.

{facts}

## Held-out questions

{self._table(found)}
""")

    def _facts(self, step: int) -> dict[str, object]:
        config, replay = self.config, self.config.experience
        method = "GRPO on fresh answers alone"
        if replay.ratio:
            method = (
                f"GRPO with experience replay (experience.ratio={replay.ratio:g}, compose={_short(replay.compose)}, "
                f"prioritise={_short(replay.prioritise)}, objective.weigh={_short(config.objective.weigh)})"
            )
        if replay.repeat:
            method += f", asking questions again (experience.repeat={replay.repeat:g}, prefix={replay.prefix})"
        adapters = {"rank of the adapters": config.lora.rank} if config.lora.rank else {}
        # Stop strings are no EOS tokens of the model: users of the model have to set them.
        stop = {"strings that end an answer": ", ".join(f"`{string!r}`" for string in config.common_stop)}
        return {
            "base model": self.base,
            "method": method,
            "training questions": self._named(config.data.train),
            "reward": _short(config.reward.function or "that of each source"),
            "training steps": step,
            "questions per step": config.questions,
            "answers per question": config.rollout.samples,
            "learning rate": f"{config.optimizer.lr:g}",
            **adapters,
            **(stop if config.common_stop else {}),
            "seed": config.seed,
            "versions": installed(*PACKAGES),
        }

    @staticmethod
    def _named(sources: tuple[str, ...]) -> str:
        return ", ".join(_short(source) if Path(source).suffix in SUFFIXES else source for source in sources)

    def _table(self, found: Mapping[str, float]) -> str:
        columns = ("set", "questions", "answers per question", "temperature", "Pass@1", "95 % interval")
        lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for name, asked in self.sets.items():
            if f"{name}/pass_rate" in found:
                heading = "held_out" if name == TEST else name
                low, high = found[f"{heading}/low"], found[f"{heading}/high"]
                lines.append(
                    f"| {name} | {self._named(asked.source)} | {asked.samples} | {asked.temperature:g} | "
                    f"{found[f'{name}/pass_rate']:.3f} | {low:.3f} to {high:.3f} |"
                )
        return "\n".join(lines) if found else NO_SCORES


def _short(place: str) -> str:
    """Return the last part of a path: cards are published, and must not have the folders of this machine."""
    return Path(place).name
