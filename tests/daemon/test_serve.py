"""`kvd serve` and `kvd status` as an operator meets them."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Daemon, StartDaemon
from tests.daemon.serving import run_kvd
from tests.waiting import PATIENCE


def test_a_ready_daemon_reports_itself(shared_daemon: Daemon) -> None:
    """The status names pid, boot id, pool and lane, and says ready."""
    report = shared_daemon.wait_ready()
    assert report["pid"] == shared_daemon.process.pid
    assert len(report["boot_id"]) == 32
    assert report["pool"]["cpu_bytes"] == 64 * 2**20
    assert [(lane["device"], lane["up"]) for lane in report["lanes"]] == [("host", True)]
    assert report["namespaces"] == []
    assert report["engines"] == []


def test_status_without_a_daemon_says_how_to_start_one(tmp_path: Path) -> None:
    """No daemon: exit status not 0, and the command to start one."""
    command = [sys.executable, "-m", "kvd", "status", "--runtime-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 1
    assert f"kvd serve --runtime-dir {tmp_path}" in done.stderr


def test_sigterm_drains_and_leaves_nothing(daemon: Daemon) -> None:
    """SIGTERM ends the daemon with 0; sockets, lock and pool are gone."""
    said = daemon.wait_log("pool of 64 MiB at ")
    pool = Path(said.split("pool of 64 MiB at ")[1].split()[0])
    assert pool.exists()
    assert daemon.stop() == 0
    assert not pool.exists()
    assert list(daemon.runtime_dir.iterdir()) == []


def test_a_second_daemon_refuses_and_names_the_first(
    daemon: Daemon, start_daemon: StartDaemon
) -> None:
    """Two daemons on one directory: the second says the first one's pid and leaves it alone."""
    second = start_daemon(ready=False)
    assert second.process.wait(PATIENCE) == 1
    assert f"pid {daemon.process.pid}" in second.log.read_text()
    assert daemon.wait_ready()["pid"] == daemon.process.pid


def test_a_frozen_lane_is_killed_and_replaced(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """SIGSTOP of the lane: after its timeout it is killed and another serves."""
    config = tmp_path / "kvd.toml"
    config.write_text("lane_timeout_seconds = 1.0\n")
    daemon = start_daemon("--config", str(config))
    before = daemon.wait_ready()["lanes"][0]["pid"]
    pidfd = os.pidfd_open(before)
    signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
    ended, _, _ = select.select([pidfd], [], [], PATIENCE)
    os.close(pidfd)
    assert ended, daemon.log.read_text()
    assert daemon.wait_ready()["lanes"][0]["pid"] != before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cpu-bytes", "900TiB"], ["/dev/shm", "--cpu-bytes"]),
        (["--pool-dir", "/nonexistent"], ["/nonexistent"]),
    ],
)
def test_bad_settings_name_the_value(
    tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    """A setting that cannot work gives one line with key and value, and exit status 1."""
    done = run_kvd("serve", "--runtime-dir", str(tmp_path / "run"), *arguments)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
