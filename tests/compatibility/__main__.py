"""`python -m tests.compatibility`: try the oldest and the newest version of every package that is promised.

A version that today's record has is not tried again, so the same command goes on where it was stopped.
`--table` writes docs/compatibility.md from the newest record, and tries nothing.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field

from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.process import leave, run_program
from exgrpo.train.config.command_line import options_of
from tests.compatibility.promises import PACKAGES, Target, offered, project, range_of, targets
from tests.compatibility.record import FOLDER, PAGE, Entry, newest, read, table, with_table, write
from tests.compatibility.trial import tried

PROGRAM = "python -m tests.compatibility"


class Options(BaseModel):
    """Try the oldest and the newest versions that pyproject.toml allows."""

    model_config = ConfigDict(frozen=True)

    only: tuple[str, ...] = Field((), description="Packages, or one version of one: trl, trl==1.16.0. None: all.")
    ends: tuple[Literal["oldest", "newest", "latest"], ...] = Field(
        ("oldest", "newest"), description="Which versions: the ends of the range; latest: the newest of the index."
    )
    record: Path | None = Field(None, description="The file to go on with. None: today's in docs/compatibility.")
    table: bool = Field(False, description="Write docs/compatibility.md from the newest record, and try nothing.")


def planned(options: Options) -> list[Target]:
    """The versions to try.

    Raises:
        ConfigError: a package is unknown.
    """
    by_name, promises, found = {package.name: package for package in PACKAGES}, project(), []
    asked = [name.partition("==")[::2] for name in options.only or by_name]
    for name, version in asked:
        if name not in by_name:
            raise ConfigError(f"--only {name}: no package of that name is tried; choose from {', '.join(by_name)}")
        package, promised = by_name[name], range_of(name, promises)
        if version:
            found.append(Target(package, str(Version(version)), str(promised), ("asked for",)))
        else:
            found += targets(package, promised, offered(package), options.ends)
    return found


def work(options: Options) -> bool:
    """Do what the options say; returns whether something that was tried failed."""
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    path = options.record or FOLDER / f"{today}.json"
    # A new record of today has what the newest one has, and what is tried now replaces it.
    anew = options.record is None and not path.exists() and any(FOLDER.glob("*.json"))
    entries = {entry.key: entry for entry in read(newest(FOLDER) if anew else path)}
    plan = planned(options)
    left = [target for target in plan if not is_done(target, entries.get(target.key), today)]
    for number, target in enumerate(left, 1):
        print(f"{number} of {len(left)}: {target.package.name} {target.version}", flush=True)
        with tempfile.TemporaryDirectory(prefix="compatibility_", ignore_cleanup_errors=True) as folder:
            entries[target.key] = replace(tried(target, Path(folder) / "environment"), date=today)
        write(path, list(entries.values()))
        print(entries[target.key].told, flush=True)
    return any(entries[target.key].failed > 0 for target in plan)


def is_done(target: Target, entry: Entry | None, today: str) -> bool:
    """Whether the version was tried today, under the same promise."""
    wanted = (target.promised, target.ends, today)
    return entry is not None and not entry.not_tried and (entry.promised, entry.ends, entry.date) == wanted


def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit status, 1 where a version does not work."""
    failed = False

    def within(_: ExitStack) -> None:
        nonlocal failed
        options = options_of(Options, PROGRAM, argv)
        if options.table:
            PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(newest())), encoding="utf-8")
        else:
            failed = work(options)

    return run_program(within, "stopped: the same command goes on with the next version") or int(failed)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
