"""The folders of models that a run writes, in Hugging Face format: each is there whole, or not at all."""

import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from exgrpo.train.checkpoint.listing import DELETED, UNFINISHED
from exgrpo.train.distributed import World, agree
from exgrpo.train.errors import OutputError, os_errors_as
from exgrpo.train.metrics.run_log import GO_ON
from exgrpo.train.policy.zero3 import Policy

MODEL, BEST, EXPORTS = "model", "best", "exports"
"""Folders in that of a run: the trained model, the best one, and that of the others."""


def export_folder(run: Path, step: int) -> Path:
    """Where the model after so many steps is exported."""
    return run / EXPORTS / f"step_{step:08d}"


def write_model(folder: Path, policy: Policy, tokenizer: Any, card: ModelCard, world: World) -> None:
    """Write the model, or its adapters, with its tokenizer and its card; all ranks call it together.

    A model that was there before goes when the new one is complete.

    Raises:
        OutputError: on every rank, where it cannot be written.
    """
    work, before = (folder.with_name(folder.name + end) for end in (UNFINISHED, DELETED))

    def write() -> None:
        if world.is_main:
            for remains in (work, before):  # a folder with adapters and a model would be neither
                shutil.rmtree(remains, ignore_errors=True)
        policy.save(work)
        if world.is_main:
            tokenizer.save_pretrained(work)
            card.save(work / "README.md")
            if folder.exists():
                folder.replace(before)
            work.replace(folder)
            shutil.rmtree(before, ignore_errors=True)

    def attempt() -> None:
        try:
            with os_errors_as(OutputError, f"{folder} cannot be written"):
                write()
        except OutputError as error:
            raise OutputError(f"{error}. {GO_ON}") from error

    agree(world, attempt)
