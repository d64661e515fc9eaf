"""Independent seeded generators, one per purpose."""

import zlib

import numpy as np


def derive_seed(seed: int, purpose: str, *numbers: int) -> int:
    """Return a 63-bit seed for one purpose (and, for example, one step and rank) of the run with this seed."""
    key = (zlib.crc32(purpose.encode()), *numbers)
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)[0] >> 1)


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Return a numpy generator seeded by `derive_seed`."""
    return np.random.default_rng(derive_seed(seed, purpose, *numbers))
