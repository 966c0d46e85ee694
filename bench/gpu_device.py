"""A GPU as the benchmark itself uses it: streams, memory, and the raw batch kvd is held to."""

import mmap
import os
import platform
import subprocess
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import __version__ as bindings_version
from cuda.bindings import driver as bindings

from kvd.lane.cuda import driver
from kvd.lane.cuda.copies import BatchCopy
from kvd.lane.device import Direction
from kvd.machine import cuda

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.uint64]
Piece = tuple[Addresses, Addresses, Addresses]
"""Device addresses of fragments, their offsets in the host memory, and their bytes."""
WARM_SECONDS, WARM_BYTES = 1.0, 64 * 2**20
WARM_AGAIN_SECONDS = 0.1
SMI_FIELDS = (
    *("driver_version", "pcie.link.gen.current", "pcie.link.width.current"),
    *("clocks.sm", "clocks.mem", "compute_mode"),
)


class Gpu:
    """The first device that this process sees, its context, and a stream for each direction.

    Raises:
        LaneError: there is no driver or no device; the text says what to do.
    """

    def __init__(self) -> None:
        cuda.start()
        (self.device, _), *_ = cuda.devices()
        self.context = driver.retain_context(self.device)
        self.use()
        self.streams = {direction: driver.create_stream(0) for direction in Direction}
        self._warming: tuple[Pinned, int] | None = None

    def use(self) -> None:
        """Make its context the calling thread's."""
        driver.use_context(self.context)

    def describe(self) -> dict[str, Any]:
        """Its name, the driver's version and the machine, while the device works.

        An idle device may have a slower link to the host.
        """
        self.warm()
        return {
            "device": cuda.device_name(self.device),
            "cuda": cuda.version(),
            "machine": {
                "linux": platform.release(),
                "python": platform.python_version(),
                "cuda-bindings": bindings_version,
                "cpus": os.cpu_count(),
                "memory_GiB": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**30,
                **_nvidia_smi(),
            },
        }

    def free_bytes(self) -> int:
        """Memory of the device that no process uses."""
        free, _ = call("cuMemGetInfo")
        return int(free)

    def write(self, address: int, data: Bytes) -> None:
        """Copy into device memory, and wait."""
        call("cuMemcpyHtoD", address, data.ctypes.data, data.nbytes)
        call("cuStreamSynchronize", 0)  # it may return before pageable bytes have arrived

    def read(self, address: int, nbytes: int) -> Bytes:
        """Copy out of device memory, and wait."""
        data = np.empty(nbytes, np.uint8)
        call("cuMemcpyDtoH", data.ctypes.data, address, nbytes)
        return data

    def warm(self, seconds: float = WARM_SECONDS) -> None:
        """Keep the device and the bus busy for so long: an idle device has low clocks."""
        if self._warming is None:
            self._warming = Pinned(2 * WARM_BYTES), driver.allocate(2 * WARM_BYTES)
        pinned, device = self._warming
        load, store = self.streams[Direction.LOAD], self.streams[Direction.STORE]
        stored, source = pinned.address + WARM_BYTES, device + WARM_BYTES
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            call("cuMemcpyAsync", device, pinned.address, WARM_BYTES, load)
            call("cuMemcpyAsync", stored, source, WARM_BYTES, store)
            call("cuMemsetD8Async", device, 0, WARM_BYTES, load)  # the device's processors, too
            self.wait()

    def wait(self) -> None:
        """Until both streams are idle."""
        for stream in self.streams.values():
            driver.wait_for_stream(stream)


class Pinned:
    """Pinned host memory at `address`, every page touched; `device_address` is the device's."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = mmap.mmap(-1, nbytes)
        host = np.frombuffer(self._bytes, np.uint8)
        host[:] = 1
        self.address = host.ctypes.data
        driver.register_host(self.address, nbytes)
        self.device_address = driver.device_address(self.address)

    def close(self) -> None:
        """Unpin it."""
        driver.unregister_host(self.address)


class RawBatch:
    """`cuMemcpyBatchAsync` of the bytes that an engine moves, without kvd.

    Args:
        gpu: whose memory.
        pieces: by direction, what one call of the driver copies: see `Piece`.
        nbytes: of all pieces of a direction.
    """

    def __init__(self, gpu: Gpu, pieces: dict[Direction, list[Piece]], nbytes: int) -> None:
        self._gpu = gpu
        self._pieces = pieces
        self._nbytes = nbytes
        self._pinned = Pinned(2 * nbytes)
        self._batch = BatchCopy(overlap=False)
        # One part for each direction: both may run at once.
        loads = self._pinned.device_address
        self._begins = {Direction.LOAD: loads, Direction.STORE: loads + nbytes}
        # Loads read what the engine stores.
        self._enqueue(Direction.STORE, loads)
        gpu.wait()

    def move(self, *directions: Direction) -> float:
        """Move everything in all of these directions at once; GB/s of all together."""
        self._gpu.wait()
        started = time.perf_counter()
        for direction in directions:
            self._enqueue(direction, self._begins[direction])
        self._gpu.wait()
        return self._nbytes * len(directions) / (time.perf_counter() - started) / 1e9

    def close(self) -> None:
        """Unpin the host memory."""
        self._pinned.close()

    def _enqueue(self, direction: Direction, host_begin: int) -> None:
        load = direction is Direction.LOAD
        for device, offsets, sizes in self._pieces[direction]:
            host = offsets + np.uint64(host_begin)
            targets, sources = (device, host) if load else (host, device)
            self._batch.enqueue(
                targets.ctypes.data,
                sources.ctypes.data,
                sizes.ctypes.data,
                len(sizes),
                self._gpu.streams[direction],
                source_in_any_order=load,
            )


def call(name: str, *arguments: object) -> tuple[Any, ...]:
    """Call a function of the driver that kvd does not need; its results.

    Raises:
        CudaError: it fails.
    """
    code, *results = getattr(bindings, name)(*arguments)
    cuda.check(code, f"calling {name}")
    return tuple(results)


def _nvidia_smi() -> dict[str, str]:
    """Link, clocks and modes; empty where there is no nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            [*command, "--id=0"], capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = done.stdout.strip().split(", ")
    return dict(zip(SMI_FIELDS, values, strict=True)) if len(values) == len(SMI_FIELDS) else {}
