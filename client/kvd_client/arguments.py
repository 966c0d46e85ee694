"""Checks of what callers pass: a `UsageError` names the value and what is needed.

They come before anything is done, so that a refused call has changed nothing and no
background thread meets a value that it cannot send.
"""

import reprlib
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from kvd_client.errors import UsageError
from kvd_proto.descriptions import MAX_DESCRIPTION_BYTES
from kvd_proto.directory import MAX_BLOCKS
from kvd_proto.messages import MAX_KEY_BYTES, MAX_KEYS, Label

MAX_SECONDS = 1e7  # more is a mistake, and above what a lock's timeout may be
Blocks: TypeAlias = tuple[int, int]
"""Some consecutive blocks of a chunk: the first, counted within the chunk, and how many."""

T = TypeVar("T", bound=msgspec.Struct)


shown = reprlib.repr  # short enough for a message


def seconds(
    name: str, value: object, highest: float = MAX_SECONDS, *, positive: bool = False
) -> float:
    """Check a duration."""
    if not isinstance(value, (int, float)) or not 0 <= value <= highest or (positive and not value):
        lowest = "above 0" if positive else "0"
        raise UsageError(f"{name}={shown(value)}: seconds are needed, {lowest} to {highest:g}")
    return float(value)


def whole(name: str, value: object, low: int, high: int = 2**63 - 1) -> int:
    """Check an integer; as on the wire a truth value is none."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UsageError(f"{name}={shown(value)}: a whole number is needed, {low} to {high}")
    return value


def flag(name: str, value: object) -> bool:
    """Check a truth value."""
    if not isinstance(value, (bool, np.bool_)):
        raise UsageError(f"{name}={shown(value)}: True or False is needed")
    return bool(value)


def request_label(value: object) -> Label:
    """Check a label."""
    try:
        return Label(value)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        names = ", ".join(label.name for label in Label)
        raise UsageError(f"label={shown(value)}: one of kvd_client.Label, {names}") from None


def collection(name: str, value: object, of: str) -> tuple[Any, ...]:
    """Return the items of an iterable as a tuple; text and bytes are no collections."""
    if isinstance(value, (bytes, bytearray, memoryview, str)) or not isinstance(value, Iterable):
        raise UsageError(f"{name}={shown(value)}: a collection of {of} is needed, such as a list")
    try:
        return tuple(value)
    except TypeError as error:  # such as an array without dimensions
        raise UsageError(f"{name}={shown(value)}: a collection of {of} is needed") from error


def check_key(key: object) -> None:
    """Check a chunk's key."""
    if not isinstance(key, bytes):
        raise UsageError(f"a key is bytes, not {type(key).__name__}")
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise UsageError(
            f"a key of {len(key)} bytes: 1 to {MAX_KEY_BYTES} are possible; hash longer ones"
        )


def request_keys(values: object) -> tuple[bytes, ...]:
    """Check the keys of one request."""
    wanted = collection("keys", values, "keys")
    if len(wanted) > MAX_KEYS:
        raise UsageError(f"{len(wanted)} keys in one call: {MAX_KEYS} at most; split the call")
    for key in wanted:
        check_key(key)
    return wanted


def check_blocks(first: object, count: object) -> None:
    """Check a range of blocks within a chunk; without a count it has all that follow."""
    begin = whole("first", first, 0, MAX_BLOCKS - 1)
    if count is not None:
        whole("count", count, 1, MAX_BLOCKS - begin)


def block_ranges(blocks: object, number: int) -> list[Blocks] | None:
    """Check the blocks of each of so many keys; None: all blocks of all."""
    if blocks is None:
        return None
    pairs = collection("blocks", blocks, "pairs (first block, count)")
    if len(pairs) != number:
        raise UsageError(f"{len(pairs)} blocks with {number} keys: one pair for each is needed")
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise UsageError(f"blocks={shown(pair)}: a pair (first block, count) is needed")
        check_blocks(pair[0], whole("count", pair[1], 1, MAX_BLOCKS))
    return [(first, count) for first, count in pairs]


def no_description(number: int) -> bytes:
    """Describe no chunk."""
    del number
    return b""


def chunk_descriptions(values: object, number: int) -> tuple[Callable[[int], bytes], int | None]:
    """Check the descriptions of so many keys' chunks; None: of none.

    Returns:
        What tells that of the i-th one; how many bytes they have in all, None where that is not
        known.
    """
    if values is None:
        return no_description, 0
    if callable(values):
        return values, None
    found = collection("descriptions", values, "bytes or None")
    if len(found) != number:
        raise UsageError(f"{len(found)} descriptions with {number} keys: one for each is needed")
    for each in found:
        if each is not None and not (
            isinstance(each, bytes) and len(each) <= MAX_DESCRIPTION_BYTES
        ):
            raise UsageError(
                f"descriptions={shown(each)}: what kvd_proto.descriptions.encode returned is"
                f" needed, {MAX_DESCRIPTION_BYTES} bytes at most, or None"
            )
    described = [each or b"" for each in found]
    return described.__getitem__, sum(map(len, described))


def declared(name: str, value: object, kind: type[T]) -> T:
    """Check that all fields of a struct have the types that they are declared with."""
    if not isinstance(value, kind):
        raise UsageError(f"{name}={shown(value)}: a {kind.__name__} is needed")
    try:
        plain = msgspec.to_builtins(value, builtin_types=(bytes,))
        return msgspec.convert(plain, kind, builtin_types=(bytes,))
    except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{name}: {error}; its numbers must be plain int, its names str"
        ) from error
