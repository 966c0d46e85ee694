"""What a scheduler may not say in a step, or would better not."""

import random
from collections.abc import Callable
from typing import Any

from kvd_proto.jobs import IntArray
from kvd_proto.messages import Pin, Step
from tests.fuzz.script import GENERATION, SLOT
from tests.fuzz.sessions import arrays

KEYS = tuple(b"key-%08x" % number for number in range(3))
SLOTS = (*range(SLOT, SLOT + 8), 0, 1, 2, 3, 63, 64, 2**31 - 1, 2**31, 2**32 - 1)
GENERATIONS = (*range(GENERATION, GENERATION + 8), 0, 1, 2, 3, 2**62, 2**64 - 1)
COUNTS = (0, 1, 2, 3, 4, 255, 65535)
LEASES = (0, 1, 5, 10, 15, 2**31, 2**63 - 1)
MANY = (0, 1, 2, 7, 64, 65536, 2**31, 2**63 - 1)
OFFERS = (0, 1, 7, 2**31, 2**32 - 1)


def hostile_step(rng: random.Random) -> Step:
    """Some of it at once."""
    parts: dict[str, Any] = {}
    for part in rng.sample(PARTS, rng.choice([1, 1, 2, 3])):
        parts |= part(rng)
    return Step(**parts)


def _begun(rng: random.Random) -> dict[str, Any]:
    """Keys, some of them twice, in slots that were lent to others, to nobody, or to two keys."""
    keys = tuple(rng.choices(KEYS, k=rng.choice([1, 2, 4])))
    count = rng.choice([len(keys), len(keys), len(keys), len(keys) + 1, 0])
    return {"keys": keys} | _slots(rng, count)


def _parts(rng: random.Random) -> dict[str, Any]:
    """Blocks that a chunk has not, or of another number of keys."""
    keys = tuple(rng.choices(KEYS, k=rng.choice([1, 2])))
    first, count = ([rng.choice(COUNTS) for _ in range(rng.choice([2, len(keys)]))] for _ in "ab")
    blocks = {"first": IntArray.of(first, "u2"), "count": IntArray.of(count, "u2")}
    return {"keys": keys} | _slots(rng, len(keys)) | blocks


def _pins(rng: random.Random) -> dict[str, Any]:
    """Chunks that are not READY, not there, or not of this namespace; leases by one number."""
    pins = tuple(
        Pin(
            lease=rng.choice(LEASES),
            lease_ms=rng.choice([1, 5000, 600_000]),
            **_slots(rng, rng.choice([0, 1, 3])),
        )
        for _ in range(rng.choice([1, 2, 30]))
    )
    return {"pins": pins}


def _uses(rng: random.Random) -> dict[str, Any]:
    """Requests that have finished, with counts and labels that may contradict each other."""
    counts, prompts = ([rng.choice(COUNTS[:5]) for _ in range(rng.choice([0, 1, 2]))] for _ in "ab")
    return {
        "used": tuple(rng.choices(KEYS, k=rng.choice([sum(counts) % 16, 3]))),
        "used_counts": IntArray.of(counts, "u4"),
        "prompt_counts": IntArray.of(rng.choice([counts, prompts]), "u4"),
        "labels": rng.choice([b"", bytes(rng.randrange(256) for _ in counts), b"\0" * 3]),
    }


def _slots(rng: random.Random, count: int) -> dict[str, Any]:
    if rng.random() < 0.5:  # a slot with the generation that it was lent with
        places = rng.choices(range(8), k=count)
        found = arrays([SLOT + at for at in places], [GENERATION + at for at in places])
    else:
        found = arrays(rng.choices(SLOTS, k=count), rng.choices(GENERATIONS, k=count))
    if rng.random() < 0.1:
        found["generations"] = IntArray.of(tuple(range(count + 1)), "u8")
    return found


PARTS: list[Callable[[random.Random], dict[str, Any]]] = [
    _begun,
    _begun,
    _parts,
    _pins,
    lambda rng: {"unpinned": tuple(rng.choices(LEASES, k=3))},
    lambda rng: {"dropped": tuple(rng.choices(KEYS, k=2))},
    lambda rng: {"used": tuple(rng.choices(KEYS, k=4))},
    _uses,
    lambda rng: {name: tuple(rng.choices(KEYS, k=2)) for name in ("missed", "unstored")},
    lambda rng: {"wanted": rng.choice(MANY)},
    lambda rng: {name: rng.choice(OFFERS) for name in ("present", "pending", "refused", "not_yet")},
]
