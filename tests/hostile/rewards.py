"""Hostile rewards: functions of a user's own that return, raise or do what no reward should."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis.strategies import sampled_from as of

from exgrpo.train.reward.pool import Grader, Grades
from tests.hostile.judge import Trial
from tests.hostile.values import Draw

TIME_LIMIT, SHORT, MEMORY_GIB = 20.0, 2.0, 0.25
RETURNS = {"1": 1.0, "0.5": 0.5, "True": 1.0, "-1e6": -1e6, "fractions.Fraction(1, 2)": 0.5, "5e-324": 5e-324}
RETURNS |= {"type('Real', (float,), {})(0.25)": 0.25}
"""Expressions and the reward that they are."""
NO_REWARDS = (
    *("None", "float('nan')", "float('inf')", "-float('inf')", "'1'", "b'1'", "[1]", "(1,)", "{1}", "1j", "10**400"),
    *("1000001", "-1e7", "{}", "{1: 1}", "{'a': None}", "{'a': float('nan')}", "{'a': {'a': 1}}", "{'x' * 300: 1}"),
    *("decimal.Decimal(1)", "print", "float", "object()", "iter([1])", "'x' * 10**6", "[[1]] * 10**5", "..."),
    *("{str(i): 1 for i in range(200)}", "{'a': 1e6, 'b': 1e6}", "'\\x1b[2J'", "'\\ud800'", "lambda: 1"),
    *("type('Rude', (float,), {'__float__': lambda s: 1 / 0})(1)", "(i for i in '1')"),
    "type('Rude', (), {'__repr__': lambda s: 1 / 0})()",
)
RAISED = ("KeyError('x')", "SystemExit(3)", "KeyboardInterrupt", "GeneratorExit", "MemoryError", "BaseException")
RAISED += ("ValueError('x' * 10**6)", "ValueError('\\x1b[2J')", "ValueError('\\ud800')", "type('E', (Exception,), {})")
RAISED += ("type('Rude', (Exception,), {'__str__': lambda s: 1 / 0})",)
FAILS = (
    *(f"raise {name}" for name in RAISED),
    *("1 / 0", "undefined", "score(response, gold)", "sys.exit('no')", "exit(4)", "os._exit(3)", "os.abort()"),
    *("bytearray(2**30)", "'x' * 2**31", "[0] * 2**28", "list(range(10**9))", "ctypes.string_at(0)"),
    *("os.kill(os.getpid(), 9)", "os.closerange(3, 256)"),
)
HANGS = ("while True: pass", "time.sleep(1000)", "re.match('(a+)+$', 'a' * 60 + 'b')", "threading.Event().wait()")
HANGS += ("9**9**9", "os._exit(0)")
"""The last one ends the process as one does that has nothing more to do, which the pool takes for no accident."""
HARMLESS = (
    *("print('x' * 10**6)", "print('x', file=sys.stderr)", "sys.stdout.close()", "sys.stderr = None", "os.chdir('/')"),
    *("os.environ.clear()", "signal.signal(signal.SIGTERM, signal.SIG_IGN)", "sys.setrecursionlimit(50_000)"),
    *("subprocess.run(['true'])", "subprocess.Popen(['sleep', '3'])", "os.fork() or os._exit(0)", "gc.disable()"),
    *("threading.Thread(target=time.sleep, args=(3,), daemon=True).start()", "warnings.warn('x' * 1000)"),
    *(
        "builtins.print = None",
        "logging.getLogger().error('x' * 10**5)",
        "time.sleep(0.01)",
        "os.nice(1)",
        "os.umask(0)",
    ),
)
"""Done, and then a reward is returned."""
UNKNOWN = ("os.fork()", "os.close(0); os.close(1); os.close(2)", "os.setsid()", "os.kill(os.getppid(), 0)")
"""Nobody promises what comes of these, only that something does."""
IMPORTS = "import builtins, ctypes, decimal, fractions, gc, logging, os, re, signal, subprocess, sys, threading, time"
IMPORTS += ", warnings, asyncio"
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
    *("raise SystemExit(3)", "class score:\n  def __init__(self): pass"),
)
"""Files without a reward; one needs a column that no row has."""
BATCHES = ("[]", "[1]", "[1] * 4", "None", "1", "'123'", "[None] * 3", "{'a': 1}", "iter(())", "[[1], [1], [1]]")
BATCHES += ("{1, 2, 3, 4}",)


def source(*body: str, define: str = "def") -> str:
    """A file with a reward that does this for one answer, and is right for all others."""
    lines = ["    if response == 'odd':", *(f"        {line}" for line in body)]
    return "\n".join([IMPORTS, f"{define} score(response, gold):", *lines, "    return float(response == gold)", ""])


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
    names = ("rewards.py:score",) if expected.get("expected") == "refused" else ()
    given = {"wrong": wrong, "expected": "right", "names": names, **expected}
    return Trial(what, lambda: grade(path, ("1", "odd", "2"), seconds), **given)


LISTS = "from exgrpo.train.reward.contract import batched\n@batched(3)\ndef score(responses, golds):\n    return "
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"returns {text}": ([source(f"return {text}")], {"odd": worth}) for text, worth in RETURNS.items()},
    "no reward": ([source(f"return {text}") for text in NO_REWARDS], {"expected": "refused"}),
    "fails": ([source(text) for text in FAILS], {"failed": 1}),
    "hangs": ([source(text) for text in HANGS], {"slow": 1}),
    "harmless": ([source(text, "return 0.5") for text in HARMLESS], {"odd": 0.5}),
    "unknown": ([source(text, "return 0.5") for text in UNKNOWN], {"wrong": lambda grades: "", "expected": "either"}),
    "no function": (NO_FUNCTIONS, {"expected": "refused"}),
    "other than one number for each answer": ([LISTS + text for text in BATCHES], {"expected": "refused"}),
    "a batch": ([f"{LISTS}[1, 0, 0]"], {}),
    "asynchronous": ([source("return 0", define="async def")], {}),
    "asynchronous, fails": ([source("raise KeyError", define="async def")], {"failed": 1}),
    "asynchronous, exits": ([source("raise SystemExit", define="async def")], {"failed": 1}),
    "asynchronous, hangs": ([source("await asyncio.sleep(100)", define="async def")], {"slow": 1}),
}
"""Files of rewards, and what comes of them."""


def _any(draw: Draw, folder: Path) -> Trial:
    what = draw(of(("no reward", "fails", "harmless", *CALLS)))
    texts, expected = CALLS[what]
    return trial(what, draw(of(texts)), folder, **expected)


WAYS = (_any,)
