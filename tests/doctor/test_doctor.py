"""`kvd doctor` on this machine, as it is and deliberately broken."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.cli import cli
from kvd.config.settings import Settings
from kvd.config.values import parse_tier
from kvd.doctor import Level, probes
from kvd.doctor.checks import examine
from kvd.doctor.facts import Facts
from kvd.doctor.probes import TierFacts, probe_store, probe_tier
from tests.daemon.serving import StartDaemon
from tests.daemon.users import OTHER_UID, as_user, needs_root
from tests.fakecuda.harness import FakeCuda
from tests.processes import frozen, python
from tests.slowfs import slow_filesystem
from tests.waiting import PATIENCE, eventually

LEVELS = ["ok", "warn", "fail"]


@pytest.fixture(autouse=True)
def _patient_on_a_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual port may be taken; a process that starts slowly is no disk that hangs."""
    monkeypatch.setenv("KVD_HTTP_LISTEN", "127.0.0.1:0")
    monkeypatch.setattr(probes, "PATIENCE_SECONDS", PATIENCE)


def doctor(
    *options: str, environment: dict[str, str] | None = None
) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit status, and by name the worst level and all texts of the findings."""
    done = python("-m", "kvd", "doctor", "--json", *options, environment=environment)
    assert done.stdout, done.stderr
    findings: dict[str, tuple[str, str]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        level, text = findings.get(finding["name"], ("ok", ""))
        worst = max(level, finding["level"], key=LEVELS.index)
        findings[finding["name"]] = (worst, f"{text}\n{finding['text']}")
    return done.returncode, findings


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


@pytest.mark.fakecuda
@pytest.mark.parametrize(
    ("switches", "name", "level", "says"),
    [
        ({"COMPUTE_MODE": 3}, "GPU", "fail", "EXCLUSIVE_PROCESS"),
        ({"COMPUTE_MODE": 3, "MPS": 1}, "GPU", "ok", "shares memory by IPC handles"),
        ({"FAIL": "cuInit:1:999"}, "GPU", "fail", "CUDA_ERROR_UNKNOWN"),
        ({"DRIVER_VERSION": 12040}, "GPU driver", "warn", "CUDA 12.4"),
    ],
    ids=["exclusive", "exclusive with MPS", "does not start", "old"],
)
def test_the_driver_and_its_version_are_judged(
    tmp_path: Path,
    fakecuda: FakeCuda,
    switches: dict[str, object],
    name: str,
    level: str,
    says: str,
) -> None:
    """Without a context, as a lane would find it."""
    status, findings = doctor(*quiet(tmp_path), environment=fakecuda.environment(**switches))
    assert (findings[name][0], status) == (level, int(level == "fail"))
    assert says in findings[name][1]


def test_a_running_daemon_is_seen_with_its_own_limits(
    tmp_path: Path, start_daemon: StartDaemon
) -> None:
    """The daemon that serves the directory is named, another is a warning; one that hangs fails."""
    daemon = start_daemon(where=tmp_path / "run")
    other = start_daemon()
    pid = daemon.process.pid
    _, findings = eventually(  # the doctor does not wait for long
        lambda: doctor(*quiet(tmp_path)), lambda done: f"pid {pid}, ready" in done[1]["daemon"][1]
    )
    assert f"the daemon, pid {pid}" in findings["open files"][1]
    assert f"pid {other.process.pid}" in findings["other daemon"][1]
    with frozen(pid):
        status, findings = doctor(*quiet(tmp_path))
    assert (status, findings["daemon"][0]) == (1, "fail")
    assert f"pid {pid} holds" in findings["daemon"][1]


def test_the_pool_of_a_stopped_daemon_counts(start_daemon: StartDaemon) -> None:
    """What it has left is used again by the next one, so it is no memory that is missing."""
    daemon = start_daemon("--keep-pool", "yes")
    settings = Settings(runtime_dir=str(daemon.runtime_dir), cpu_bytes="64MiB", http_listen="off")
    daemon.stop()
    facts = Facts(settings)
    assert facts.existing_bytes is not None
    assert facts.existing_bytes >= 64 * 2**20
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
        findings = {finding.name: finding for finding in examine(Facts(settings))}
    finding = findings["daemon"]
    assert finding.level is Level.WARN
    assert f"pid {daemon.process.pid} serves {here}" in finding.text
    assert f"uid {OTHER_UID} may not enter {here} (mode 0750, group 4243)" in finding.remedy
    assert f"usermod -aG 4243 {OTHER_UID}" in finding.remedy
    assert "taken already" in findings["memory"].text
    daemon.stop()
    with as_user():
        findings = {finding.name: finding for finding in examine(Facts(settings))}
    assert "cannot be examined" in findings["memory"].text
    assert f"uid {OTHER_UID} may not enter /dev/shm/kvd-" in findings["memory"].remedy


def test_a_directory_is_seen_where_it_lies_and_keeps_nothing(tmp_path: Path) -> None:
    """Mount, room and speed are those of the directory's file system, and no file is left."""
    facts = probe_tier(f"disk:{tmp_path}/tier,size=1GiB")
    assert (facts.problem, facts.hung) == ("", "")
    disk, room = facts.disk, os.statvfs(tmp_path)
    assert disk is not None
    assert disk.size == room.f_blocks * room.f_frsize
    assert tmp_path.is_relative_to(disk.mounted_at)
    assert (disk.exists, disk.writable, disk.existing_bytes) == (False, True, 0)
    assert not disk.direct or (disk.written and disk.read)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_hangs_does_not_hang_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that never answers is named by its mount, and by what was asked of it."""
    monkeypatch.setattr(probes, "PATIENCE_SECONDS", 1.0)
    with slow_filesystem(tmp_path / "slow") as slow:

        def look() -> TierFacts:
            monkeypatch.setattr(probes, "PATIENCE_SECONDS", 2 * probes.PATIENCE_SECONDS)
            return probe_tier(f"disk:{slow.file},size=1GiB")

        facts = eventually(look, lambda facts: facts.disk and facts.disk.filesystem)
        assert facts.hung == f"looking at {slow.file}"
        assert facts.disk is not None
        assert facts.disk.mounted_at == str(slow.file.parent)
        assert facts.disk.filesystem == "fuse"
    ends = {process.wait(PATIENCE) for process in probes.abandoned}  # they end with the mount
    probes.abandoned.clear()
    assert ends == {-signal.SIGKILL}


def test_a_master_that_answers_and_one_that_does_not() -> None:
    """A shared store's master is connected to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        master = f"127.0.0.1:{listener.getsockname()[1]}"
        setting = parse_tier(f"mooncake:master={master}")
        assert not any("refused" in fact for fact in probe_store(setting))
    assert any("refused" in fact for fact in probe_store(setting))


def test_probes_import_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may call the doctor anywhere; and a probe that a signal ends is reported as that."""
    (tmp_path / "socket.py").write_text("raise SystemExit('of the working directory')")
    monkeypatch.chdir(tmp_path)
    assert probes.run_python("-c", "import socket; print(1)", seconds=PATIENCE)[:2] == (b"1\n", "")
    crash = (
        "import os, sys; print('a warning', file=sys.stderr, flush=True); os.kill(os.getpid(), 6)"
    )
    assert probes.run_python("-c", crash, seconds=PATIENCE)[1] == "killed by signal 6"
