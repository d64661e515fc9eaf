"""The kernels as a folder for the Hub of Hugging Face: `python -m exgrpo.tools.hub FOLDER`.

The package `kernels` loads it, from the Hub or a disk. It has the Python files of :mod:`exgrpo.kernels`, with relative
imports: a kernel has a module name of its own, so that several versions can be loaded in one process.
"""

import argparse
import json
import re
import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.metadata import files
from pathlib import Path
from typing import Any

from exgrpo import __version__
from exgrpo.kernels import extension

NAME = "exgrpo"
VERSION = int(__version__.partition(".")[0])
"""The Hub has a branch for each version of a kernel, within which its functions stay as they are."""
VARIANTS = ("cpu", "cuda", "rocm")
"""Backends of torch with a variant each; their files are the same."""
COMPILED = ("__main__.py", "cpu_chunks", "cuda_chunks")
"""Left out: what needs compiled files, and the program that shows them."""
CARD = f"""---
library_name: kernels
license: apache-2.0
---

Log-probabilities, entropies and the policy loss (GRPO, DAPO, ExGRPO) of a language model from its hidden states,
without the logits: those of exgrpo {__version__} in Triton and PyTorch, for torch 2.11 and Python 3.11 or newer.

```python
from kernels import get_kernel

kernel = get_kernel("OWNER/{NAME}", version={VERSION}, trust_remote_code=True)
log_prob, entropy = kernel.linear_log_prob(hidden, weight, target)  # [..., D], [V, D], [...]
loss = kernel.linear_policy_loss(hidden, weight, target, old_log_prob, advantage).loss
```
"""


def sources() -> dict[str, str]:
    """Return the text files of a variant by their path in it, the licence among them."""
    licence = next(path for path in files(NAME) or () if path.name == "LICENSE")  # of the installed package
    found, folder = {"LICENSE": licence.read_text(encoding="utf-8")}, Path(__file__).parents[1] / "kernels"
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        if inside.parts[0] not in COMPILED:
            text = path.read_text(encoding="utf-8").replace(extension.AGAIN, f"the package {NAME} has it")
            relative = rf"\1{'.' * len(inside.parts)}"
            found[inside.as_posix()] = re.sub(r"^( *from )exgrpo\.kernels\b\.?", relative, text, flags=re.MULTILINE)
    return found


def metadata(unique: str, backend: str, contents: Mapping[str, str]) -> dict[str, Any]:
    """Return the description of a variant that `kernels` reads."""
    digests = {name: b64encode(sha256(text.encode()).digest()).decode() for name, text in contents.items()}
    return {
        "name": NAME,
        "id": unique,
        "version": VERSION,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digests},
    }


def write(folder: Path) -> None:
    """Write the card and the variants into a folder; raise FileExistsError if it has variants."""
    shared = sources()
    state = sha256("".join(shared.values()).encode()).hexdigest()[:8]
    for backend in VARIANTS:
        variant, unique = folder / "build" / f"torch-{backend}", f"_{NAME}_{backend}_{state}"
        # Operators have a namespace of their own: another version, or the package, may be loaded in the process, too.
        contents = {name: text.replace(f"{NAME}::", f"{unique}::") for name, text in shared.items()}
        variant.mkdir(parents=True)
        described = json.dumps(metadata(unique, backend, contents), indent=2)
        for name, text in {**contents, "metadata.json": f"{described}\n"}.items():
            (variant / name).parent.mkdir(exist_ok=True)
            (variant / name).write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(CARD, encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(prog="exgrpo hub", description="Write the kernels as a folder for the Hub.")
    parser.add_argument("folder", type=Path, help="new folder")
    folder = parser.parse_args(argv).folder
    try:
        write(folder)
    except FileExistsError as error:
        print(f"error: {error.filename} exists; name a new folder", file=sys.stderr)
        return 2
    print(f"kernels in {folder}; docs/how_to/publish.md says how they are uploaded")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
