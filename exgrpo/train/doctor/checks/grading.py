"""Are answers graded rightly, in processes that end what hangs?"""

import time

from exgrpo.train.doctor.check import Check, CheckFailedError, Given

CASES = (
    ("math", r"<think>x</think>\boxed{\frac{1}{2}}", "0.5", 1.0),
    ("math", r"\boxed{\frac{1}{2}}", "0.5", 0.0),
    ("math_no_think", r"It is $\sqrt{8}$.", r"2\sqrt{2}", 1.0),
    ("math_no_think", r"\boxed{x^2 + 1}", "x^2 - 1", 0.0),
    ("exgrpo.train.data.countdown:reward", r"\boxed{(3 + 5) * 8 - 9}", "55 3 5 8 9", 1.0),
    ("exgrpo.train.data.countdown:reward", r"\boxed{3 + 5 + 8 + 9}", "55 3 5 8 9", 0.0),
    ("exgrpo.train.data.colouring:reward", r"\boxed{a=R b=G}", "ab ab", 1.0),
    ("exgrpo.train.data.colouring:reward", r"\boxed{a=R b=R}", "ab ab", 0.0),
)
"""A reward, an answer, the gold answer, and what the answer is worth."""
HANGS = "exgrpo.train.doctor.checks.grading:hang"
ENDLESS = "endless"
LIMIT = 2.0
MANY = 400


def hang(response: str, gold: str) -> float:
    """A reward that does not come to an end for one answer; grading processes try every other one as they start."""
    while response == ENDLESS:
        time.sleep(1)
    return 0.0


def check(given: Given) -> str:
    """Grade answers whose worth is known, one that hangs, and then many that Math-Verify has to compare."""
    from exgrpo.train.reward.pool import Grader

    grader = given.resources.enter_context(
        Grader(*dict.fromkeys(reward for reward, *_ in CASES), HANGS, workers=2, time_limit=LIMIT)
    )
    grading = grader.begin()
    for reward, response, gold, _ in CASES:
        grading.add(response, gold, reward=reward)
    grading.add(ENDLESS, "", reward=HANGS)
    grades = grading.finish()
    wrong = [case[:3] for case, reward in zip(CASES, grades.reward, strict=False) if reward != case[3]]
    if wrong or grades.failed:
        raise CheckFailedError(
            f"{max(len(wrong), grades.failed)} of {len(CASES)} answers got a wrong reward or failed: {wrong}. {REMEDY}"
        )
    if grades.timed_out != 1:
        raise CheckFailedError(f"an answer that hangs was not ended after {LIMIT:g} s. {REMEDY}")
    start = time.perf_counter()
    many = grader.grade([(rf"</think>\boxed{{\frac{{{number}}}{{7}}}}", "0.5") for number in range(MANY)])
    rate = MANY / (time.perf_counter() - start)
    if many.failed or many.timed_out:
        raise CheckFailedError(f"{many.failed} answers failed and {many.timed_out} took over {LIMIT:g} s. {REMEDY}")
    network = "without the network" if grader.offline else "with the network, which this system lets no process leave"
    return (
        f"{len(CASES)} answers to 4 rewards graded rightly, 1 that hangs was ended; {rate:.0f} answers/s in 2 "
        f"processes {network}"
    )


REMEDY = "See that math-verify and sympy have the versions that this package asks for: pip install 'exgrpo[train]'"
CHECKS = (Check("grading", check, 1, REMEDY),)
