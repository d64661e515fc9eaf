"""A reward that tosses a coin, the same one for the same answer."""

import zlib


def score(response: str, gold: str) -> float:
    """1 for half of all answers."""
    return float(zlib.crc32(response.encode()) % 2)
