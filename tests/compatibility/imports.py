"""`python -m tests.compatibility.imports`: import every module and the extension, and print JSON of what failed.

A module whose package is not installed here is counted as absent. It has failed where that package is there.
"""

import json
from importlib import import_module
from importlib.util import find_spec

from tests.compatibility.promises import ROOT


def modules() -> list[str]:
    """The names of all modules of the package that are no programs."""
    paths = sorted(path.relative_to(ROOT) for path in (ROOT / "exgrpo").rglob("*.py"))
    return [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths if path.stem != "__main__"]


def problem(name: str) -> str | None:
    """The error of an import; empty where its package is not installed, None where there is none."""
    try:
        import_module(name)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        absent = missing not in ("", "exgrpo") and find_spec(missing) is None
        return "" if absent else f"{name}: {error}"
    except Exception as error:  # whatever a library raises
        return f"{name}: {type(error).__name__}: {error}"
    return None


def extension() -> str:
    """Why the compiled extension that is there does not load, or empty: without it the tests pass by other backends."""
    from exgrpo.kernels.extension import FILE, MISSING

    return MISSING if FILE.exists() else ""


if __name__ == "__main__":
    problems = [problem(name) for name in modules()]
    failed = [text for text in (*problems, extension()) if text]
    print("\n" + json.dumps({"imported": problems.count(None), "absent": problems.count(""), "failed": failed}))
