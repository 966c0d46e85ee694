"""`kvd config reload` and SIGHUP with a real daemon."""

import os
import signal
from pathlib import Path

import pytest

from tests.conftest import Daemon, StartDaemon
from tests.daemon.serving import run_kvd


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The daemon's file."""
    path = tmp_path / "kvd.toml"
    path.write_text("lease_seconds = 30.0\n")
    return path


@pytest.fixture
def daemon(start_daemon: StartDaemon, file: Path) -> Daemon:
    """A daemon that reads the file."""
    return start_daemon("--config", str(file), cpu_bytes="8MiB")


def test_reload_takes_up_what_it_can_and_names_the_rest(daemon: Daemon, file: Path) -> None:
    """The command says what changed, what waits and where it was found; the log says who asked."""
    file.write_text('lease_seconds = 20.0\npolicy = "lru"\nlog_level = "debug"\n')
    done = run_kvd("config", "reload", "--runtime-dir", str(daemon.runtime_dir))
    assert done.returncode == 0, done.stderr
    assert f"lease_seconds: 30.0 -> 20.0  ({file}:1)" in done.stdout
    assert "restart" in done.stdout
    assert f"policy: adaptive -> lru  ({file}:2)" in done.stdout
    log = daemon.wait_log("configuration reloaded by")
    assert f"uid {os.getuid()} pid " in log
    shown = run_kvd("config", "show", "--running", "--runtime-dir", str(daemon.runtime_dir)).stdout
    rows = {line.split()[0]: line for line in shown.splitlines()}
    assert "20.0" in rows["lease_seconds"]
    assert "lru" in rows["policy"]
    assert "after a restart lru" in rows["policy"]
    assert "--cpu-bytes" in rows["cpu_bytes"]


def test_a_bad_file_is_refused_and_the_old_settings_hold(daemon: Daemon, file: Path) -> None:
    """Exit status 1 with every mistake; the daemon goes on as before."""
    file.write_text('lease_seconds = "soon"\npolicies = 1\n')
    done = run_kvd("config", "reload", "--runtime-dir", str(daemon.runtime_dir))
    assert done.returncode == 1
    assert f"{file}:1: lease_seconds = 'soon'" in done.stderr
    assert "did you mean policy?" in done.stderr
    shown = run_kvd("config", "show", "--running", "--runtime-dir", str(daemon.runtime_dir)).stdout
    assert "30.0" in shown
    assert "old settings hold" in daemon.wait_log("refused")


def test_sighup_reloads(daemon: Daemon, file: Path) -> None:
    """SIGHUP does what the command does, and ends nothing: neither broker nor lane."""
    lane = daemon.wait_ready()["lanes"][0]["pid"]
    file.write_text("lease_seconds = 10.0\n")
    os.kill(lane, signal.SIGHUP)
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_log("configuration reloaded by SIGHUP: lease_seconds = 10.0 (was 30.0)")
    assert daemon.wait_ready()["lanes"][0]["pid"] == lane
