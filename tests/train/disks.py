"""A disk of a test's own: a file with a file system, that can be filled and can fail. Only root can mount it."""

import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

MIB = 2**20
NEEDS = ("mkfs.ext4", "e2fsck", "losetup", "mount", "umount")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def run(*command: str) -> str:
    """A command that must succeed; returns what it printed."""
    return subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "PATH": PATH}).stdout


def missing(folder: Path) -> str | None:
    """Why a disk cannot be mounted here; None: it can."""
    if os.geteuid() != 0:
        return "only root can mount a disk"
    if absent := [name for name in NEEDS if not shutil.which(name, path=PATH)]:
        return f"a disk needs {', '.join(absent)}"
    try:
        with Disk(folder, 4):
            return None
    except (subprocess.CalledProcessError, OSError) as error:
        return f"this system mounts no disk: {error}"


class Disk:
    """A mounted file.

    Args:
        folder: for the file and the folder where it is mounted.
        size: in MiB.

    Attributes:
        root: where it is mounted.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.root = folder / "disk"
        self._image = folder / "disk.img"
        self._size = size
        self._device = ""

    def __enter__(self) -> Self:
        self.root.mkdir(parents=True)
        with self._image.open("wb") as image:
            image.truncate(self._size * MIB)
        run("mkfs.ext4", "-q", "-m", "0", "-b", "4096", str(self._image))
        self._device = run("losetup", "--find", "--show", str(self._image)).strip()
        try:
            self._mount()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for command in (["umount", "--lazy", str(self.root)], ["losetup", "--detach", self._device]):
            subprocess.run(command, check=False, capture_output=True, env={**os.environ, "PATH": PATH})
        self._image.unlink()

    def _mount(self) -> None:
        run("mount", "-o", "errors=remount-ro", self._device, str(self.root))
        if not self._fault.exists():
            raise OSError("its file system cannot be made to fail")

    @property
    def _fault(self) -> Path:
        return Path("/sys/fs/ext4", Path(self._device).name, "trigger_fs_error")

    def leave(self, free: int) -> None:
        """Fill it, except for some bytes."""
        size = shutil.disk_usage(self.root).free - free
        with (self.root / "filled").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)

    def make_room(self) -> None:
        """Take out what fills it."""
        (self.root / "filled").unlink()

    def fail(self) -> None:
        """Let it have an error, after which the system writes to it no more."""
        self._fault.write_text("1")

    def repair(self) -> None:
        """Repair it as a user does after an error."""
        run("umount", str(self.root))
        # 1: errors were there and are mended.
        checked = subprocess.run(["e2fsck", "-fy", self._device], check=False, capture_output=True)
        assert checked.returncode in (0, 1), checked
        self._mount()
