"""The start of a daemon: its lane's process comes first, and goes with it at any moment."""

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import StartDaemon
from tests.daemon.engines import Engine
from tests.daemon.serving import run_kvd
from tests.processes import children_running, has_ended, kill_and_wait, python
from tests.waiting import PATIENCE, eventually

AUTO: dict[str, Any] = {"cpu_bytes": "auto", "ready": False}


def waiting_lane(pid: int) -> psutil.Process:
    """The lane's process of a daemon that has no pool yet."""
    return eventually(lambda: children_running(pid, "kvd.lane"), lambda found: len(found) == 1)[0]


def test_nothing_large_is_imported_before_the_lane_is_started() -> None:
    """The broker's own imports run beside the lane's, and the directory is locked before most."""
    later = "{'numpy', 'kvd_proto.messages'}"
    done = python("-c", f"import sys, kvd.cli.serve; print({later} & set(sys.modules))")
    assert done.stdout == "set()\n", done.stderr


def test_a_lane_that_waits_for_a_pool_goes_with_its_broker(start_daemon: StartDaemon) -> None:
    """SIGKILL leaves no process behind; SIGTERM ends at once, as there is nothing to drain."""
    daemon = start_daemon(**AUTO)
    lane = waiting_lane(daemon.process.pid)
    daemon.stop(signal.SIGKILL)
    eventually(lambda: has_ended(lane))
    daemon = start_daemon("--drain-seconds", "1000", **AUTO)
    lane = waiting_lane(daemon.process.pid)
    daemon.status(wait=PATIENCE)  # else the signal may end it before it is a daemon
    daemon.stop(signal.SIGTERM)
    assert has_ended(lane)


def test_a_lane_that_dies_before_the_pool_is_there_is_started_again(
    start_daemon: StartDaemon,
) -> None:
    """Its end is told, and the first engine is served by the next one."""
    daemon = start_daemon("--reserve", "0", **AUTO)
    kill_and_wait(waiting_lane(daemon.process.pid).pid)
    eventually(lambda: daemon.status()["lanes"][0]["state"] == "down")
    with Engine(daemon.runtime_dir, world_size=1).wait_attached():
        assert daemon.status()["lanes"][0]["state"] == "up"


def test_a_start_that_fails_after_the_lane_was_started_leaves_no_process(
    start_daemon: StartDaemon,
) -> None:
    """One clear error, and all who inherited its standard error have closed it."""
    daemon = start_daemon()
    done = run_kvd(
        *("serve", "--runtime-dir", str(daemon.runtime_dir.parent / "other")),
        *("--cpu-bytes", "1PiB", "--http-listen", "off"),
    )
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert "does not fit" in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("files", [8, 14])
def test_a_start_that_may_open_no_file_says_so(tmp_path: Path, files: int) -> None:
    """One clear error with the remedy, whatever it was that it wanted to open."""
    limited = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}));"
        "import runpy; runpy.run_module('kvd', run_name='__main__', alter_sys=True)"
    )
    options = ("--runtime-dir", str(tmp_path / "run"), "--pool-dir", str(tmp_path))
    done = python("-c", limited, "serve", *options, "--cpu-bytes", "4MiB", "--http-listen", "off")
    assert done.returncode == 1
    assert "raise LimitNOFILE" in done.stderr
    assert "Traceback" not in done.stderr
