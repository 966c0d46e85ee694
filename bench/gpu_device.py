"""A GPU as the benchmark itself uses it: buffers, streams, and the copies kvd is held against."""

import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver as bindings

from kvd.errors import CudaError
from kvd.lane.devices.cuda import driver
from kvd.lane.devices.cuda.driver import BatchCopy
from kvd.lane.devices.device import PIECE_BYTES, Direction

Bytes = npt.NDArray[np.uint8]
WARM_SECONDS, WARM_BYTES = 1.0, 64 * 2**20
MOST_COPIES = 2**16  # of one call of `batched`: a driver may need microseconds for each
_VERSION = Path("/sys/module/nvidia/version")


class Gpu:
    """The first device that this process sees, its context, and a stream for each direction.

    Raises:
        LaneError: there is no driver or no device; the text says what to do.
    """

    def __init__(self) -> None:
        driver.start()
        (self.device, _), *_ = driver.devices()
        self.context = driver.retain_context(self.device)
        self.use()
        self.streams = {direction: driver.create_stream(0) for direction in Direction}

    def use(self) -> None:
        """Make its context the calling thread's."""
        driver.use_context(self.context)

    def describe(self) -> dict[str, str | int]:
        """Its name, and the versions of the kernel's driver and of CUDA."""
        kernel = _VERSION.read_text(encoding="ascii").strip() if _VERSION.exists() else "unknown"
        return {
            "device": driver.device_name(self.device),
            "driver": kernel,
            "cuda": driver.version(),
        }

    def free_bytes(self) -> int:
        """Memory of the device that nobody uses."""
        free, _ = _call("cuMemGetInfo")
        return int(free)

    def write(self, address: int, data: Bytes) -> None:
        """Copy into device memory, and wait."""
        _call("cuMemcpyHtoD", address, data.ctypes.data, data.nbytes)
        _call("cuStreamSynchronize", 0)  # it may return before pageable bytes have arrived

    def read(self, address: int, nbytes: int) -> Bytes:
        """Copy out of device memory, and wait."""
        data = np.empty(nbytes, np.uint8)
        _call("cuMemcpyDtoH", data.ctypes.data, address, nbytes)
        return data

    def warm(self, seconds: float = WARM_SECONDS) -> None:
        """Keep the device and the bus busy for so long: an idle device has low clocks."""
        pinned = Pinned(2 * WARM_BYTES)
        host, device = pinned.address, driver.allocate(2 * WARM_BYTES)
        load, store = self.streams[Direction.LOAD], self.streams[Direction.STORE]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            driver.copy(device, host, WARM_BYTES, load)
            driver.copy(host + WARM_BYTES, device + WARM_BYTES, WARM_BYTES, store)
            _call("cuMemsetD8Async", device, 0, WARM_BYTES, load)  # its processors too
            self.wait()
        pinned.close()
        driver.free(device)

    def wait(self) -> None:
        """Until both streams are idle."""
        for stream in self.streams.values():
            driver.wait_for_stream(stream)


class Pinned:
    """Pinned host memory at `address`, all of its pages there."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes)
        host = np.frombuffer(self._memory, np.uint8)
        host[:] = 1
        self.address = host.ctypes.data
        driver.register_host(self.address, nbytes)

    def close(self) -> None:
        """Unpin it."""
        driver.unregister_host(self.address)


class Reference:
    """Pinned host memory and device memory, one part of each for loads and one for stores.

    Args:
        gpu: whose.
        nbytes: of each part.
    """

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self._gpu = gpu
        self._nbytes = nbytes
        self._pinned = Pinned(2 * nbytes)
        self._host = self._pinned.address
        self._device = driver.allocate(2 * nbytes)
        try:
            self._batch: BatchCopy | None = BatchCopy()
        except CudaError:
            self._batch = None

    @property
    def has_batches(self) -> bool:
        """Whether this driver has cuMemcpyBatchAsync."""
        return self._batch is not None

    def raw(self, nbytes: int, *directions: Direction) -> float:
        """GB/s of one `cuMemcpyAsync` of `nbytes` in each direction, all at once."""

        def enqueue() -> None:
            for direction in directions:
                target, source = self._ends(direction)
                driver.copy(target, source, nbytes, self._gpu.streams[direction])

        return self._rate(enqueue, nbytes * len(directions))

    def batched(self, nbytes: int, fragment: int, *directions: Direction) -> float:
        """GB/s of `cuMemcpyBatchAsync` between places in another order on the two sides.

        The calls are as large as a piece of the lane's; of short fragments fewer bytes are moved.
        """
        batch = self._batch
        if batch is None:
            raise RuntimeError("this driver has no cuMemcpyBatchAsync")
        count = min(nbytes // fragment, MOST_COPIES)
        rng = np.random.default_rng(0)
        there, here = (rng.permutation(count).astype(np.uint64) * fragment for _ in range(2))
        sizes = np.full(count, fragment, np.uint64)
        step = max(1, PIECE_BYTES // fragment)
        ends = {
            direction: [
                np.uint64(end) + places
                for end, places in zip(self._ends(direction), (there, here), strict=True)
            ]
            for direction in directions
        }

        def enqueue() -> None:
            for begin in range(0, count, step):
                part = slice(begin, begin + step)
                for direction, (targets, sources) in ends.items():
                    batch.enqueue(
                        targets[part],
                        sources[part],
                        sizes[part],
                        self._gpu.streams[direction],
                        source_in_any_order=direction is Direction.LOAD,
                    )

        return self._rate(enqueue, count * fragment * len(directions))

    def close(self) -> None:
        """Give the memory back."""
        self._pinned.close()
        driver.free(self._device)

    def _ends(self, direction: Direction) -> tuple[int, int]:
        """Target and source."""
        if direction is Direction.LOAD:
            return self._device, self._host
        return self._host + self._nbytes, self._device + self._nbytes

    def _rate(self, enqueue: Callable[[], None], nbytes: int) -> float:
        self._gpu.wait()
        started = time.perf_counter()
        enqueue()
        self._gpu.wait()
        return nbytes / (time.perf_counter() - started) / 1e9


def _call(name: str, *arguments: object) -> tuple[Any, ...]:
    """Call a function of the driver that kvd does not need; its results."""
    code, *results = getattr(bindings, name)(*arguments)
    if int(code):
        raise CudaError(int(code), code.name, f"calling {name}")
    return tuple(results)
