"""Checks of what callers pass: one sentence that names the value and what is needed.

Raised before anything is done, so that nothing has changed and no thread of ours
meets a value that it cannot send.
"""

import os
import reprlib
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import numpy as np

from kvd_client.errors import UsageError

MAX_SECONDS = 1e7  # what is above is a mistake, and more than a lock's timeout may be

T = TypeVar("T", bound=msgspec.Struct)


def shown(value: object) -> str:
    """`repr`, short enough for a message."""
    return reprlib.repr(value)


def seconds(name: str, value: object) -> float:
    """A time that somebody waits at most.

    Raises:
        UsageError: no number, below 0, or absurd.
    """
    if not isinstance(value, (int, float)) or not 0 <= value <= MAX_SECONDS:
        raise UsageError(f"{name}={shown(value)}: seconds are needed, 0 to {MAX_SECONDS:g}")
    return float(value)


def whole(name: str, value: object, low: int, high: int = 2**63 - 1) -> int:
    """A whole number within bounds. The wire tells numbers from truth values, so this does too.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UsageError(f"{name}={shown(value)}: a whole number is needed, {low} to {high}")
    return value


def flag(name: str, value: object) -> bool:
    """A truth value.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise UsageError(f"{name}={shown(value)}: True or False is needed")
    return bool(value)


def size_of_file(fd: int) -> int:
    """Bytes of the file that a descriptor is of.

    Raises:
        UsageError: it is not open.
    """
    try:
        return os.fstat(fd).st_size
    except (OSError, OverflowError) as error:
        raise UsageError(f"fd={shown(fd)}: an open descriptor is needed: {error}") from error


def collection(name: str, value: object, of: str) -> tuple[Any, ...]:
    """Several things, as they are now; a text or bytes are one thing.

    Raises:
        UsageError: it is none.
    """
    if isinstance(value, (bytes, bytearray, memoryview, str)) or not isinstance(value, Iterable):
        raise UsageError(f"{name}={shown(value)}: a collection of {of} is needed, such as a list")
    try:
        return tuple(value)
    except TypeError as error:  # such as an array without dimensions
        raise UsageError(f"{name}={shown(value)}: a collection of {of} is needed") from error


def declared(name: str, value: object, kind: type[T]) -> T:
    """A value all of whose fields have the types that they are declared with.

    Raises:
        UsageError: it is of another class, or names the field that has another type.
    """
    if not isinstance(value, kind):
        raise UsageError(f"{name}={shown(value)}: a {kind.__name__} is needed")
    try:
        plain = msgspec.to_builtins(value, builtin_types=(bytes,))
        return msgspec.convert(plain, kind, builtin_types=(bytes,))
    except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{name}: {error}; its numbers must be plain int, its names str"
        ) from error
