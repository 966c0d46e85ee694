"""Below which length of run the kernel is faster than the copy engine, measured at start.

A measurement takes a fraction of a second and depends on the device, the driver,
the board and the kernel; so it is kept in a file per device, where there is a folder
for it, and made anew when the driver or the kernel is another one. A file that cannot
be read or written only costs the measurement.
"""

import logging
import time
from pathlib import Path

import msgspec

from kvd.lane.devices.cuda import driver, ptx
from kvd.lane.devices.cuda.binding import Stream
from kvd.lane.devices.cuda.copier import AwaitedKernel, CopyEngine, MoveKernel, Thresholds
from kvd.lane.devices.cuda.runs import Runs
from kvd.lane.devices.cuda.scratch import Scratch
from kvd.lane.devices.device import Direction

_log = logging.getLogger(__name__)

LENGTHS = (4096, 8192, 16384, 24576, 32768, 65536)
_REPEATS = 3
_FORMAT = 2
_KERNEL_DRIVER = Path("/sys/module/nvidia/version")


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
        CudaError: the driver does not tell.
    """
    try:
        module = kernel_driver.read_text("ascii").strip()
    except OSError:
        module = "unknown"
    return f"CUDA {driver.version()}, driver {module}, kernel {ptx.SOURCE_SHA256[:12]}"


def thresholds(
    engine: CopyEngine,
    kernel: MoveKernel,
    scratch: Scratch,
    stream: Stream,
    file: Path | None,
) -> Thresholds:
    """What the file says of this engine, else what a measurement does.

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
