"""A GPU as the benchmarks themselves use it: buffers and streams."""

import importlib.metadata
import mmap
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver as bindings

from kvd.errors import CudaError
from kvd.lane.devices.cuda import driver
from kvd.lane.devices.device import Direction

Bytes = npt.NDArray[np.uint8]
WARM_SECONDS, WARM_BYTES = 1.0, 64 * 2**20
WARM_AGAIN_SECONDS = 0.1
ASKED = (
    *("driver_version", "pcie.link.gen.current", "pcie.link.width.current"),
    *("clocks.sm", "clocks.mem", "compute_mode"),
)
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
        self._warming: tuple[Pinned, int] | None = None

    def use(self) -> None:
        """Make its context the calling thread's."""
        driver.use_context(self.context)

    def describe(self) -> dict[str, Any]:
        """Its name, the versions of the kernel's driver and of CUDA, and the machine around it.

        Working, for what idles may have a slower link to the host.
        """
        self.warm()
        kernel = _VERSION.read_text(encoding="ascii").strip() if _VERSION.exists() else ""
        smi = _nvidia_smi()
        return {
            "device": driver.device_name(self.device),
            "driver": kernel or smi.get("driver_version", "unknown"),
            "cuda": driver.version(),
            "machine": {
                "linux": platform.release(),
                "python": platform.python_version(),
                **{name: _version(name) for name in ("torch", "cuda-bindings", "numpy")},
                "cpus": os.cpu_count(),
                "memory_GiB": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**30,
                **smi,
            },
        }

    def free_bytes(self) -> int:
        """Memory of the device that nobody uses."""
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
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            driver.copy(device, pinned.address, WARM_BYTES, load)
            driver.copy(pinned.address + WARM_BYTES, device + WARM_BYTES, WARM_BYTES, store)
            call("cuMemsetD8Async", device, 0, WARM_BYTES, load)  # its processors too
            self.wait()

    def wait(self) -> None:
        """Until both streams are idle."""
        for stream in self.streams.values():
            driver.wait_for_stream(stream)


class Pinned:
    """Pinned host memory at `address`, all of its pages there."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = mmap.mmap(-1, nbytes)
        host = np.frombuffer(self.bytes, np.uint8)
        host[:] = 1
        self.address = host.ctypes.data
        driver.register_host(self.address, nbytes)

    def close(self) -> None:
        """Unpin it."""
        driver.unregister_host(self.address)

    @property
    def device_address(self) -> int:
        """Where the device finds it."""
        return driver.device_address(self.address)


def _nvidia_smi() -> dict[str, str]:
    """What it says of link, clocks and modes; nothing where there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    words = done.stdout.strip().split(", ")
    return dict(zip(ASKED, words, strict=True)) if len(words) == len(ASKED) else {}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def call(name: str, *arguments: object) -> tuple[Any, ...]:
    """Call a function of the driver that kvd does not need; its results.

    Raises:
        CudaError: it fails.
    """
    code, *results = getattr(bindings, name)(*arguments)
    if int(code):
        raise CudaError(int(code), code.name, f"calling {name}")
    return tuple(results)
