"""The log of a real daemon: JSON that parses, and no harm from a stderr that nobody reads."""

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvd.logs import MAX_PER_MINUTE, WINDOW_SECONDS
from kvd.machine.process import MAX_STALL_SECONDS
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine
from tests.processes import frozen
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


def test_broker_and_lane_name_a_rank_alike(start_daemon: StartDaemon) -> None:
    """Every line is an object; the same process has the same identifiers in each about it."""
    daemon = start_daemon("--log-format", "json", "--log-level", "debug")
    with Engine(daemon.runtime_dir, "llama", world_size=2) as engine:
        engine.wait_attached()
    assert daemon.stop() == 0
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    assert all({"time", "level", "logger", "event", "process"} <= set(line) for line in lines)
    events = [line["event"] for line in lines if line["process"] == "broker"]
    assert any(event.startswith("serving ") for event in events)
    assert events[-1] == "stopped"
    about = [line for line in lines if line.get("rank") == 1]
    assert all(line["engine"] == "llama" and line["pid"] == os.getpid() for line in about)
    assert all(f"engine llama rank 1 (pid {os.getpid()})" in line["event"] for line in about)
    of_lane = [line for line in about if line["process"] == "lane"]
    assert {line["lane"] for line in of_lane} == {"host"}
    # On a busy machine a rank may need a second session; of one at least both have told.
    of_broker = {line["session"] for line in about if line["process"] == "broker"}
    assert of_broker & {line["session"] for line in of_lane}


@pytest.mark.parametrize("form", ["json", "journal"])
def test_errors_come_in_the_chosen_form(runtime_dir: Path, form: str) -> None:
    """What keeps the daemon from starting is in JSON too, or has the journal's priority."""
    command = [sys.executable, "-m", "kvd", "serve", "--runtime-dir", str(runtime_dir)]
    command += [
        "--cpu-bytes",
        "900TiB",
        *ALONE,
        *(["--log-format", "json"] if form == "json" else []),
    ]
    with (runtime_dir.parent / "log").open("w+") as sink:
        found = os.fstat(sink.fileno())
        environment = os.environ | {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        done = subprocess.run(command, stderr=sink, env=environment, check=False, timeout=60)
        sink.seek(0)
        last = sink.read().splitlines()[-1]
    assert done.returncode == 1
    if form == "json":
        assert json.loads(last)["level"] == "error"
        assert "--cpu-bytes" in json.loads(last)["event"]
    else:
        assert last.startswith("<3>broker: ")


def test_what_a_client_repeats_is_written_a_hundred_times_and_then_counted(
    start_daemon: StartDaemon,
) -> None:
    """Whoever talks nonsense again and again fills no log."""
    daemon = start_daemon()
    times, begun = MAX_PER_MINUTE + 40, time.monotonic()
    for _ in range(times):
        with RawClient(daemon.runtime_dir) as client:
            client.send_bytes(b"\x01\0")
            assert client.hung_up()
    daemon.stop()
    lines = [line for line in daemon.log.read_text().splitlines() if "is closed: a message" in line]
    told = [line for line in lines if "left out" not in line]
    left_out = sum(int(n) for n in re.findall(r"left out (\d+) more lines", "\n".join(lines)))
    windows = 1 + (time.monotonic() - begun) // WINDOW_SECONDS
    assert len(told) <= windows * MAX_PER_MINUTE
    assert len(told) + left_out == times


def test_a_loop_that_stood_still_says_so_once(daemon: Daemon) -> None:
    """Frozen and let go: a line in the log and an event of the report tell for how long."""
    with frozen(daemon.process.pid):
        time.sleep(2 * MAX_STALL_SECONDS)  # it is the time that counts
    events = [event["text"] for event in daemon.status()["events"]]
    said = [text for text in events if text.startswith("the broker's loop stood still for ")]
    assert said
    longest = max(said, key=seconds)  # a busy machine may have held it up for a moment, too
    assert seconds(longest) > MAX_STALL_SECONDS
    daemon.stop()
    assert daemon.log.read_text().count(longest) == 1


def seconds(text: str) -> float:
    """For how long a loop stood still."""
    return float(text.split(" for ")[1].split(maxsplit=1)[0])
