"""What a grading process may take of the machine, as far as the system (Linux) sets bounds."""

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GIB = 2**30
FILE_BYTES = GIB
"""No file of a grading process becomes longer."""
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # of unshare(2)


def limit_files() -> None:
    """Let this process write no file of more than `FILE_BYTES`, and none of its memory if it crashes."""
    for kind, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, FILE_BYTES)):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def leave_network() -> str:
    """Let this process, which must have no other thread, reach no network any more; why not, where that fails.

    It gets a network of its own, in which no device is up, and a user namespace, in which it keeps the number of its
    user: in such a one everybody may make a network.
    """
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare"):
        return "the system has no namespaces"
    if libc.unshare(_NEW_USER | _NEW_NETWORK):
        return os.strerror(ctypes.get_errno())
    with suppress(OSError):  # without it the process has the number of nobody, and its rights all the same
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    return ""


def data_bytes() -> int:
    """The writable memory of this process that it shares with none, as RLIMIT_DATA counts it."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


@contextmanager
def little_memory(most: int) -> Iterator[None]:
    r"""Let this process take at most so many bytes more: \boxed{9^{9^{9^9}}} would take all within the time limit.

    RLIMIT_DATA counts memory that can be written, private and so the process's own. RLIMIT_AS also counts what is only
    reserved or mapped from files, of which a reward that uses torch or CUDA has many GiB.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bounds = [bound for bound in (before, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([data_bytes() + most, *bounds]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))
