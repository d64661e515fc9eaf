"""The plan: what each case does follows from the seed and the number of the case."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tests.torture.damages import Damage
from tests.torture.jobs import KINDS, Kind
from tests.torture.kills import Kill

What = Literal["kills", "resume", "load"]
ROUND: tuple[What, ...] = ("load",) * 7 + ("kills",) + ("load",) * 8 + ("resume",)
"""The cases follow each other so, again and again: most damages need no run."""
MOST_KILLS = 6
TWO = 0.25
"""How often two files are damaged at once."""


@dataclass(frozen=True)
class Case:
    """A case that is planned.

    Attributes:
        number: in the plan, from 0.
        what: a run that is killed again and again; a damaged run that goes on; or damage that is only loaded.
        kind: of the run.
        kills: one after the other, each of the run that goes on after the one before.
        damages: all at once.
        interrupted: whether the damaged run is one that was killed, if there has been one, and not a finished one.
    """

    number: int
    what: What
    kind: Kind
    kills: tuple[Kill, ...] = ()
    damages: tuple[Damage, ...] = ()
    interrupted: bool = False

    def __str__(self) -> str:
        doing = [kill.named(False) for kill in self.kills] + [damage.way for damage in self.damages]
        return f"{self.number} {self.what} {self.kind.name}: {', '.join(doing)}"


def drawn(seed: int, number: int, kinds: Sequence[Kind] = KINDS) -> Case:
    """The case of a number."""
    rng = random.Random(f"{seed} {number}")
    what, kind = ROUND[number % len(ROUND)], rng.choice(kinds)
    if what == "kills":
        kills = tuple(Kill.drawn(rng, kind.ranks) for _ in range(rng.randint(2, MOST_KILLS)))
        return Case(number, what, kind, kills=kills)
    damages = tuple(Damage.drawn(rng) for _ in range(2 if rng.random() < TWO else 1))
    return Case(number, what, kind, damages=damages, interrupted=rng.random() < 0.5)
