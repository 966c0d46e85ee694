"""Copies, one by one and in batches."""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.errors import CudaError
from kvd.lane.devices.cuda.driver.calls import bindings, call, check, shown, version
from kvd.lane.devices.cuda.driver.streams import Stream

Addresses = npt.NDArray[np.uint64]

# Forms of cuMemcpyBatchAsync: the version that brought one, and whether that also tells which copy
# was wrong. A driver has those that are not newer than itself.
_BATCH_FORMS = ((13000, False), (12080, True))
# From here on CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE means the copy engines.
_OVERLAP_SINCE = 13010


def copy(target: int, source: int, nbytes: int, stream: Stream) -> None:
    """Enqueue one copy; its source is read when the stream gets there."""
    call("enqueueing a copy", "cuMemcpyAsync", target, source, nbytes, stream)


class BatchCopy:
    """`cuMemcpyBatchAsync`, called with columns of numbers as they lie in memory.

    The bindings take lists of address objects, which for a piece of 500 runs cost more than
    the copy; so the function that they resolve is called by its address.

    Args:
        overlap: ask for the copy engines, where the driver might copy by kernels, which take
            the device from whoever computes. Of drivers from CUDA 13.1 on; others refuse
            the first batch.

    Attributes:
        overlap: as asked.
        tells_index: whether this driver's form tells which copy was wrong.

    Raises:
        CudaError: this driver has none.
    """

    def __init__(self, *, overlap: bool = False) -> None:
        attempted = "looking for cuMemcpyBatchAsync"
        cuda, have = bindings(), version()
        # The newest that the driver has: asked for a newer one, it could answer with an older form.
        form = next((form for form in _BATCH_FORMS if form[0] <= have), None)
        if form is None:
            raise CudaError(-1, f"not in a driver for CUDA {shown(have)}", attempted)
        wanted, self.tells_index = form
        flags = cuda.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
        named = (b"cuMemcpyBatchAsync", wanted, flags)
        address, status = call(attempted, "cuGetProcAddress", *named)
        if not int(address):
            raise CudaError(-1, f"not in this driver ({status.name})", attempted)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._function = ctypes.CFUNCTYPE(
            ctypes.c_int,
            *(pointer, pointer, pointer, size),  # targets, sources, sizes, count
            *(pointer, pointer, size),  # attributes, first indices, their number
            *((pointer,) if self.tells_index else ()),
            pointer,  # stream
        )(int(address))
        self.overlap = overlap
        self._attributes = [_attributes(order, overlap) for order in ("STREAM", "ANY")]
        # The attributes count from copy 0 on. Both are only read, or of no interest.
        self._first, self._wrong = ctypes.c_size_t(0), ctypes.c_size_t(0)
        first = ctypes.addressof(self._first)
        ends = (ctypes.addressof(self._wrong),) if self.tells_index else ()
        # By whether the order is any: what follows the number of copies.
        self._rest = [(each.getPtr(), first, 1, *ends) for each in self._attributes]

    @staticmethod
    def can_ask_overlap() -> bool:
        """Whether this driver may know `overlap`.

        Raises:
            CudaError: the driver does not report its version.
        """
        return version() >= _OVERLAP_SINCE

    def enqueue(
        self,
        targets: int,
        sources: int,
        sizes: int,
        count: int,
        stream: Stream,
        *,
        source_in_any_order: bool,
    ) -> None:
        """Enqueue copies, in any order among themselves.

        Args:
            targets: where uint64[count] lie, each an address as the device knows it.
            sources: the same.
            sizes: the same, in bytes.
            count: of copies, at least one.
            stream: where.
            source_in_any_order: sources may be read at any time until the copies have ended;
                otherwise not before the stream gets there.
        """
        rest = self._rest[source_in_any_order]
        # The bindings' handles are numbers.
        code = self._function(targets, sources, sizes, count, *rest, int(stream))  # type: ignore[call-overload]
        if code:
            check(bindings().CUresult(code), f"enqueueing {count} copies")

    def __repr__(self) -> str:
        return f"in batches{', by the copy engines only' if self.overlap else ''}"


def _attributes(order: str, overlap: bool) -> Any:
    cuda = bindings()
    made = cuda.CUmemcpyAttributes()
    made.srcAccessOrder = getattr(
        cuda.CUmemcpySrcAccessOrder, f"CU_MEMCPY_SRC_ACCESS_ORDER_{order}"
    )
    made.flags = int(overlap and cuda.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
    return made
