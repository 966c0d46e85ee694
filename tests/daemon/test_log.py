"""The log of a real daemon: JSON that parses, and no harm from a stderr that nobody reads."""

import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvd.logs import MOST_A_MINUTE, WINDOW_SECONDS
from tests.conftest import Daemon, StartDaemon
from tests.raw_client import RawClient

ALONE = ("--http-listen", "off", "--keep-pool", "no")
"""No port that another daemon may have, and nothing left behind."""


@contextmanager
def started(runtime_dir: Path, stderr: int | None) -> Iterator[Daemon]:
    """A daemon with this stderr (None: closed), ended with the block."""
    command = [sys.executable, "-m", "kvd", "serve", "--runtime-dir", str(runtime_dir)]
    command += ["--cpu-bytes", "8MiB", *ALONE]
    if stderr is None:
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    process = subprocess.Popen(command, stderr=stderr, text=True)
    try:
        yield Daemon(runtime_dir, process, Path(os.devnull))
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=30)


@pytest.mark.parametrize("what", ["full", "gone", "closed"])
def test_a_stderr_that_takes_nothing_stops_nothing(runtime_dir: Path, what: str) -> None:
    """The daemon serves and ends as ever with its stderr full, without a reader, or closed."""
    read, write = (os.fdopen(fd, mode) for fd, mode in zip(os.pipe(), "rw", strict=True))
    with read, write:
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
        os.write(write.fileno(), b"x" * 4096)
        if what == "gone":
            read.close()
        with started(runtime_dir, None if what == "closed" else write.fileno()) as daemon:
            report = daemon.wait_ready()
            assert report["lanes"][0]["up"]
            assert (runtime_dir / "kvd.lock").read_text() == f"{report['pid']}\n"
            assert daemon.stop() == 0


def test_what_a_client_repeats_is_written_a_hundred_times_and_then_counted(
    start_daemon: StartDaemon,
) -> None:
    """Whoever talks nonsense again and again fills no log."""
    daemon = start_daemon()
    times, begun = MOST_A_MINUTE + 40, time.monotonic()
    for _ in range(times):
        with RawClient(daemon.runtime_dir) as client:
            client.send_bytes(b"\x01\0")
            assert client.hung_up()
    daemon.stop()
    lines = [line for line in daemon.log.read_text().splitlines() if "is closed: a message" in line]
    told = [line for line in lines if "left out" not in line]
    left_out = sum(int(n) for n in re.findall(r"left out (\d+) more lines", "\n".join(lines)))
    windows = 1 + (time.monotonic() - begun) // WINDOW_SECONDS
    assert len(told) <= windows * MOST_A_MINUTE
    assert len(told) + left_out == times


def seconds(text: str) -> float:
    """For how long a loop stood still."""
    return float(text.split(" for ")[1].split(maxsplit=1)[0])
