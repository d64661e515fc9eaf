"""The hub of models and data sets: found out in seconds whether it answers, before its library tries for a minute."""

import os
import queue
import threading
from contextlib import suppress

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
