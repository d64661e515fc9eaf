"""Detect rows that ask the same question; without dependencies, since the integrations use it."""

import json
import pickle
from collections.abc import Hashable, Iterable, Mapping
from typing import Any


def first_places(keys: Iterable[Hashable], seen: set[Hashable]) -> list[int]:
    """Return the positions of the first occurrence of each key not in `seen`, and add these keys to it."""
    places = []
    for place, key in enumerate(keys):
        if key not in seen:
            seen.add(key)
            places.append(place)
    return places


def canonical(columns: Mapping[str, Any]) -> str:
    """Return a text that is equal for equal columns of a row."""
    return json.dumps(columns, sort_keys=True, default=lambda value: pickle.dumps(value).hex()) if columns else ""
