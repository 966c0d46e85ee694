"""What pinned memory and shared handles cost on a GPU, and what a killed process leaves.

`python gpu_pins.py ROLE ARGUMENTS` is a helper process of this benchmark; see ROLES.
"""

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpu_beside import DECODE, Helper, answering, neighbour
from gpu_device import Gpu, call
from gpu_figures import Samples, Skipped, Spread
from harness import MIB

from kvd.lane.cuda import driver
from kvd.lane.cuda.pinning import PinnedPool
from kvd.machine import cuda
from kvd_client.memory import DeviceMemory

SECONDS = 120.0  # to pin a pool
EXPORTED_BYTES = 256 * MIB
PATTERN = 0xA5
ANSWER_SECONDS = 0.25  # of the busy process while lanes pin
USERS = ((0, 0), (65534, 0), (0, 65534), (65533, 65534))  # exporter and opener
PR_SET_DUMPABLE = 4


def by_size(gpu: Gpu, nbytes: int) -> dict[str, float]:
    """GPU memory of a process that pins a pool, seconds to pin, and from SIGKILL to end of file.

    The end of file is that of a pipe, as of a lane's lifeline. `left_mib`: GPU memory that is
    still in use after the process ended.
    """
    before = gpu.free_bytes()
    with _helper("pin", nbytes) as lane:
        lane.read_line()
        with_context = gpu.free_bytes()
        lane.send_line("go")
        seconds = float(lane.read_line())
        pinned = gpu.free_bytes()
        to_eof, to_exit = _kill(lane)
    return {
        "context_mib": (before - with_context) / MIB,
        "pinned_mib": (with_context - pinned) / MIB,
        "pin_s": seconds,
        "kill_to_eof_s": to_eof,
        "kill_to_exit_s": to_exit,
        "left_mib": (before - gpu.free_bytes()) / MIB,
    }


def killed_exporter(gpu: Gpu) -> dict[str, Any]:
    """GPU memory in use after its exporter was killed: while it is open here, and once closed."""
    before = gpu.free_bytes()
    with _helper("export", os.getuid()) as exporter:
        address = driver.open_ipc(bytes.fromhex(exporter.read_line()))
        _kill(exporter)
    still_open = gpu.free_bytes()
    same = bool((gpu.read(address, EXPORTED_BYTES) == PATTERN).all())
    driver.close_ipc(address)
    return {
        "exported_mib": EXPORTED_BYTES / MIB,
        "open_mib": (before - still_open) / MIB,
        "closed_mib": (before - gpu.free_bytes()) / MIB,
        "bytes": "as they were" if same else "others",
    }


def two_lanes(nbytes: int, rounds: int) -> Mapping[str, Spread]:
    """A busy process alone, and while two processes pin a new pool each as lanes do.

    With one pin lock for both, as lanes of a node have, and without one. These are processes with
    a PinnedPool and no other part of a lane, on one GPU.
    """
    samples = Samples()
    lock = os.memfd_create("kvd-bench-pin-lock")
    with neighbour() as busy:
        for _ in range(rounds):
            _keep_worst(samples, "alone", [busy.ask("decode", 1.0)])
            for when, locks in (("with_lock", [lock]), ("without_lock", [])):
                seconds, answers = _pin_beside(busy, nbytes, locks)
                samples.keep(f"pin_{when}_s", seconds)
                _keep_worst(samples, when, answers)
    os.close(lock)
    return samples.spreads()


def _keep_worst(samples: Samples, when: str, answers: Sequence[Sequence[float]]) -> None:
    """Of the busy process's answers, the worst figure of each kind."""
    for name, values in zip(DECODE, zip(*answers, strict=True), strict=True):
        samples.keep(f"{name}_{when}", max(values))


