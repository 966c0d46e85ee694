"""Pinned host memory and device memory of the lane's own, to try and to time copies."""

import mmap

import numpy as np
import numpy.typing as npt

from kvd.lane.devices.cuda import driver
from kvd.lane.devices.cuda.cleanup import Cleanup
from kvd.lane.devices.cuda.runs import Runs


class Scratch:
    """As much host memory as device memory.

    Args:
        nbytes: of each; a multiple of the page size.

    Raises:
        CudaError: it cannot be had.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = mmap.mmap(-1, nbytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        self._host = self.bytes.ctypes.data
        self._cleanup = Cleanup()
        with self._cleanup.on_failure():
            driver.register_host(self._host, nbytes)
            self._cleanup.add(lambda: driver.unregister_host(self._host))
            self._shift = (driver.device_address(self._host) - self._host) % 2**64
            self._device = driver.allocate(nbytes)
            self._cleanup.add(lambda: driver.free(self._device))

    def runs(self, nbytes: int, count: int) -> Runs:
        """This many runs of this many bytes, no two of them neighbours where there is room."""
        stride = max(nbytes, self.nbytes // count // 16 * 16)
        offsets = np.arange(count, dtype=np.uint64) * np.uint64(stride)
        return Runs(
            host=offsets + np.uint64(self._host),
            device=offsets + np.uint64(self._device),
            nbytes=np.full(count, nbytes, np.uint64),
            kernel_shift=np.full(count, self._shift, np.uint64),
        )

    def host_offsets(self, runs: Runs) -> npt.NDArray[np.int64]:
        """Where the runs lie in `bytes`."""
        return (runs.host - np.uint64(self._host)).astype(np.int64)

    def close(self) -> None:
        """Let go of it; nothing may be in flight.

        Raises:
            CudaError: the driver refuses.
        """
        self._cleanup.run()

    def __repr__(self) -> str:
        return f"<Scratch {self.nbytes} bytes>"
