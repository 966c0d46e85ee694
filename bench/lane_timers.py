"""Timers around the functions of a lane, by stage of its work; only for lane.py.

A timer counts processor time of its thread, without what the timers inside it count. The sums lie
in a file that the benchmark reads at any time. What a tree does not have is not timed.
"""

import contextlib
import functools
import importlib
import inspect
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAGES = (
    "request",
    "check",
    "plan",
    "descriptors",
    "enqueue",
    "driver call",
    "completion",
    "report",
    "queue",
    "wait",
)
PIECES = "pieces"  # are counted: calls of _PIECE
_PIECE = "CudaDevice.submit"
_TIMED = (
    ("kvd.lane.orders", "RequestHandler.serve", "request"),
    ("kvd.lane.jobs", "LaneJob.prepare", "plan"),
    ("kvd.lane.jobs", "LaneJob.check_slots", "check"),
    ("kvd.lane.runner", "check_pinned", "check"),
    ("kvd.lane.cuda.backend", "CudaDevice.prepare", "descriptors"),
    ("kvd.lane.cuda.backend", "CudaDevice._runs_of", "descriptors"),
    ("kvd.lane.cuda.backend", "CudaDevice.submit", "enqueue"),
    ("kvd.lane.cuda.streams", "TransferStream._enqueue_copies", "enqueue"),
    ("kvd.lane.cuda.copies", "BatchCopy.enqueue", "driver call"),
    ("kvd.lane.cuda.driver", "BatchCopy.enqueue", "driver call"),
    ("kvd.lane.cuda.backend", "CudaDevice.progress", "completion"),
    ("kvd.lane.runner", "Runner._complete_piece", "completion"),
    ("kvd.lane.reports", "Reporter.report_ended", "report"),
    ("kvd.lane.reports", "Reporter.send_shares", "report"),
    ("kvd.lane.runner", "Runner.run_once", "queue"),
    ("kvd.lane.loop", "LaneService._wait", "wait"),
    ("kvd.lane.loop", "LaneService._back_off", "wait"),
)
_THREADS = 64
_ROW = len(STAGES) + 1  # nanoseconds of each stage, and pieces
FILE_BYTES = _THREADS * _ROW * 8


def read(path: Path) -> dict[str, int]:
    """Nanoseconds by stage until now, of all threads; and the number of pieces."""
    numbers = memoryview(path.read_bytes()).cast("q")
    return {name: sum(numbers[i::_ROW]) for i, name in enumerate((*STAGES, PIECES))}


def install(path: str) -> None:
    """Time this process's functions from now on, into a file of FILE_BYTES."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    totals = memoryview(mmap.mmap(descriptor, FILE_BYTES)).cast("q")
    os.close(descriptor)
    rows = itertools.count()
    local = threading.local()

    def begin() -> tuple[list[int], int]:
        """This thread's stack of inner times, and where its sums are."""
        local.mine = [0], next(rows) * _ROW
        found: tuple[list[int], int] = local.mine
        return found

    def timed(function: Callable[..., Any], stage: int, pieces: int) -> Callable[..., Any]:
        @functools.wraps(function)
        def timer(*arguments: object, **named: object) -> object:
            try:
                stack, row = local.mine
            except AttributeError:
                stack, row = begin()
            stack.append(0)
            started = time.thread_time_ns()
            try:
                return function(*arguments, **named)
            finally:
                took = time.thread_time_ns() - started
                totals[row + stage] += took - stack.pop()
                totals[row + len(STAGES)] += pieces
                stack[-1] += took

        return timer

    for module, name, stage in _TIMED:
        with contextlib.suppress(ImportError, AttributeError):
            owner: Any = importlib.import_module(module)
            *outer, last = name.split(".")
            for part in outer:
                owner = getattr(owner, part)
            if inspect.isfunction(function := inspect.getattr_static(owner, last)):
                setattr(owner, last, timed(function, STAGES.index(stage), name == _PIECE))
