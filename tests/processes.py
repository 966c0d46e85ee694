"""Processes that may just have ended."""

import contextlib
import os
import select
from io import FileIO

import psutil


def children_running(pid: int, module: str) -> list[psutil.Process]:
    """Children of a process that run a module and are not on their way out."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            if module in child.cmdline():
                found.append(child)
    return found


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
