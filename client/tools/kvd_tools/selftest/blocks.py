"""Memory of the self-test on one device: blocks that are written and read past the daemon."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvd_client import cuda_driver
from kvd_client.cuda_memory import DeviceMemory
from kvd_client.errors import CudaError, UnsupportedMemory
from kvd_client.memory import HostMemory
from kvd_proto.devices import HOST, cuda_device
from kvd_tools.errors import StepFailed

Bytes = npt.NDArray[np.uint8]
_NO_DEVICE = "CUDA_ERROR_NO_DEVICE"


class HostBlocks:
    """`count` blocks of `size` bytes in shared host memory, one storage: `memory`."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.memory: HostMemory = HostMemory.allocate(count * size)
        self._rows = self.memory.array.reshape(count, size)

    def write(self, block: int, data: Bytes) -> None:
        """Put u8[size] into a block; it is there when this returns."""
        self._rows[block] = data

    def read(self, block: int) -> Bytes:
        """Return what is in a block now, a copy of u8[size]."""
        data: Bytes = self._rows[block].copy()
        return data

    def close(self) -> None:
        """Give the memory back; the daemon must have let go of it."""
        self.memory.close()


class CudaBlocks:
    """`count` blocks of `size` bytes on a CUDA device of this process, one storage: `memory`.

    Raises:
        CudaError: the driver refuses.
        UnsupportedMemory: there is no driver, or it lets nobody share memory.
    """

    def __init__(self, ordinal: int, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._context = cuda_driver.PrimaryContext(ordinal)
        with self._context.current():
            self._address = cuda_driver.allocate(count * size)
            self.memory: DeviceMemory = DeviceMemory.at(self._address, count * size)

    def write(self, block: int, data: Bytes) -> None:
        """Put u8[size] into a block; it is there when this returns."""
        whole = np.ascontiguousarray(data)
        with self._context.current():
            cuda_driver.copy_in(self._address + block * self.size, whole.ctypes.data, self.size)

    def read(self, block: int) -> Bytes:
        """Return what is in a block now, a copy of u8[size]."""
        data = np.empty(self.size, np.uint8)
        with self._context.current():
            cuda_driver.copy_out(data.ctypes.data, self._address + block * self.size, self.size)
        return data

    def close(self) -> None:
        """Give the memory back; the daemon must have let go of it."""
        self.memory.close()
        with self._context.current():
            cuda_driver.free(self._address)
        self._context.release()


Blocks: TypeAlias = HostBlocks | CudaBlocks


def visible_devices() -> dict[str, int]:
    """CUDA devices of this process, name to ordinal; none without a driver or a device.

    Raises:
        CudaError: there is a driver, and it refuses.
    """
    try:
        ordinals = range(cuda_driver.count_devices())
        return {
            cuda_device(cuda_driver.uuid_of(ordinal), mig=cuda_driver.is_mig(ordinal)): ordinal
            for ordinal in ordinals
        }
    except UnsupportedMemory:
        return {}
    except CudaError as error:
        if error.name == _NO_DEVICE:
            return {}
        raise


def make_blocks(device: str, count: int, size: int) -> Blocks:
    """New blocks on a device.

    Raises:
        StepFailed: this process does not see the device.
    """
    if device == HOST:
        return HostBlocks(count, size)
    ordinal = visible_devices().get(device)
    if ordinal is None:
        raise StepFailed(
            f"this process does not see {device}; run the self-test where the device is visible"
            " (nvidia-smi -L, CUDA_VISIBLE_DEVICES), or leave it out by --device"
        )
    return CudaBlocks(ordinal, count, size)
