"""Hostile rewards: functions of a user's own that return, raise or do what no reward should."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exgrpo.train.reward.pool import Grader, Grades
from tests.hostile.judge import Trial

TIME_LIMIT, SHORT, MEMORY_GIB = 20.0, 2.0, 0.25
RETURNS: dict[str, float] = {
    "1": 1.0,
    "0.5": 0.5,
    "True": 1.0,
    "-1e6": -1e6,
    "fractions.Fraction(1, 2)": 0.5,
    "5e-324": 5e-324,
    "type('Real', (float,), {})(0.25)": 0.25,
}
"""Expressions and the reward that they are."""
NO_REWARDS = (
    *("None", "float('nan')", "float('inf')", "-float('inf')", "'1'", "b'1'", "[1]", "(1,)", "{1}", "1j", "10**400"),
    *("1000001", "-1e7", "{}", "{1: 1}", "{'a': None}", "{'a': float('nan')}", "{'a': {'a': 1}}", "{'x' * 300: 1}"),
    *("decimal.Decimal(1)", "print", "float", "object()", "iter([1])", "'x' * 10**6", "[[1]] * 10**5", "..."),
    *(
        "{str(i): 1 for i in range(200)}",
        "{'a': 1e6, 'b': 1e6}",
        "type('Rude', (float,), {'__float__': lambda s: 1 / 0})(1)",
    ),
    *("type('Rude', (), {'__repr__': lambda s: 1 / 0})()", "'\\x1b[2J'", "'\\ud800'", "lambda: 1", "(i for i in '1')"),
)
FAILS = (
    *(
        f"raise {name}"
        for name in ("KeyError('x')", "SystemExit(3)", "KeyboardInterrupt", "GeneratorExit", "MemoryError")
    ),
    *(
        "raise ValueError('x' * 10**6)",
        "raise ValueError('\\x1b[2J')",
        "raise ValueError('\\ud800')",
        "raise BaseException",
    ),
    *("1 / 0", "undefined", "score(response, gold)", "sys.exit('no')", "exit(4)", "raise type('E', (Exception,), {})"),
    *("bytearray(2**30)", "'x' * 2**31", "[0] * 2**28", "list(range(10**9))"),
    *(
        "os._exit(3)",
        "os.kill(os.getpid(), 9)",
        "os.abort()",
        "ctypes.string_at(0)",
        "os.closerange(3, 256)",
    ),
    "raise type('Rude', (Exception,), {'__str__': lambda s: 1 / 0})",
)
HANGS = (
    "while True: pass",
    "time.sleep(1000)",
    "re.match('(a+)+$', 'a' * 60 + 'b')",
    "threading.Event().wait()",
    "9**9**9",
    "os._exit(0)",
)
"""The last one ends the process as one does that has nothing more to do, which the pool takes for no accident."""
HARMLESS = (
    *("print('x' * 10**6)", "print('x', file=sys.stderr)", "sys.stdout.close()", "sys.stderr = None", "os.chdir('/')"),
    *("os.environ.clear()", "signal.signal(signal.SIGTERM, signal.SIG_IGN)", "sys.setrecursionlimit(50_000)"),
    *("subprocess.run(['true'])", "subprocess.Popen(['sleep', '3'])", "os.fork() or os._exit(0)", "gc.disable()"),
    *(
        "threading.Thread(target=time.sleep, args=(3,), daemon=True).start()",
        "warnings.warn('x' * 1000)",
        "os.umask(0)",
    ),
    *("builtins.print = None", "logging.getLogger().error('x' * 10**5)", "time.sleep(0.01)", "os.nice(1)"),
)
"""Done, and then a reward is returned."""
UNKNOWN = ("os.fork()", "os.close(0); os.close(1); os.close(2)", "os.setsid()", "os.kill(os.getppid(), 0)")
"""Nobody promises what comes of these, only that something does."""
MODULES = "builtins ctypes decimal fractions gc logging os re signal subprocess sys threading time warnings"
IMPORTS = f"import {', '.join(MODULES.split())}"
NO_FUNCTIONS = (
    *(
        "def score(response): return 1",
        "def score(): return 1",
        "def score(a, b, c): return 1",
        "score = 3",
        "score = None",
    ),
    *("def other(response, gold): return 1", "def score(response, gold:", "\tdef", "", "raise KeyError('x')", "1 / 0"),
    *("import nothing_of_this_name", "import sys; sys.exit(3)", "import os; os._exit(3)", "raise SystemExit", "\x00"),
    *(
        "def score(response, gold, /, *, none): return 1",
        "score = property()",
        "raise BaseException('x')",
        "score = 'x'",
    ),
    "class score:\n  def __init__(self): pass",
)
"""Files without a reward; the last but two need a column that no row has."""


def source(*body: str) -> str:
    """A file with a reward that does this for one answer, and is right for all others."""
    lines = ["    if response == 'odd':", *(f"        {line}" for line in body)]
    return "\n".join([IMPORTS, "def score(response, gold):", *lines, "    return float(response == gold)", ""])


def grade(path: Path, answers: Sequence[str], seconds: float) -> Grades:
    """What answers are worth, of which 1 is the right one."""
    with Grader(f"{path}:score", workers=1, time_limit=seconds, memory_gib=MEMORY_GIB) as grader:
        return grader.grade([(answer, "1") for answer in answers])


def trial(
    what: str, text: str, folder: Path, odd: float = 0.0, failed: int = 0, slow: int = 0, **expected: Any
) -> Trial:
    """One reward: what its odd answer is worth, and as what it counts; `expected` is that of the `Trial`."""
    path = folder / "rewards.py"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    right = ((1.0, odd, 0.0), failed, slow)

    def wrong(grades: Grades) -> str:
        found = (grades.reward, grades.failed, grades.timed_out)
        return "" if found == right else f"{found} instead of {right}"

    seconds = SHORT if slow else TIME_LIMIT
    return Trial(what, lambda: grade(path, ("1", "odd", "2"), seconds), **{"wrong": wrong, **expected})


def drawn(rng: random.Random, folder: Path) -> Trial:
    """One of them."""
    return rng.choice(WAYS)(rng, folder)


def _returns(rng: random.Random, folder: Path) -> Trial:
    text = rng.choice(sorted(RETURNS))
    return trial("a reward", source(f"return {text}"), folder, RETURNS[text], expected="right")


def _no_reward(rng: random.Random, folder: Path) -> Trial:
    text = rng.choice(NO_REWARDS)
    return trial("no reward", source(f"return {text}"), folder, expected="refused", names=("rewards.py:score",))


def _fails(rng: random.Random, folder: Path) -> Trial:
    return trial("fails", source(rng.choice(FAILS)), folder, failed=1, expected="right")


def _hangs(rng: random.Random, folder: Path) -> Trial:
    return trial("hangs", source(rng.choice(HANGS)), folder, slow=1, expected="right")


def _harmless(rng: random.Random, folder: Path) -> Trial:
    return trial("harmless", source(rng.choice(HARMLESS), "return 0.5"), folder, 0.5, expected="right")


def _unknown(rng: random.Random, folder: Path) -> Trial:
    return trial("unknown", source(rng.choice(UNKNOWN), "return 0.5"), folder, wrong=lambda grades: "")


def _no_function(rng: random.Random, folder: Path) -> Trial:
    return trial("no function", rng.choice(NO_FUNCTIONS), folder, expected="refused", names=("rewards.py:score",))


def _batch(rng: random.Random, folder: Path) -> Trial:
    """A batched reward that gives other than one number for each answer."""
    sound = rng.random() < 0.2
    lists = (
        "[]",
        "[1]",
        "[1] * 4",
        "None",
        "1",
        "'123'",
        "[None] * 3",
        "{'a': 1}",
        "iter(())",
        "[[1], [1], [1]]",
        "{1, 2, 3, 4}",
    )
    value = "[1, 0, 0]" if sound else rng.choice(lists)
    head = "from exgrpo.train.reward.contract import batched\n@batched(3)\n"
    text = f"{head}def score(responses, golds):\n    return {value}\n"
    names = ("rewards.py:score",)
    return trial("a batch", text, folder, expected="right" if sound else "refused", names=names)


def _awaits(rng: random.Random, folder: Path) -> Trial:
    body, failed, slow = rng.choice(
        (("return 0", 0, 0), ("raise KeyError", 1, 0), ("await asyncio.sleep(100)", 0, 1), ("raise SystemExit", 1, 0))
    )
    text = "import asyncio\nasync " + source(body).partition("\n")[2]
    return trial("asynchronous", text, folder, failed=failed, slow=slow, expected="right")


WAYS = (
    _returns,
    _no_reward,
    _no_reward,
    _fails,
    _fails,
    _hangs,
    _harmless,
    _harmless,
    _unknown,
    _no_function,
    _batch,
    _awaits,
)
