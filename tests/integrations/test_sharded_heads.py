"""Heads split, sharded and replicated over two processes, which check all kinds of sharding that are installed."""

from importlib.util import find_spec

import pytest

from tests.gloo import on_ranks

from . import ranks

CHECKS = {
    "torch": [ranks.tensor_parallel],
    "transformers": [ranks.replicated, ranks.fully_sharded],
    "deepspeed": [ranks.zero3],
}


@pytest.mark.long
def test_two_ranks(tmp_path):
    missing = [name for name in CHECKS if find_spec(name) is None]
    checks = [check for name, of_package in CHECKS.items() for check in of_package if name not in missing]
    on_ranks(ranks.check, ranks.WORLD, tmp_path, checks)
    if missing:
        pytest.skip(f"the rest is right, and not installed: {', '.join(missing)}")
