"""`python -m tests.compatibility`: try the oldest and the newest version of every package that is promised.

A version that today's record has is not tried again, so the same command goes on where it was stopped.
`--table` writes docs/compatibility.md from the newest record, and tries nothing.
"""

import os
import re
import shutil
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
VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?")


class Options(BaseModel):
    """Try the oldest and the newest versions that pyproject.toml allows."""

    model_config = ConfigDict(frozen=True)

    only: tuple[str, ...] = Field((), description="Packages, or one version of one: trl, trl==1.16.0. None: all.")
    ends: tuple[Literal["oldest", "newest", "latest"], ...] = Field(
        ("oldest", "newest"), description="Which versions: the ends of the range; latest: the newest of the index."
    )
    record: Path | None = Field(None, description="The file to go on with. None: today's in docs/compatibility.")
    keep: bool = Field(False, description="Keep the environments, and say where they are.")
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
        if version and not VERSION.fullmatch(version):
            raise ConfigError(f"--only {name}=={version}: that is no version; write one as 2.11.0")
    for name, version in asked:
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
    for target in left:
        reason, ends = "the program has not come to it", target.ends
        entries[target.key] = Entry(*target.key, "", target.promised, ends, not_tried=reason, date=today)
    write(path, list(entries.values()))
    for number, target in enumerate(left, 1):
        print(f"{number} of {len(left)}: {target.package.name} {target.version}", flush=True)
        entries[target.key] = replace(in_folder(target, options.keep), date=today)
        write(path, list(entries.values()))
        print(summary(entries[target.key]), flush=True)
    return any(entries[target.key].failed > 0 for target in plan)


def is_done(target: Target, entry: Entry | None, today: str) -> bool:
    """Whether the version was tried today, under the same promise."""
    wanted = (target.promised, target.ends, today)
    return entry is not None and not entry.not_tried and (entry.promised, entry.ends, entry.date) == wanted


def in_folder(target: Target, keep: bool) -> Entry:
    """Try a version in a folder that is deleted afterwards, also where the program is stopped."""
    folder = Path(tempfile.mkdtemp(prefix="compatibility_"))
    try:
        return tried(target, folder / "environment")
    finally:
        if keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def summary(entry: Entry) -> str:
    """One line."""
    if entry.not_tried:
        return f"not tried: {entry.not_tried}"
    counts = f"{entry.passed} passed, {entry.failed} failed, {entry.skipped} skipped"
    return f"{counts}, {entry.seconds:.0f} s" + (f": {entry.first_failure}" if entry.first_failure else "")


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
