"""What is injected when: a pure function of the seed.

The same seed, kinds and weights make the same plan for ever; what the processes make of
it depends on the machine.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
MOST_AT_ONCE = 3
LONGEST_LEAD = 1.2


@dataclass(frozen=True, slots=True)
class Action:
    """One injection.

    Attributes:
        kind: a key of the table of injections.
        delay: seconds after the step's begin, or after the action before.
        hold: seconds until it is undone.
        draws: numbers in [0, 1) from which the injection takes its choices.
    """

    kind: str
    delay: float
    hold: float
    draws: tuple[float, float, float, float]

    def pick(self, choices: Sequence[T], draw: int = 0) -> T:
        """One of the choices.

        Raises:
            IndexError: there is none.
        """
        return choices[int(self.draws[draw] * len(choices))]


@dataclass(frozen=True, slots=True)
class Step:
    """Injections that overlap; after them all is undone and everything is looked at."""

    number: int
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        said = (f"{a.kind} after {a.delay:.2f} s for {a.hold:.2f} s" for a in self.actions)
        return f"step {self.number}: {', '.join(said)}"


def plan(seed: int, weights: Mapping[str, float], longest_hold: float = 2.0) -> Iterator[Step]:
    """Steps without end.

    Every kind comes once before chance alone decides, so that a short run has seen all.

    Args:
        seed: the run's.
        weights: kinds of injections, and how often each comes relative to the others.
        longest_hold: seconds for which an injection lasts at most.
    """
    chance = random.Random(seed)
    kinds = sorted(weights)
    first = kinds.copy()
    chance.shuffle(first)
    number = 0
    while True:
        number += 1
        actions = []
        for _ in range(chance.randint(1, MOST_AT_ONCE)):
            anyone = chance.choices(kinds, [weights[kind] for kind in kinds])[0]
            kind = first.pop() if first else anyone
            delay = chance.uniform(0.0, LONGEST_LEAD)
            hold = chance.uniform(0.05, longest_hold)
            draws = (chance.random(), chance.random(), chance.random(), chance.random())
            actions.append(Action(kind, delay, hold, draws))
        yield Step(number, tuple(actions))
