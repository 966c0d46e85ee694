"""Values that a field could have and better had not, and steps that no scheduler sends."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from kvd_proto.jobs import IntArray
from kvd_proto.messages import Pin, Step
from tests.fuzz.script import GENERATION, SLOT
from tests.fuzz.sessions import arrays

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, float("nan"), float("inf"), "", "text", b"", b"\0" * 16),
    *([], [[]], {}, {"more": 1}, 2**63, 2**64 - 1, -(2**63), "\0", "é\u202e" * 20),
)
NUMBERS = (
    *(0, 1, -1, 2, 63, 64, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32),
    *(600_000, 600_001, 2**47, 2**48, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
)
FLOATS = (0.0, -0.0, -1.0, 1e9, 1e9 + 1, 1e308, 5e-324, float("nan"), float("inf"), 3)
DTYPES = ("u1", "u2", "u4", "u8", "i4", "f4", "O", "")
LONG = (47, 48, 49, 255, 256, 257, 4096, 4097, 65536)
WORDS = ("host", "scheduler", "worker", "tool", "ipc", "vmm", "\n\x1b[31m\0", "../..", "")


def changed(rng: random.Random, value: Any) -> Any:
    """Return `value` with one thing in it that is different, as a rule near what is allowed."""
    if rng.random() < 0.1:
        return rng.choice(JUNK)
    match value:
        case dict():
            return _map(rng, value)
        case [str() as dtype, bytes() as data] if dtype in DTYPES[:4]:
            return _array(rng, dtype, data)
        case list():
            return _sequence(rng, value)
        case bool():
            return rng.choice([not value, 0, 1, None])
        case int():
            near = (value + 1, value - 1, value * 2, value // 2, -value)
            return min(max(rng.choice([*near, *NUMBERS]), -(2**63)), 2**64 - 1)
        case float():
            return rng.choice(FLOATS)
        case str():
            long = rng.choice(LONG)
            return rng.choice([*WORDS, "x" * long, "é" * long, f"{value}x"])
        case bytes():
            return rng.choice([b"", bytes(rng.choice(LONG)), rng.randbytes(16), value + b"x"])
    return rng.choice(JUNK)


def _map(rng: random.Random, value: dict[Any, Any]) -> Any:
    new = dict(value)
    choice = rng.random()
    if choice < 0.05 and new:
        del new[rng.choice(sorted(new))]
    elif choice < 0.08 or not new:
        new[rng.choice(["more", "temporary", "namespace", "lookups", "first"])] = rng.choice(JUNK)
    else:
        name = rng.choice(sorted(new))
        new[name] = changed(rng, new[name])
    return new


def _array(rng: random.Random, dtype: str, data: bytes) -> Any:
    """An IntArray: other items, more or fewer of them, another dtype, half an item."""
    choice = rng.random()
    if choice < 0.1:
        return [rng.choice(DTYPES), data]
    if choice < 0.2:
        return [dtype, data + bytes(rng.randint(1, 9))]
    items = np.frombuffer(data, "<" + dtype).tolist()
    info = np.iinfo("<" + dtype)
    if choice < 0.4:
        items = _shuffled(rng, items, items[-1] if items else 0)
    elif items:
        place = rng.randrange(len(items))
        number = rng.choice((*NUMBERS, int(info.max)))
        items[place] = rng.choice([number, items[place] + 1, items[place] - 1])
    else:
        items = [0] * rng.choice([1, 2, 1000])
    fitting = [min(max(item, int(info.min)), int(info.max)) for item in items]
    return [dtype, np.array(fitting, "<" + dtype).tobytes()]


def _sequence(rng: random.Random, value: list[Any]) -> Any:
    if rng.random() < 0.3 or not value:
        return _shuffled(rng, value, value[-1] if value else rng.choice(JUNK))
    items = list(value)
    place = rng.randrange(len(items))
    items[place] = changed(rng, items[place])
    return items


def _shuffled(rng: random.Random, items: list[Any], last: Any) -> list[Any]:
    choices: tuple[list[Any], ...] = (
        [],
        items[: rng.randint(0, len(items))],
        items + items,
        rng.sample(items, len(items)),
        [*items, last],
        items + [last] * rng.choice([10, 300, 5000]),
    )
    return rng.choice(choices)


# ------------------------------------------------------------------------ steps

KEYS = tuple(b"key-%08x" % number for number in range(3))
SLOTS = (*range(SLOT, SLOT + 8), 0, 1, 2, 3, 63, 64, 2**31 - 1, 2**31, 2**32 - 1)
GENERATIONS = (*range(GENERATION, GENERATION + 8), 0, 1, 2, 3, 2**62, 2**64 - 1)
COUNTS = (0, 1, 2, 3, 4, 255, 65535)
LEASES = (0, 1, 5, 10, 15, 2**31, 2**63 - 1)
MANY = (0, 1, 2, 7, 64, 65536, 2**31, 2**63 - 1)
OFFERS = (0, 1, 7, 2**31, 2**32 - 1)


def hostile_step(rng: random.Random) -> Step:
    """What a scheduler may not say in a step, or would better not; some of it at once."""
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
    first, count = (rng.choices(COUNTS, k=rng.choice([2, len(keys)])) for _ in range(2))
    blocks = {"first": IntArray.of(first, "u2"), "count": IntArray.of(count, "u2")}
    return {"keys": keys} | _slots(rng, len(keys)) | blocks


def _pins(rng: random.Random) -> dict[str, Any]:
    """Chunks that are not READY, not there, or not of this namespace; leases by one number."""
    pins = []
    for _ in range(rng.choice([1, 2, 30])):
        lease, lease_ms = rng.choice(LEASES), rng.choice([1, 5000, 600_000])
        pins.append(Pin(lease=lease, lease_ms=lease_ms, **_slots(rng, rng.choice([0, 1, 3]))))
    return {"pins": tuple(pins)}


def _uses(rng: random.Random) -> dict[str, Any]:
    """Requests that have finished, with counts and labels that may contradict each other."""
    counts, prompts = (rng.choices(COUNTS[:5], k=rng.choice([0, 1, 2])) for _ in range(2))
    return {
        "used": tuple(rng.choices(KEYS, k=rng.choice([sum(counts) % 16, 3]))),
        "used_counts": IntArray.of(counts, "u4"),
        "prompt_counts": IntArray.of(rng.choice([counts, prompts]), "u4"),
        "labels": rng.choice([b"", bytes(rng.randrange(256) for _ in counts), b"\0" * 3]),
    }


def _slots(rng: random.Random, count: int) -> dict[str, Any]:
    if rng.random() < 0.5:  # a slot with the generation that it was lent with
        places = rng.choices(range(8), k=count)
        slots = arrays([SLOT + at for at in places], [GENERATION + at for at in places])
    else:
        slots = arrays(rng.choices(SLOTS, k=count), rng.choices(GENERATIONS, k=count))
    if rng.random() < 0.1:
        slots["generations"] = IntArray.of(tuple(range(count + 1)), "u8")
    return slots


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
