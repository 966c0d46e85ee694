"""What works and what is fast on this device: found out at start, on memory of the lane's own.

How the copy engine is given many runs is chosen by copying a few bytes there and back. Below
which length the kernel is faster depends on device, driver, board and the number of runs: that
is measured once, in a fraction of a second, and kept in a file for the lanes that follow.
"""

import logging
from pathlib import Path

from kvd.errors import CudaError
from kvd.lane.devices.cuda import driver
from kvd.lane.devices.cuda.calibration_file import Calibration, Identity, load, save
from kvd.lane.devices.cuda.copier import Copier, Thresholds
from kvd.lane.devices.cuda.driver import BatchCopy, Stream, Undo
from kvd.lane.devices.cuda.measuring import (
    SCRATCH_BYTES,
    Scratch,
    measure_kernel,
    measure_order,
)
from kvd.lane.devices.cuda.move_kernel import MoveKernel
from kvd.lane.devices.cuda.options import Options
from kvd.version import VERSION

_log = logging.getLogger(__name__)


def choose(
    priority: int, options: Options, device: tuple[str, str], place: Path | None, undo: Undo
) -> Copier:
    """Try the ways to copy on scratch memory; time them where neither options nor file say it.

    Args:
        priority: of the stream for it.
        options: what is chosen already.
        device: its name as registrations have it, and what its maker calls it.
        place: of the file; None where nothing is kept.
        undo: gets what lets go of the kernel.

    Raises:
        CudaError: there is no scratch memory.
    """
    with Undo() as trial:
        scratch = Scratch(SCRATCH_BYTES, trial)
        stream = driver.create_stream(priority)
        trial.add(driver.destroy_stream, stream)
        copier = _choose_engine(scratch, stream, overlap=options.overlap)
        fixed = options.kernel_below
        if fixed is None or any(fixed.values()):
            _add_kernel(copier, options.kernel_blocks, scratch, stream, undo)
        kernel_open = copier.kernel is not None and fixed is None
        order_open = copier.batch is not None and options.any_order is None
        found = None
        if kernel_open or order_open:
            kernel = f"a kernel of {options.kernel_blocks} blocks" if copier.kernel else "no kernel"
            ways = f"{copier.engine_way}, {kernel}"
            identity = Identity(VERSION, driver.version(), *device, ways)
            found = _known(copier, scratch, stream, identity, place)
    if fixed is not None:
        copier.thresholds = Thresholds({way: (below,) for way, below in fixed.items()})
    elif found is not None and kernel_open:
        copier.thresholds = found.thresholds
    if options.any_order is not None:
        copier.any_order = options.any_order
    elif found is not None:
        copier.any_order = found.any_order
    return copier


def _choose_engine(scratch: Scratch, stream: Stream, *, overlap: bool) -> Copier:
    """Batches if a trial moves the right bytes, else one copy after the other."""
    why = ""
    for by_engines_only in (True, False) if overlap and BatchCopy.can_ask_overlap() else (False,):
        try:
            copier = Copier(BatchCopy(overlap=by_engines_only))
            if scratch.moved_there_and_back(copier.by_engine, stream):
                return copier
            why = "a batch did not move the right bytes"
            _log.warning("%s", why)
        except CudaError as error:
            driver.wait_for_stream(stream)  # some of the copies may be on their way
            why = str(error)
    _log.info("copies are enqueued one by one: %s", why)
    return Copier(None)


def _add_kernel(copier: Copier, blocks: int, scratch: Scratch, stream: Stream, undo: Undo) -> None:
    """Give the copier the kernel, if that works here."""
    with Undo() as mine:
        try:
            kernel = MoveKernel(blocks, mine)
            if not scratch.moved_there_and_back(kernel.at_once, stream):
                _log.warning("the kernel does not work here: it moves the wrong bytes")
                return
        except CudaError as error:
            driver.wait_for_stream(stream)
            _log.warning("the kernel does not work here: %s", error)
            return
        copier.kernel = kernel
        undo.push(mine.pop_all())


def _known(
    copier: Copier, scratch: Scratch, stream: Stream, identity: Identity, place: Path | None
) -> Calibration | None:
    """What the file says, or what is measured now, which is kept; None where that fails."""
    kept = place and load(place, identity)
    if kept:
        return kept
    try:
        scratch.warm(stream)
        made = Calibration(
            identity,
            measure_kernel(copier, copier.kernel.at_once, scratch, stream) if copier.kernel else {},
            any_order=measure_order(copier, scratch, stream),
        )
    except CudaError as error:
        driver.wait_for_stream(stream)
        _log.warning("what is fast cannot be measured: %s", error)
        return None
    if place:
        save(place, made)
    return made
