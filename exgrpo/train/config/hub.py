"""The hub of models and data sets: whether it answers, and the versions that cards of models name."""

import os
import queue
import threading
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import requests

ENDPOINT = "https://huggingface.co"
SECONDS = 3.0
"""A hub that has not answered by then is taken for unreachable."""


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


def installed(*packages: str) -> str:
    """The packages that are installed, each with its version, in one line."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
