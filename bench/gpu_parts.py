"""Runs parts of a benchmark, each in a process of its own with a limit of its own.

What one part does to the driver, or the driver to it, is that part's alone; what it
leaves behind when it must be killed is cleared away.
"""

import contextlib
import ctypes
import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from harness import SHARED_MEMORY

_PR_SET_CHILD_SUBREAPER = 36
_LAST_WORDS_SECONDS = 8.0
_SHORTEST = 5.0


@dataclass(frozen=True)
class Part:
    """name: what it is called; seconds: the longest that it may take."""

    name: str
    seconds: float


class Missing(Exception):
    """A part has no figures; the text is why."""


class Parts:
    """Runs parts until the time is over.

    Args:
        command: what runs a part; `--part NAME --part-out FILE` is added.
        seconds: for all of them.
    """

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self._command = list(command)
        self._end = time.monotonic() + seconds
        # What a part started comes to this process when the part is killed.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def run(self, part: Part) -> dict[str, Any]:
        """A part's figures.

        Raises:
            Missing: it failed, or took too long, or there is no time left for it.
        """
        limit = min(part.seconds, self._end - time.monotonic() - _LAST_WORDS_SECONDS)
        if limit < _SHORTEST:
            raise Missing("no time was left")
        before = set(SHARED_MEMORY.glob("kvd-bench-*"))
        with tempfile.TemporaryDirectory(prefix="kvd-part-") as folder:
            out = Path(folder) / "figures.json"
            command = [*self._command, "--part", part.name, "--part-out", str(out)]
            process = subprocess.Popen(command)
            try:
                late = _wait(process, limit)
            finally:
                if process.poll() is None:  # this process was told to end
                    _end(process)
                _end_orphans()
                for left in set(SHARED_MEMORY.glob("kvd-bench-*")) - before:
                    shutil.rmtree(left, ignore_errors=True)
            try:
                found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            except (FileNotFoundError, ValueError):  # killed before it wrote, or while it did
                if late:
                    raise Missing(f"it took more than {limit:.0f} s") from None
                raise Missing(f"it ended with exit status {process.returncode}") from None
        if "error" in found:
            raise Missing(found["error"])
        return found


def _wait(process: subprocess.Popen[bytes], limit: float) -> bool:
    """Wait for its end, or end it; whether it was late."""
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        _end(process)
        return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """In order if it can: it then ends its daemon."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_LAST_WORDS_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end_orphans() -> None:
    """What killed parts have left: daemons, lanes, the process that computes."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_LAST_WORDS_SECONDS)
