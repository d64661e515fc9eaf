"""A manifest is what was written or it is refused, whichever byte of it changes."""

import hashlib
import json
import math
from contextlib import suppress

import numpy as np
import pytest

from exgrpo.train.checkpoint.listing import FORMAT, MANIFEST, Manifest, SavedFile, read_manifest, write_manifest
from exgrpo.train.common.durable import DamagedFileError

WHOLE = Manifest(
    step=20,
    fingerprint="data",
    config={"seed": 0, "output": {"name": None, "trackers": ["tensorboard"]}},
    files={"policy/rank_00000_00000.safetensors": SavedFile(size=1000, sha256="ab" * 32)},
    arrays="cd" * 32,
    experience={"cd" * 32: 17},
    values={"open": True, "rng": np.random.default_rng(3).bit_generator.state, "rate": 0.1 + 0.2},
    progress={"before": 5e-324, "log": {"step": 20, "metrics": 100}},
)


def signed(content: dict) -> str:
    """A manifest whose checksum is right, whatever it says."""
    return json.dumps({"sha256": hashlib.sha256(json.dumps(content).encode()).hexdigest(), **content})


def plain(manifest: Manifest = WHOLE) -> dict:
    return {"format": FORMAT, **manifest.model_dump()}


def test_what_is_written_is_read(tmp_path):
    write_manifest(tmp_path, WHOLE)
    assert read_manifest(tmp_path) == WHOLE
    assert json.loads((tmp_path / MANIFEST).read_text()) == json.loads(signed(plain()))
    write_manifest(tmp_path, WHOLE.model_copy(update={"progress": {"before": math.nan, "by step": {3: [math.inf]}}}))
    progress = read_manifest(tmp_path).progress
    assert math.isnan(progress["before"])
    assert progress["by step"] == {"3": [math.inf]}


@pytest.mark.parametrize("bit", [0, 5])  # the latter changes the case of letters
def test_no_flipped_bit_goes_unseen(tmp_path, bit):
    write_manifest(tmp_path, WHOLE)
    content = (tmp_path / MANIFEST).read_bytes()
    unseen = []
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << bit
        (tmp_path / MANIFEST).write_bytes(damaged)
        with suppress(DamagedFileError):
            read_manifest(tmp_path)
            unseen.append(place)
    assert not unseen


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"null", b"3", b'"step"', b"{", b"\0" * 900, b"\xff\xfe", b"[" * 100_000, b"9" * 10_000],
)
def test_what_is_no_manifest_is_damaged(tmp_path, content):
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(DamagedFileError, match=rf"/{MANIFEST} is damaged"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(DamagedFileError, match=rf"/{MANIFEST} is missing"):
        read_manifest(tmp_path)
