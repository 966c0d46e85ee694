"""Processes that tests run, and those that may just have ended."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path

import psutil

from kvd.machine.directories import MAX_DIRECTORY_BYTES
from tests.waiting import PATIENCE, eventually

ROOT = Path(__file__).parents[1]
_NAME_BYTES = 40  # of a runtime directory's path below TEMPORARY
_FITS = len(os.fsencode(tempfile.gettempdir())) + _NAME_BYTES <= MAX_DIRECTORY_BYTES
TEMPORARY = tempfile.gettempdir() if _FITS else "/tmp"
"""Where tests make folders: in TMPDIR if a daemon's sockets have room below it, else in /tmp."""
LONG = 150.0  # seconds of a whole program on a busy machine


def python(
    *arguments: object, environment: Mapping[str, str] | None = None, seconds: float = LONG
) -> subprocess.CompletedProcess[str]:
    """Run this Python in the source tree until it ends."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )


def children_running(pid: int, module: str) -> list[psutil.Process]:
    """Children of a process that run a module and are not on their way out."""
    children = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            if module in child.cmdline():
                children.append(child)
    return children


def has_ended(process: psutil.Process) -> bool:
    """Whether it has, with all its threads, though nobody may have waited for it yet.

    One whose first thread has ended is a zombie already, while others hold its descriptors.
    """
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    with FileIO(pidfd):
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(0))


def has_memory(pid: int) -> bool:
    """Whether a process has an address space. One that is killed gives it up before its files.

    So it has none once a pipe of its own reads end of file, though the process may still be seen.
    """
    try:
        return bool(Path(f"/proc/{pid}/maps").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return False


def freeze(pid: int) -> None:
    """Stop a child of this process; none of its threads does anything any more.

    A signal has only been sent when `kill` returns: a call into the kernel may still go on.
    """
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process does nothing meanwhile: all that is sent waits for it at the same time.

    It goes on if it is still there: the daemon replaces a tier or a lane that is stuck for long.
    """
    process = psutil.Process(pid)
    process.suspend()
    try:
        eventually(process.status, lambda status: status == psutil.STATUS_STOPPED)
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def kill_and_wait(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a process that is not ours and wait until it has ended."""
    pidfd = os.pidfd_open(pid)
    signal.pidfd_send_signal(pidfd, number)
    ended, _, _ = select.select([pidfd], [], [], PATIENCE)
    os.close(pidfd)
    assert ended
