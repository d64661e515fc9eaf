"""Heads split, sharded and replicated over two processes."""

import pytest

from tests.gloo import on_ranks

from . import ranks


@pytest.mark.parametrize(
    ("needed", "checks"),
    [
        ("torch", [ranks.tensor_parallel]),
        ("transformers", [ranks.replicated, ranks.fully_sharded]),
        ("deepspeed", [ranks.zero3]),
    ],
    ids=["DTensor", "DDP and FSDP2", "ZeRO-3"],
)
def test_two_ranks(needed, checks, tmp_path):
    pytest.importorskip(needed, reason=f"{needed} is not installed")
    on_ranks(ranks.check, ranks.WORLD, tmp_path, checks)
