"""The hub of models and data sets: whether it answers, what a run uploads, and the versions that its cards name.

huggingface_hub is imported only where a run uploads: it reads the environment once, which `offline_reason` may change.
"""

import os
import queue
import shlex
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import requests

from exgrpo.train.common.errors import ConfigError, OutputError, shown

if TYPE_CHECKING:
    from exgrpo.train.config.options import OutputConfig

ENDPOINT = "https://huggingface.co"
SECONDS = 3.0
"""A hub that has not answered by then is taken for unreachable."""
WITHOUT = "or leave it out, and upload later by `hf upload`"


def offline_reason() -> str | None:
    """Why files come from the cache alone; None: the hub answers. Settles it for every library of this process.

    It has to come before transformers, datasets and huggingface_hub are imported: they read the environment once.
    """
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no", "off"):
        return "HF_HUB_OFFLINE is set"
    endpoint = os.environ.get("HF_ENDPOINT", ENDPOINT)
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
    # Looking a name up knows no time limit, so it gets a thread that nobody waits for.
    threading.Thread(target=lambda: answers.put(_answers(endpoint)), daemon=True).start()
    with suppress(queue.Empty):
        if answers.get(timeout=SECONDS):
            return None
    os.environ["HF_HUB_OFFLINE"] = "1"
    return f"{endpoint} does not answer"


def _answers(endpoint: str) -> bool:
    try:
        requests.head(endpoint, timeout=SECONDS)
    except requests.RequestException:
        return False
    return True


def check_upload(output: "OutputConfig") -> None:
    """Whether the hub will take the model: make its repository, if it is not there.

    Raises:
        ConfigError: there is no model to upload, no token, no such name, or no hub that answers.
    """
    name = output.push_to_hub
    if name is None:
        return
    if not output.save_model:
        raise ConfigError("output.push_to_hub uploads the model that output.save_model=False does not save: take True")
    if name.count("/") != 1:
        raise ConfigError(f"output.push_to_hub: {shown(name)} is not OWNER/NAME")
    if reason := offline_reason():
        raise ConfigError(f"output.push_to_hub: {reason}: see that the hub can be reached, {WITHOUT}")
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise ConfigError(f"output.push_to_hub needs a token: run `hf auth login` or set HF_TOKEN, {WITHOUT}")
    try:
        HfApi().create_repo(name, private=output.private, exist_ok=True)
    except Exception as error:  # the hub and the network fail in ways of their own
        raise ConfigError(f"output.push_to_hub: {name} cannot be made: {shown(error)}; mend that, {WITHOUT}") from error


def upload(name: str, folders: Mapping[str, Path]) -> str:
    """Upload folders of models into a repository that is there.

    Args:
        name: OWNER/NAME of the repository.
        folders: by their paths in the repository; "." is its top.

    Returns:
        the address of the repository.

    Raises:
        OutputError: one could not be uploaded; the message says how to do it by hand.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        for place, folder in folders.items():
            hub.upload_folder(
                repo_id=name, folder_path=folder, path_in_repo=place, commit_message=f"Upload {folder.name} of a run"
            )
    except Exception as error:
        by_hand = " && ".join(shlex.join(["hf", "upload", name, str(of), place]) for place, of in folders.items())
        raise OutputError(
            f"output.push_to_hub: the upload to {name} failed: {shown(error)}; the models are whole on disk: {by_hand}"
        ) from error
    return f"{hub.endpoint}/{name}"


def installed(*packages: str) -> str:
    """The packages that are installed, each with its version, in one line."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
