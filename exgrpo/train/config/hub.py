"""Model and data hub: reachability, uploads of a run, and the package versions named in model cards.

huggingface_hub is imported only for uploads: it reads the environment once, which `offline_reason` may change.
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
"""Time limit after which a hub counts as unreachable."""
WITHOUT = "or leave it out, and upload later by `hf upload`"


def offline_reason() -> str | None:
    """Return why files come from the cache only, None if the hub responds; applies to all libraries of this process.

    Call it before transformers, datasets and huggingface_hub are imported: they read the environment once.
    """
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no", "off"):
        return "HF_HUB_OFFLINE is set"
    endpoint = os.environ.get("HF_ENDPOINT", ENDPOINT)
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
    # DNS look-ups have no time limit, so they run in a daemon thread that is never joined.
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
    """Check that the hub accepts the model, creating its repository if missing.

    Raises:
        ConfigError: no model to upload, no token, an invalid name, or no reachable hub.
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
    except Exception as error:  # the hub and the network raise many kinds
        raise ConfigError(f"output.push_to_hub: {name} cannot be made: {shown(error)}; mend that, {WITHOUT}") from error


def upload(name: str, folders: Mapping[str, Path]) -> str:
    """Upload folders of models, by their paths in it ("." is its root), into a repository OWNER/NAME; return its URL.

    Raises:
        OutputError: an upload failed; the message has the commands to repeat it.
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
    """Return those of the packages that are installed, with their versions, in one line."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
