"""Checks for the doctor that fail in every way there is; their processes import this module."""

import json
import os
import signal
import subprocess
import sys
import time

from exgrpo.tools.doctor.check import CheckFailedError, Skipped

PIDS = "pids.json"
SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def measures(given):
    print("a library says something")
    os.write(1, b"and something in C\n")
    return f"seed {given.recipe.seed} in {given.folder.name} of rank {os.environ.get('RANK')}"


def skips(given):
    raise Skipped("there is no such device")


def fails(given):
    print("what it did before", file=sys.stderr)
    raise CheckFailedError("the number is 5 and not 4. Take 4")


def raises(given):
    return {}["missing"]


def crashes(given):
    print("before the crash", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def vanishes(given):
    os._exit(0)


def leaves_a_process(given):
    sleeper = subprocess.Popen([sys.executable, "-c", SLEEPER])
    return str(sleeper.pid)


def hangs(given):
    """Deaf to SIGTERM, with a process that is deaf too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sleeper = subprocess.Popen([sys.executable, "-c", SLEEPER])
    ready = given.folder / "ready"
    ready.write_text(json.dumps([os.getpid(), sleeper.pid]))
    ready.rename(given.folder / PIDS)
    while True:
        time.sleep(600)
