"""Integer arrays on the wire: a declared dtype and little-endian bytes.

The bytes are viewed, not copied, on decoding: `IntArray.numpy()` is
`np.frombuffer` over the received bytes, hence read-only.
"""

from array import array
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvd_proto.errors import Oversize, WrongType

MAX_ARRAY_ITEMS = 65536
"""Items of an array or a list in one message, at most."""
FEW = 64
"""Items up to which plain numbers are faster than numpy, whose every call costs as much as many."""

Integers: TypeAlias = Iterable[int] | npt.NDArray[Any]
DType = Literal["u1", "u2", "u4", "u8"]
_TYPECODES: dict[DType, Literal["B", "H", "I", "Q"]] = {"u1": "B", "u2": "H", "u4": "I", "u8": "Q"}
"""Of this machine: little-endian."""
_DTYPES = {dtype: np.dtype("<" + dtype) for dtype in _TYPECODES}
_WIDTHS: dict[DType, int] = {"u1": 1, "u2": 2, "u4": 4, "u8": 8}


class IntArray(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A one-dimensional integer array: `[dtype, little-endian bytes]`.

    Raises:
        ValueError: the bytes are no whole number of items, or hold above `MAX_ARRAY_ITEMS`; on
            decoding the codec makes its own errors of it.
    """

    dtype: DType
    data: bytes

    def __post_init__(self) -> None:
        width, nbytes = _WIDTHS[self.dtype], len(self.data)
        if nbytes % width:
            raise ValueError(
                f"{nbytes} bytes are no whole number of {self.dtype} items ({width} bytes)"
            )
        if nbytes > MAX_ARRAY_ITEMS * width:
            raise ValueError(_too_many(nbytes // width))

    @classmethod
    def of(cls, values: Integers, dtype: DType) -> "IntArray":
        """Pack `values`.

        Raises:
            WrongType: a value is no integer or lies outside the dtype's range.
            Oversize: above `MAX_ARRAY_ITEMS` values.
        """
        listed = values.tolist() if isinstance(values, np.ndarray) else values
        try:
            # An iterator, lest bytes be taken for the array's own; a list is faster without.
            given = listed if type(listed) is list else iter(listed)
            numbers = array(_TYPECODES[dtype], given)
        except (TypeError, OverflowError) as error:
            raise WrongType(f"integers that fit {dtype} are needed: {error}") from error
        if len(numbers) > MAX_ARRAY_ITEMS:
            raise Oversize(_too_many(len(numbers)))
        return cls(dtype, numbers.tobytes())

    def numpy(self) -> npt.NDArray[Any]:
        """The values as a read-only array over the received bytes (no copy)."""
        return np.frombuffer(self.data, _DTYPES[self.dtype])

    def array(self) -> "array[int]":
        """The values, copied; faster than numpy to make, and to add to."""
        return array(_TYPECODES[self.dtype], self.data)

    def tolist(self) -> list[int]:
        """The values; where they are few, faster than an array is made."""
        return memoryview(self.data).cast(_TYPECODES[self.dtype]).tolist()

    def extent(self) -> tuple[int, int]:
        """The smallest and the largest value.

        Raises:
            ValueError: there is none.
        """
        if len(self) <= FEW:
            values = self.tolist()
            return min(values), max(values)
        many = self.numpy()
        return int(many.min()), int(many.max())

    def __len__(self) -> int:
        return len(self.data) // _WIDTHS[self.dtype]

    def __repr__(self) -> str:
        return f"<IntArray {self.dtype}[{len(self)}]>"


def _too_many(count: int) -> str:
    return f"an array of {count} items, at most {MAX_ARRAY_ITEMS} fit a message"
