"""Values that a field of a message could have and better had not, by the field's declared type."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from msgspec import inspect

from kvd_proto.arrays import IntArray
from kvd_proto.messages import TAGS

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, float("nan"), float("inf"), "", "text", b"", b"\0" * 16),
    *([], [[]], {}, {"more": 1}, 2**63, 2**64 - 1, -(2**63), "\0", "é\u202e" * 20),
)
NUMBERS = (0, 1, -1, 2, 63, 64, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32)
LARGE_NUMBERS = (2**47, 2**48, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
DTYPES = ("u1", "u2", "u4", "u8", "i4", "i8", "f4", "O", "")
LONG = (47, 48, 49, 255, 256, 257, 4096, 4097, 65536)


@cache
def fields_of(tag: int) -> inspect.Type | None:
    """The declaration of the message with this tag."""
    kind = TAGS.get(tag)
    return None if kind is None else inspect.type_info(kind)


def changed(rng: random.Random, value: Any, declared: inspect.Type) -> Any:
    """`value` with one thing in it that is different, as a rule near what is allowed."""
    if rng.random() < 0.1:
        return rng.choice(JUNK)
    handler = _HANDLERS.get(type(declared))
    if handler is None:
        return rng.choice(JUNK)
    try:
        return handler(rng, value, declared)
    except (TypeError, KeyError, IndexError, AttributeError):  # mutated before: no such value
        return rng.choice(JUNK)


def _struct(rng: random.Random, value: Any, declared: Any) -> Any:
    if declared.cls is IntArray:
        return _array(rng, value)
    new = dict(value)
    choice = rng.random()
    if choice < 0.05 and new:
        del new[rng.choice(sorted(new))]
    elif choice < 0.08:
        new["more"] = rng.choice(JUNK)
    else:
        name, kind = rng.choice([(f.encode_name, f.type) for f in declared.fields])
        new[name] = changed(rng, new.get(name), kind)
    return new


def _array(rng: random.Random, value: Any) -> Any:
    """An IntArray: other items, more or fewer of them, another dtype, half an item."""
    dtype, data = value
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


def _shuffled(rng: random.Random, items: list[Any], last: Any) -> list[Any]:
    new = list(items)
    match rng.randrange(6):
        case 0:
            return []
        case 1:
            return new[: rng.randint(0, len(new))]
        case 2:
            return new + new
        case 3:
            rng.shuffle(new)
        case 4:
            return [*new, last]
        case _:
            return new + [last] * rng.choice([10, 300, 5000])
    return new


def _sequence(rng: random.Random, value: Any, declared: Any) -> Any:
    items = list(value)
    if rng.random() < 0.3 or not items:
        return _shuffled(rng, items, items[-1] if items else rng.choice(JUNK))
    place = rng.randrange(len(items))
    items[place] = changed(rng, items[place], declared.item_type)
    return items


def _union(rng: random.Random, value: Any, declared: Any) -> Any:
    tagged = value.get("type") if isinstance(value, dict) else None
    for kind in declared.types:
        if isinstance(kind, inspect.StructType) and kind.tag == tagged:
            return changed(rng, value, kind)
    return changed(rng, value, rng.choice(declared.types))


def _integer(rng: random.Random, value: Any, declared: Any) -> Any:
    near = [limit for limit in (declared.ge, declared.gt, declared.le, declared.lt) if limit]
    around = [limit + step for limit in near for step in (-1, 0, 1)]
    if isinstance(value, int):
        around += [value + 1, value - 1, value * 2, value // 2, -value]
    number = rng.choice([*around, *NUMBERS, *LARGE_NUMBERS])
    return min(max(number, -(2**63)), 2**64 - 1)


def _float(rng: random.Random, value: Any, declared: Any) -> Any:
    del value, declared
    return rng.choice([0.0, -0.0, -1.0, 1e9, 1e9 + 1, 1e308, 5e-324, float("nan"), float("inf"), 3])


def _text(rng: random.Random, value: Any, declared: Any) -> Any:
    del declared
    long = rng.choice(LONG)
    return rng.choice(["", "x" * long, "\n\x1b[31m\0", "é" * long, "../..", "host", f"{value}x"])


def _bytes(rng: random.Random, value: Any, declared: Any) -> Any:
    del declared
    return rng.choice([b"", bytes(rng.choice(LONG)), rng.randbytes(16), bytes(value) + b"x"])


def _literal(rng: random.Random, value: Any, declared: Any) -> Any:
    del value
    return rng.choice([*declared.values, "nothing"])


def _enum(rng: random.Random, value: Any, declared: Any) -> Any:
    del value
    return rng.choice([*(member.value for member in declared.cls), "nothing"])


def _bool(rng: random.Random, value: Any, declared: Any) -> Any:
    del declared
    return rng.choice([not value, 0, 1, None])


def _none(rng: random.Random, value: Any, declared: Any) -> Any:
    del value, declared
    return rng.choice(JUNK)


_HANDLERS: dict[type[inspect.Type], Callable[[random.Random, Any, Any], Any]] = {
    inspect.StructType: _struct,
    inspect.VarTupleType: _sequence,
    inspect.UnionType: _union,
    inspect.IntType: _integer,
    inspect.FloatType: _float,
    inspect.StrType: _text,
    inspect.BytesType: _bytes,
    inspect.LiteralType: _literal,
    inspect.EnumType: _enum,
    inspect.BoolType: _bool,
    inspect.NoneType: _none,
}
