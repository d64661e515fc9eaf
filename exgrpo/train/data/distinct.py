"""Rows that ask the same; it needs no package, since the trainers of others use it."""

import json
import pickle
from collections.abc import Hashable, Iterable, Mapping
from typing import Any


def first_places(keys: Iterable[Hashable], seen: set[Hashable]) -> list[int]:
    """Return the places of the first of each key that is not among `seen`, and add it there."""
    places = []
    for place, key in enumerate(keys):
        if key not in seen:
            seen.add(key)
            places.append(place)
    return places


def canonical(columns: Mapping[str, Any]) -> str:
    """Return a text that is the same for equal columns of a row."""
    return json.dumps(columns, sort_keys=True, default=lambda value: pickle.dumps(value).hex()) if columns else ""
