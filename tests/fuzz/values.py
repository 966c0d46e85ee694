"""Values that a message's field could have and better had not, near the value that it has."""

import random
from typing import Any

import numpy as np

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, float("nan"), float("inf"), "", "text", b"", b"\0" * 16),
    *([], [[]], {}, {"more": 1}, 2**63, 2**64 - 1, -(2**63), "\0", "é\u202e" * 20),
)
NUMBERS = (0, 1, -1, 2, 63, 64, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32)
LARGE_NUMBERS = (600_000, 600_001, 2**47, 2**48, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
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
            number = rng.choice([*near, *NUMBERS, *LARGE_NUMBERS])
            return min(max(number, -(2**63)), 2**64 - 1)
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
        number = rng.choice((*NUMBERS, *LARGE_NUMBERS, int(info.max)))
        place = rng.randrange(len(items))
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
    match rng.randrange(6):
        case 0:
            return []
        case 1:
            return items[: rng.randint(0, len(items))]
        case 2:
            return items + items
        case 3:
            return rng.sample(items, len(items))
        case 4:
            return [*items, last]
        case _:
            return items + [last] * rng.choice([10, 300, 5000])
