"""`kvd doctor` on this machine, as it is and deliberately broken."""

import errno
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from kvd.cli import cli
from kvd.config.settings import Settings
from kvd.doctor import Level
from kvd.doctor.checks import examine
from kvd.doctor.facts import Facts
from tests.daemon.serving import StartDaemon
from tests.daemon.users import OTHER_UID, as_user, needs_root
from tests.fakecuda.harness import FakeCuda
from tests.processes import frozen
from tests.waiting import eventually

LEVELS = ["ok", "warn", "fail"]


@pytest.fixture(autouse=True)
def a_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody on this machine may listen on the usual one."""
    monkeypatch.setenv("KVD_HTTP_LISTEN", "127.0.0.1:0")


def doctor(
    *options: str,
    before: Callable[[], None] | None = None,
    env: dict[str, str] | None = None,
) -> tuple[int, dict[str, Any]]:
    """Exit status and findings, the latter by name; those of one name are joined."""
    done = subprocess.run(
        [sys.executable, "-m", "kvd", "doctor", "--json", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        preexec_fn=before,  # only limits are set, no thread is running
        env=env,
    )
    assert done.stdout, done.stderr
    found: dict[str, Any] = {}
    for finding in json.loads(done.stdout)["findings"]:
        known = found.setdefault(finding["name"], finding)
        if known is not finding:
            known["level"] = max(known["level"], finding["level"], key=LEVELS.index)
            known["text"] += "\n" + finding["text"]
    return done.returncode, found


def quiet(tmp_path: Path) -> tuple[str, ...]:
    """Options of a small daemon that would work here."""
    return ("--runtime-dir", str(tmp_path / "run"), "--cpu-bytes", "64MiB")


def test_a_small_pool_suits_this_machine(tmp_path: Path) -> None:
    """Nothing fails for a daemon of 64 MiB, nothing is made, and lines begin with their level."""
    done = CliRunner().invoke(cli, ["doctor", *quiet(tmp_path)])
    lines = [line for line in done.output.splitlines() if not line.startswith("      →")]
    assert done.exit_code == 0
    assert len(lines) >= 10
    assert {line.split()[0] for line in lines} <= {"ok", "warn"}
    assert not (tmp_path / "run").exists()


def lower() -> None:
    """Lock 64 KiB at most."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))


@pytest.mark.fakecuda
@pytest.mark.parametrize(
    ("mode", "mps", "level", "says"),
    [
        (0, 0, "ok", "shares memory by IPC handles"),
        (3, 0, "fail", "EXCLUSIVE_PROCESS"),
        (3, 1, "ok", "shares memory by IPC handles"),
        (2, 0, "fail", "PROHIBITED"),
    ],
    ids=["default", "exclusive", "exclusive with MPS", "prohibited"],
)
def test_a_gpu_that_lets_one_process_in_fails(
    tmp_path: Path, fakecuda: FakeCuda, mode: int, mps: int, level: str, says: str
) -> None:
    """The compute mode is read without a context; a low limit of locked memory does no harm."""
    env = fakecuda.environment(COMPUTE_MODE=mode, MPS=mps)
    status, found = doctor(*quiet(tmp_path), before=lower, env=env)
    assert (found["GPU"]["level"], status) == (level, int(level == "fail"))
    assert says in found["GPU"]["text"]


@pytest.mark.fakecuda
def test_a_driver_that_does_not_start_is_a_finding(tmp_path: Path, fakecuda: FakeCuda) -> None:
    """An error of the driver is quoted; the doctor itself goes on."""
    status, found = doctor(*quiet(tmp_path), env=fakecuda.environment(FAIL="cuInit:1:999"))
    assert (status, found["GPU"]["level"]) == (1, "fail")
    assert "CUDA_ERROR_UNKNOWN" in found["GPU"]["text"]


@pytest.mark.fakecuda
@pytest.mark.parametrize(
    ("version", "name", "level", "text"),
    [
        (11080, "GPU", "fail", "the driver is for CUDA 11.8"),
        (12040, "GPU driver", "warn", "CUDA 12.4"),
        (12080, "GPU driver", "ok", "CUDA 12.8"),
    ],
)
def test_the_version_of_the_driver_is_judged(
    tmp_path: Path, fakecuda: FakeCuda, version: int, name: str, level: str, text: str
) -> None:
    """Too old to serve, old enough to be slow, or good: as a lane would find it."""
    _, found = doctor(*quiet(tmp_path), env=fakecuda.environment(DRIVER_VERSION=version))
    assert found[name]["level"] == level
    assert text in found[name]["text"]


