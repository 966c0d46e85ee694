"""What works and what is fast on this device: found out at start, on memory of the lane's own.

The way of the copy engine is chosen by copying a few bytes there and back. Below which
length of run the kernel is faster than the copy engine is measured, in a fraction of a
second; it depends on the device, the driver, the board and the kernel, so it is kept in a
file per device, where there is a folder for it, and made anew when the driver or the
kernel is another one. A file that cannot be read or written only costs the measurement.
"""

import hashlib
import logging
import mmap
import time
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvd.errors import CudaError, LaneError
from kvd.lane.devices.cuda import driver
from kvd.lane.devices.cuda.binding import Cleanup, Stream, is_lost
from kvd.lane.devices.cuda.copier import (
    KERNEL,
    BatchEngine,
    CopyEngine,
    LoopEngine,
    MoveKernel,
    Runs,
    Thresholds,
)
from kvd.lane.devices.cuda.driver import BatchCopy
from kvd.lane.devices.device import Direction

_log = logging.getLogger(__name__)

LENGTHS = (4096, 8192, 16384, 24576, 32768, 65536)
_REPEATS = 3
_FORMAT = 2
_KERNEL_DRIVER = Path("/sys/module/nvidia/version")


class Scratch:
    """Pinned host memory and as much device memory, to try and to time copies.

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
        """Free it; nothing may be in flight.

        Raises:
            CudaError: the driver refuses.
        """
        self._cleanup.run()

    def __repr__(self) -> str:
        return f"<Scratch {self.nbytes} bytes>"


def choose_engine(scratch: Scratch, stream: Stream) -> CopyEngine:
    """The batch engine if a trial on scratch memory moves the right bytes, else the loop.

    Raises:
        CudaError: the device is lost, or what was tried does not end.
    """
    try:
        engine = BatchEngine(BatchCopy.find())
        right = moves_there_and_back(engine, scratch, stream)
    except CudaError as error:
        if is_lost(error):
            raise
        driver.wait_for_stream(stream)  # some of the copies may be on their way
        _log.info("copies are enqueued one by one: %s", error)
        return LoopEngine()
    if not right:
        _log.warning("copies are enqueued one by one: a batch did not move the right bytes")
        return LoopEngine()
    return engine


def moves_there_and_back(engine: CopyEngine, scratch: Scratch, stream: Stream) -> bool:
    """Whether an engine loads and stores the right bytes; waits for them.

    Raises:
        CudaError: it cannot.
    """
    data = (np.arange(scratch.nbytes) % 251).astype(np.uint8)
    runs = scratch.runs(nbytes=1000, count=2)
    scratch.bytes[:] = data
    engine.enqueue(runs, Direction.LOAD, stream)
    driver.wait_for_stream(stream)
    scratch.bytes[:] = 0
    engine.enqueue(runs, Direction.STORE, stream)
    driver.wait_for_stream(stream)
    wanted = np.zeros_like(data)
    for begin in scratch.host_offsets(runs):
        wanted[begin : begin + 1000] = data[begin : begin + 1000]
    return bool((scratch.bytes == wanted).all())


class AwaitedKernel(CopyEngine):
    """The kernel alone, and waited for: to try it and to time it.

    Args:
        kernel: no list of which is in use.
    """

    def __init__(self, kernel: MoveKernel) -> None:
        self._kernel = kernel

    def enqueue(self, runs: Runs, direction: Direction, stream: Stream) -> None:
        """See CopyEngine."""
        number = self._kernel.take_list()
        if number is None:
            raise LaneError("the kernel's lists are all in use")
        self._kernel.enqueue(runs, direction, stream, number)
        driver.wait_for_stream(stream)
        self._kernel.give_back(number)


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was found, and with what; see `made_with`."""

    format: int
    made_with: str
    engine: str
    load: int
    store: int


def file_name(uuid: bytes) -> str:
    """Of a device's measurements."""
    return f"cuda-{uuid.hex()}.json"


def made_with(kernel_driver: Path = _KERNEL_DRIVER) -> str:
    """The driver, as CUDA and as the kernel know it, and the copy kernel.

    Raises:
        CudaError: the driver does not answer.
    """
    try:
        module = kernel_driver.read_text("ascii").strip()
    except OSError:
        module = "unknown"
    kernel = hashlib.sha256(KERNEL.read_bytes()).hexdigest()
    return f"CUDA {driver.version()}, driver {module}, kernel {kernel[:12]}"


def thresholds(
    engine: CopyEngine,
    kernel: MoveKernel,
    scratch: Scratch,
    stream: Stream,
    file: Path | None,
) -> Thresholds:
    """Return what the file holds for this engine, or else measure it.

    Args:
        engine: what moves long runs.
        kernel: what may move short ones.
        scratch: at least `max(LENGTHS)` bytes.
        stream: where nothing else runs.
        file: where the answer is kept, one for each device.

    Raises:
        CudaError: a copy failed.
    """
    name, present = type(engine).__name__, made_with()
    kept = None if file is None else _read(file)
    if kept is not None and (kept.format, kept.made_with, kept.engine) == (_FORMAT, present, name):
        return Thresholds(kept.load, kept.store)
    found = Thresholds(
        *(
            _crossover(engine, kernel, scratch, stream, direction)
            for direction in (Direction.LOAD, Direction.STORE)
        )
    )
    _log.info(
        "runs below %d bytes are loaded, below %d stored by the kernel", found.load, found.store
    )
    if file is not None:
        _write(file, _Kept(_FORMAT, present, name, found.load, found.store))
    return found


def _crossover(
    engine: CopyEngine,
    kernel: MoveKernel,
    scratch: Scratch,
    stream: Stream,
    direction: Direction,
) -> int:
    """The shortest measured length for which the engine is as fast; twice the longest if none."""
    for length in LENGTHS:
        runs = scratch.runs(length, scratch.nbytes // length)
        by_engine, by_kernel = (
            min(_seconds(way, runs, direction, stream) for _ in range(_REPEATS))
            for way in (engine, AwaitedKernel(kernel))
        )
        if by_engine <= by_kernel:
            return length if length > LENGTHS[0] else 0
    return 2 * LENGTHS[-1]


def _seconds(way: CopyEngine, runs: Runs, direction: Direction, stream: Stream) -> float:
    """Time until everything has arrived; what enqueueing costs counts too."""
    begin = time.perf_counter()
    way.enqueue(runs, direction, stream)
    driver.wait_for_stream(stream)
    return time.perf_counter() - begin


def _read(file: Path) -> _Kept | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Kept)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        _log.warning("%s is not used: %s", file, error)
        return None


def _write(file: Path, kept: _Kept) -> None:
    try:
        fresh = file.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(kept))
        fresh.replace(file)
    except OSError as error:
        _log.warning("the measurement is not kept: %s", error)
