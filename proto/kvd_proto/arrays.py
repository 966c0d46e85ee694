"""Integer arrays on the wire: a declared dtype and little-endian bytes.

The bytes are viewed, not copied, on decoding: `IntArray.numpy()` is
`np.frombuffer` over the received bytes, hence read-only.
"""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvd_proto.errors import WrongType

DType = Literal["u1", "u2", "u4", "u8", "i4", "i8"]
_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype("<" + name) for name in ("u1", "u2", "u4", "u8", "i4", "i8")
}


class IntArray(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A one-dimensional integer array: `[dtype, little-endian bytes]`."""

    dtype: DType
    data: bytes

    def __post_init__(self) -> None:
        width = _DTYPES[self.dtype].itemsize
        if len(self.data) % width:
            raise ValueError(
                f"{len(self.data)} bytes are no whole number of {self.dtype} items ({width} bytes)"
            )

    @classmethod
    def of(cls, values: Iterable[int] | npt.NDArray[Any], dtype: DType) -> "IntArray":
        """Pack `values`, refusing those that `dtype` cannot hold.

        Raises:
            WrongType: a value is no integer or lies outside the dtype's range.
        """
        array = np.asarray(values if isinstance(values, np.ndarray) else list(values))
        if array.ndim != 1:
            raise WrongType(f"an array of {array.ndim} dimensions, one is needed")
        target = _DTYPES[dtype]
        if array.dtype != target:
            if array.size and array.dtype.kind not in "iu":
                raise WrongType(f"integers are needed, got dtype {array.dtype}")
            info = np.iinfo(target)
            if array.size and (int(array.min()) < info.min or int(array.max()) > info.max):
                raise WrongType(
                    f"values {array.min()}..{array.max()} do not fit {dtype}"
                    f" ({info.min}..{info.max})"
                )
            array = array.astype(target)
        return cls(dtype, array.tobytes())

    def numpy(self) -> npt.NDArray[Any]:
        """The values as a read-only array over the received bytes (no copy)."""
        return np.frombuffer(self.data, dtype=_DTYPES[self.dtype])

    def __len__(self) -> int:
        return len(self.data) // _DTYPES[self.dtype].itemsize

    def __repr__(self) -> str:
        return f"<IntArray {self.dtype}[{len(self)}]>"
