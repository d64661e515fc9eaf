"""Checks for the doctor that fail in every way there is, the program that does one of them, and their doctor."""

import json
import os
import signal
import subprocess
import sys
import time

from exgrpo.tools import checks
from exgrpo.tools.checks import Check, CheckFailedError, Skipped

PIDS = "pids.json"
SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
REMEDY = "do something else"


def measures(recipe, folder):
    print("a library says something")
    return f"seed {recipe.seed} in {folder.name} of rank {os.environ.get('RANK')}"


def skips(recipe, folder):
    raise Skipped("there is no such device")


def fails(recipe, folder):
    print("what it did before", file=sys.stderr)
    raise CheckFailedError("the number is 5 and not 4: take 4")


def raises(recipe, folder):
    return {}["missing"]


def crashes(recipe, folder):
    print("before the crash", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def vanishes(recipe, folder):
    os._exit(0)


def leaves_a_process(recipe, folder):
    return str(subprocess.Popen([sys.executable, "-c", SLEEPER]).pid)


def hangs(recipe, folder):
    """Deaf to SIGTERM, with a process that is deaf too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleeper = subprocess.Popen([sys.executable, "-c", SLEEPER])
    ready = folder / "ready"
    ready.write_text(json.dumps([os.getpid(), sleeper.pid]))
    ready.rename(folder / PIDS)
    time.sleep(600)


FUNCTIONS = (crashes, measures, fails, skips, raises, vanishes, leaves_a_process, hangs)
CHECKS = {function.__name__: Check(function, REMEDY) for function in FUNCTIONS}

if __name__ == "__main__":
    checks.CHECKS.update(CHECKS)
    if sys.argv[1] in CHECKS:
        sys.exit(checks.main(sys.argv[1:]))
    from exgrpo.tools import doctor

    doctor.CHILD = "tests.tools.broken_checks"
    sys.exit(doctor.main(sys.argv[1:]))
