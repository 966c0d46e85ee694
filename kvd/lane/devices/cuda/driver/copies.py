"""Copies, one by one and in batches."""

import ctypes

import numpy as np
import numpy.typing as npt

from kvd.errors import CudaError
from kvd.lane.devices.cuda.driver.calls import bindings, call, check, shown, version
from kvd.lane.devices.cuda.driver.streams import Stream

Addresses = npt.NDArray[np.uint64]

# Forms of cuMemcpyBatchAsync: the version that brought one, and whether that also tells which copy
# was wrong. A driver has those that are not newer than itself.
_BATCH_FORMS = ((13000, False), (12080, True))


def copy(target: int, source: int, nbytes: int, stream: Stream) -> None:
    """Enqueue one copy; its source is read when the stream gets there."""
    call("enqueueing a copy", "cuMemcpyAsync", target, source, nbytes, stream)


class BatchCopy:
    """`cuMemcpyBatchAsync`, called with arrays.

    The bindings take lists of address objects, which for a piece of 500 runs cost more than
    the copy; so the function that they resolve is called with pointers to the arrays.

    Attributes:
        tells_index: whether this driver's form tells which copy was wrong.

    Raises:
        CudaError: this driver has none.
    """

    def __init__(self) -> None:
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
        orders = cuda.CUmemcpySrcAccessOrder
        self._attributes = []  # by whether the order is any
        for order in ("STREAM", "ANY"):
            attributes = cuda.CUmemcpyAttributes()
            attributes.srcAccessOrder = getattr(orders, f"CU_MEMCPY_SRC_ACCESS_ORDER_{order}")
            self._attributes.append(attributes)

    def enqueue(
        self,
        targets: Addresses,
        sources: Addresses,
        sizes: Addresses,
        stream: Stream,
        *,
        source_in_any_order: bool,
    ) -> None:
        """Enqueue copies, in any order among themselves.

        Args:
            targets: uint64[n], contiguous, n > 0.
            sources: the same.
            sizes: the same, in bytes.
            stream: where.
            source_in_any_order: sources may be read at any time until the copies have ended;
                otherwise not before the stream gets there.
        """
        attributes = self._attributes[source_in_any_order]
        first, wrong = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = self._function(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(targets),
            attributes.getPtr(),
            ctypes.addressof(first),  # the attributes count from copy 0 on
            1,
            *((ctypes.addressof(wrong),) if self.tells_index else ()),
            int(stream),  # type: ignore[call-overload]  # the bindings' handles are numbers
        )
        check(bindings().CUresult(code), f"enqueueing {len(targets)} copies")
