"""Processes that may just have ended."""

import contextlib

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
    """Whether it has, though nobody may have waited for it yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
