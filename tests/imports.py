"""Every module and the extension can be imported: for .github/workflows/nightly.yml, with other versions of packages.

A module whose package is not installed here is skipped. It has failed where that package is there.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from exgrpo.kernels.extension import FILE, MISSING

ROOT = Path(__file__).parents[1]
PATHS = sorted(path.relative_to(ROOT) for path in (ROOT / "exgrpo").rglob("*.py") if path.stem != "__main__")


@pytest.mark.parametrize("name", [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in PATHS])
def test_the_module_can_be_imported(name):
    try:
        import_module(name)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "exgrpo") or find_spec(missing):
            raise
        pytest.skip(f"{missing} is not installed")


def test_the_extension_that_is_there_loads():
    """Without it the tests pass by other backends."""
    assert not (FILE.exists() and MISSING)
