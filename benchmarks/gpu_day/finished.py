"""The file of what was done: parts that are finished on this device are not run again by the next call."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "parts.json"


@dataclass(frozen=True)
class Done:
    """A part that was begun.

    Attributes:
        date: YYYY-MM-DD.
        device: name of the GPU, or `cpu`.
        revision: of git; empty where none is known.
        seconds: that it took.
        problem: why it is not finished; empty where it is.
    """

    date: str
    device: str
    revision: str
    seconds: float
    problem: str = ""


@dataclass
class Parts:
    """What is known of the parts, by name, and written after each.

    Attributes:
        path: of the file.
        done: the last try of each part on any device.
    """

    path: Path
    done: dict[str, Done] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Parts":
        """Those of a folder; none where it has no file of them.

        Raises:
            ValueError: the file is there, and it is no file of parts.
        """
        path = folder / FILE
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            return cls(path, {name: Done(**one) for name, one in fields.items()})
        except FileNotFoundError:
            return cls(path)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no file of parts ({error}): name another --output, or remove it") from None

    def finished(self, name: str, device: str) -> bool:
        """Whether a part is done on a device."""
        return self.tried(name, device) and not self.done[name].problem

    def tried(self, name: str, device: str) -> bool:
        """Whether a part was begun on a device."""
        return name in self.done and self.done[name].device == device

    def note(self, name: str, done: Done) -> None:
        """Take a part down; a program that is killed meanwhile leaves the file as it was."""
        self.done[name] = done
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({key: asdict(one) for key, one in self.done.items()}, indent=1), encoding="utf-8")
        os.replace(new, self.path)
