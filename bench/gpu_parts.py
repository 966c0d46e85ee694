"""Parts of a benchmark, each in a process of its own: one that fails or hangs costs its figures.

This process has no driver loaded. Each part has a log of its own, for what it says and for what
its daemons and lanes say. Only the standard library is used.
"""

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SHARED_MEMORY = Path("/dev/shm")
LAST_WORDS_SECONDS, SHORTEST = 8.0, 5.0
PR_SET_CHILD_SUBREAPER = 36
TAIL_LINES, TAIL_LETTERS = 8, 900
NOTED_LINES, NOTED_LETTERS = 20, 260
# What a lane or a daemon had to do without, or says of the way that it copies.
_NOTED = re.compile(r"\[(?:warning|error|critical) *\] |copies are enqueued|fragments of \d")
_USUAL = re.compile(r"is disconnected: the peer is gone")  # a part's engine has ended
_BEFORE = re.compile(r"^.*?\[\w+ *\] ")
_NUMBERS = re.compile(r"#\d+|\bpid \d+|(?<=lane cuda):\w+")


class Part(NamedTuple):
    """seconds: the longest that it may take."""

    name: str
    seconds: float


def run_parts(
    parts: Iterable[Part],
    command: Sequence[str],
    logs: Path,
    seconds: float,
    keep: Callable[[str, dict[str, Any]], None],
) -> None:
    """Run all, one after the other; `keep` gets the figures of each, or its `error`.

    Args:
        parts: in order of worth.
        command: what runs one; `--part NAME --part-out FILE --log FILE` is added.
        logs: the folder for their logs; what is in it goes.
        seconds: for everything.
        keep: gets the name and the figures.
    """
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    # What a part started comes to this process when the part is killed.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    end = time.monotonic() + seconds
    for name, most in parts:
        log = logs / f"{name.replace(' ', '-')}.log"
        started = time.monotonic()
        print(f"measuring: {name}", end="", flush=True)
        try:
            figures = run_part(command, name, min(most, end - started - LAST_WORDS_SECONDS), log)
        except KeyboardInterrupt:
            print()
            keep(name, {"error": "the benchmark was told to end here"})
            return
        print(f", {time.monotonic() - started:.0f} s", flush=True)
        if "error" in figures:
            print(f"  not measured: {figures['error']}")
            for line in tail(log):
                print(f"  | {line}", flush=True)
        elif "skipped" in figures:
            print(f"  skipped: {figures['skipped']}", flush=True)
        keep(name, figures)


def run_part(command: Sequence[str], name: str, seconds: float, log: Path) -> dict[str, Any]:
    """A part's figures, or as `error` why there are none. Nothing that it started is left.

    Args:
        command: see run_parts.
        name: the part's.
        seconds: the longest that it may take.
        log: for what it says.
    """
    if seconds < SHORTEST:
        return {"error": "no time was left"}
    with tempfile.TemporaryDirectory(prefix="kvd-part-") as folder, log.open("ab") as sink:
        out = Path(folder) / "figures.json"
        told = ["--part", name, "--part-out", str(out), "--log", str(log)]
        process = subprocess.Popen([*command, *told], stdout=sink, stderr=sink)
        why = f"it took more than {seconds:.0f} s"
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                why = f"it ended with exit status {process.wait(seconds)}"
        finally:
            _end(process)
            for left in SHARED_MEMORY.glob(f"kvd-bench-{process.pid}-*"):
                shutil.rmtree(left, ignore_errors=True)
        try:
            found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # killed before it wrote, or while it did
            return {"error": why}
        return found


def _end(process: "subprocess.Popen[bytes]") -> None:
    """In order if it can, then it ends its daemon; and kill what it has left behind."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(LAST_WORDS_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    end = time.monotonic() + LAST_WORDS_SECONDS
    while (left := descendants()) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def descendants() -> list[int]:
    """Children of this process and theirs, zombies too."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name before may have anything in it.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def tail(log: Path) -> list[str]:
    """The last lines of a log, not too many; a part for which no time was left has none."""
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join(lines)[-TAIL_LETTERS:].splitlines()


def noted(logs: Path) -> list[str]:
    """What daemons and lanes warned of or fell back to in the logs of a folder, each once."""
    found: dict[str, int] = {}
    for log in sorted(logs.glob("*.log")):
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if _NOTED.search(line) and not _USUAL.search(line):
                text = _NUMBERS.sub("", _BEFORE.sub("", line))[:NOTED_LETTERS]
                found[text] = found.get(text, 0) + 1
    lines = [f"{text} ({count}x)" for text, count in found.items()]
    more = len(lines) - NOTED_LINES
    return lines[:NOTED_LINES] + ([f"and {more} more, see the logs"] if more > 0 else [])


def write(result: dict[str, Any], path: Path) -> None:
    """Write all that is there until now; a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)