def test_a_port_in_use_is_found(tmp_path: Path) -> None:
    """An address that somebody else listens on is named before the daemon fails on it."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        listen = f"127.0.0.1:{holder.getsockname()[1]}"
        settings = Settings(http_listen=listen, runtime_dir=str(tmp_path))
        assert listen in Facts(settings).port_problem


def test_a_running_daemon_is_seen_with_its_own_limits(
    tmp_path: Path, start_daemon: StartDaemon
) -> None:
    """The daemon that serves the directory is named, another is a warning; one that hangs fails."""
    daemon = start_daemon(where=tmp_path / "run")
    other = start_daemon()
    _, found = eventually(  # the doctor does not wait for long
        lambda: doctor(*quiet(tmp_path)), lambda told: ", ready" in told[1]["daemon"]["text"]
    )
    assert f"pid {daemon.process.pid}, ready" in found["daemon"]["text"]
    assert f"the daemon, pid {daemon.process.pid}" in found["open files"]["text"]
    assert f"pid {other.process.pid}" in found["other daemon"]["text"]
    with frozen(daemon.process.pid):
        status, found = doctor(*quiet(tmp_path))
    assert (status, found["daemon"]["level"]) == (1, "fail")
    assert f"pid {daemon.process.pid} holds" in found["daemon"]["text"]


def test_the_pool_of_a_stopped_daemon_counts(start_daemon: StartDaemon) -> None:
    """What it has left is used again by the next one, so it is no memory that is missing."""
    daemon = start_daemon("--keep-pool", "yes")
    settings = Settings(runtime_dir=str(daemon.runtime_dir), cpu_bytes="64MiB", http_listen="off")
    assert Facts(settings).held == 0  # it runs: nothing is to be made
    daemon.stop()
    facts = Facts(settings)
    assert facts.held >= facts.wanted == 64 * 2**20
    (memory,) = [finding for finding in examine(facts) if finding.name == "memory"]
    assert "the kept pool has 64" in memory.text


@needs_root
def test_a_user_who_may_not_enter_is_told_how_to(start_daemon: StartDaemon) -> None:
    """The daemon is well: directory, mode and group are named, and nothing is to be restarted."""
    daemon = start_daemon("--keep-pool", "yes")
    here = daemon.runtime_dir
    here.parent.chmod(0o711)
    os.chown(here, -1, 4243)
    settings = Settings(runtime_dir=str(here), cpu_bytes="64MiB", http_listen="off")
    with as_user():
        found = {finding.name: finding for finding in examine(Facts(settings))}
    told = found["daemon"]
    assert told.level is Level.WARN
    assert f"pid {daemon.process.pid} serves {here}" in told.text
    assert f"uid {OTHER_UID} may not enter {here} (mode 0750, group 4243)" in told.remedy
    assert f"usermod -aG 4243 {OTHER_UID}" in told.remedy
    assert "taken already" in found["memory"].text
    daemon.stop()
    with as_user():
        found = {finding.name: finding for finding in examine(Facts(settings))}
    assert "cannot be examined" in found["memory"].text
    assert f"uid {OTHER_UID} may not enter /dev/shm/kvd-" in found["memory"].remedy


@pytest.mark.parametrize("fails", ["os.statvfs", "kvd.doctor.facts._status"])
def test_no_doctor_ends_in_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """With a Python that cannot be executed and places that cannot be seen, all else is judged."""

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/closed")

    monkeypatch.setattr(sys, "executable", str(tmp_path))
    monkeypatch.setattr(fails, denied)
    monkeypatch.setattr(psutil, "process_iter", denied)
    done = CliRunner().invoke(cli, ["doctor", "--json", *quiet(tmp_path)])
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit)
    found = {finding["name"]: finding for finding in json.loads(done.output)["findings"]}
    assert "Permission denied" in found["processes"]["text"]
    assert "PYTHON=" in found["processes"]["remedy"]
    assert {"GPU", "daemon", "pool directory"} <= found.keys()
    assert found["HTTP"]["level"] == "ok"