def _pin_beside(busy: Helper, nbytes: int, locks: Sequence[int]) -> tuple[float, list[list[float]]]:
    """Seconds until both have pinned, and the busy process's answers meanwhile."""
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(2))
        lanes = [stack.enter_context(_helper("pin", nbytes, *locks, fds=locks)) for _ in range(2)]
        for lane in lanes:
            lane.read_line()
        for lane in lanes:
            lane.send_line("go")
        pinning = [threads.submit(lane.read_line) for lane in lanes]
        answers = [busy.ask("decode", ANSWER_SECONDS)]
        while not all(lane.done() for lane in pinning):
            answers.append(busy.ask("decode", ANSWER_SECONDS))
        return max(float(lane.result()) for lane in pinning), answers


def users() -> dict[str, str]:
    """By the users of exporter and opener: `works`, or how the driver refuses an IPC handle.

    Raises:
        Skipped: only root can start processes of other users.
    """
    if os.getuid():
        raise Skipped("only root can start processes of other users")
    outcomes = {}
    for exporter_uid, opener_uid in USERS:
        try:
            with (
                _helper("export", exporter_uid) as exporter,
                _helper("open", opener_uid, exporter.read_line()) as opener,
            ):
                outcome = opener.read_line()
        except RuntimeError as error:
            outcome = str(error)
        outcomes[f"exporter_{exporter_uid}_opener_{opener_uid}"] = outcome
    return outcomes


def _helper(role: str, *arguments: object, fds: Sequence[int] = ()) -> Helper:
    return Helper(Path(__file__).name, role, *arguments, pass_fds=fds)


def _kill(helper: Helper) -> tuple[float, float]:
    """Seconds from SIGKILL to the end of file of its standard output, and to its exit."""
    assert helper.process.stdout is not None
    started = time.perf_counter()
    helper.process.kill()
    helper.process.stdout.read()
    to_eof = time.perf_counter() - started
    helper.process.wait()
    return to_eof, time.perf_counter() - started


# ------------------------------------------------------------------ helper processes


def pin(nbytes: str, lock: str = "") -> Iterator[object]:
    """Make a pool and be ready; at a line, pin it as a lane does and answer the seconds."""
    gpu, size = Gpu(), int(nbytes)
    descriptor = os.memfd_create("kvd-bench-pool")
    os.posix_fallocate(descriptor, 0, size)
    pool = PinnedPool(descriptor, size, gpu.context, pin_lock=int(lock) if lock else None)
    yield "ready"
    sys.stdin.readline()
    started = time.perf_counter()
    pool.request(0, 0, size)
    while pool.pinned_bytes < size and not pool.error:
        if time.perf_counter() - started > SECONDS:
            raise TimeoutError(f"the pool is not pinned within {SECONDS:g} s")
        time.sleep(0.001)
    yield f"error: {pool.error}" if pool.error else time.perf_counter() - started
    sys.stdin.read()


def export(uid: str) -> Iterator[object]:
    """As a user, allocate device memory and answer its IPC handle."""
    _become(int(uid))
    gpu = Gpu()
    address = driver.allocate(EXPORTED_BYTES)
    call("cuMemsetD8", address, PATTERN, EXPORTED_BYTES)
    gpu.wait()
    yield DeviceMemory.at(address, EXPORTED_BYTES).ipc.hex()
    sys.stdin.read()


def open_handle(uid: str, handle: str) -> Iterator[object]:
    """As a user, open and read another process's memory."""
    _become(int(uid))
    gpu = Gpu()
    address = driver.open_ipc(bytes.fromhex(handle))
    same = bool((gpu.read(address, mmap.PAGESIZE) == PATTERN).all())
    yield "works" if same else "opens, with other bytes"


def _become(uid: int) -> None:
    """Change to a user; the driver's library is loaded before, its start comes after."""
    if uid == os.getuid():
        return
    cuda.bindings()
    libc = ctypes.CDLL(None)
    ctypes.CDLL("libcuda.so.1")
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    # Else the files of this process under /proc stay root's, unlike those of a new program.
    libc.prctl(PR_SET_DUMPABLE, 1)


ROLES: dict[str, Callable[..., Iterator[object]]] = {
    "pin": pin,
    "export": export,
    "open": open_handle,
}

if __name__ == "__main__":
    answering(ROLES[sys.argv[1]], *sys.argv[2:])
