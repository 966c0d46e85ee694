"""What a bad connection does to messages: a pure function of chance."""

import random
from collections.abc import Iterator
from enum import IntEnum

CHANCE = 0.25  # for each message
LONGEST_DELAY = 1.5
MOMENT = 0.03  # enough for the next message to overtake


class Fault(IntEnum):
    """Kinds, each the number of its counter."""

    DELAYED = 0
    DUPLICATED = 1
    TRUNCATED = 2
    REORDERED = 3
    LOST = 4


Sending = tuple[float, bytes]
"""When to send what: seconds from now."""


def mangle(frame: bytes, chance: random.Random) -> tuple[Fault | None, list[Sending]]:
    """What becomes of a message: as a rule it is sent on as it is."""
    if chance.random() >= CHANCE:
        return None, [(0.0, frame)]
    fault = chance.choice(list(Fault))
    return fault, list(_sendings(fault, frame, chance))


def _sendings(fault: Fault, frame: bytes, chance: random.Random) -> Iterator[Sending]:
    if fault is Fault.DELAYED:
        yield chance.uniform(0.0, LONGEST_DELAY), frame
    elif fault is Fault.DUPLICATED:
        yield 0.0, frame
        yield chance.choice((0.0, chance.uniform(0.0, LONGEST_DELAY))), frame
    elif fault is Fault.TRUNCATED:
        yield 0.0, frame[: chance.randint(0, len(frame))]
    elif fault is Fault.REORDERED:
        yield MOMENT, frame
