"""Memory of the self-test on one device: blocks that are written and read past the daemon."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvd_client import cuda_driver
from kvd_client.errors import CudaError, UnsupportedMemory
from kvd_client.memory import DeviceMemory, HostMemory
from kvd_proto.messages import HOST
from kvd_tools.errors import StepFailed

Bytes = npt.NDArray[np.uint8]
_NO_DEVICE = "CUDA_ERROR_NO_DEVICE"


class CudaRows:
    """Blocks of `size` bytes at a device's address, u8[size] each, as rows of an array."""

    def __init__(self, context: cuda_driver.PrimaryContext, address: int, size: int) -> None:
        self._context, self._address, self._size = context, address, size

    def __setitem__(self, block: int, data: Bytes) -> None:
        whole = np.ascontiguousarray(data)
        with self._context.current():
            cuda_driver.copy_in(self._address + block * self._size, whole.ctypes.data, self._size)

    def __getitem__(self, block: int) -> Bytes:
        data = np.empty(self._size, np.uint8)
        with self._context.current():
            cuda_driver.copy_out(data.ctypes.data, self._address + block * self._size, self._size)
        return data


Rows = Bytes | CudaRows


@contextmanager
def blocks_on(
    device: str, count: int, size: int
) -> Iterator[tuple[HostMemory | DeviceMemory, Rows]]:
    """Yield the memory of new blocks, one storage, and its rows; given back with the context.

    Raises:
        StepFailed: this process does not see the device.
        CudaError: the driver refuses.
        UnsupportedMemory: there is no driver, or it lets nobody share memory.
    """
    if device == HOST:
        memory = HostMemory.allocate(count * size)
        yield memory, memory.array.reshape(count, size)
        memory.close()
        return
    ordinal = visible_devices().get(device)
    if ordinal is None:
        raise StepFailed(
            f"this process does not see {device}; run the self-test where the device is visible"
            " (nvidia-smi -L, CUDA_VISIBLE_DEVICES), or leave it out by --device"
        )
    context = cuda_driver.PrimaryContext(ordinal)
    with context.current():
        address = cuda_driver.allocate(count * size)
        shared = DeviceMemory.at(address, count * size)
    yield shared, CudaRows(context, address, size)
    shared.close()
    with context.current():
        cuda_driver.free(address)
    context.release()


def visible_devices() -> dict[str, int]:
    """CUDA devices of this process, name to ordinal; none without a driver or a device.

    Raises:
        CudaError: there is a driver, and it refuses.
    """
    try:
        return {cuda_driver.device_name(n): n for n in range(cuda_driver.count_devices())}
    except UnsupportedMemory:
        return {}
    except CudaError as error:
        if error.name == _NO_DEVICE:
            return {}
        raise
