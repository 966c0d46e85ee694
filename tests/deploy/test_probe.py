"""The probe of containers, against a real daemon."""

import subprocess
import sys
from pathlib import Path

from tests.conftest import Daemon
from tests.daemon.serving import run_kvd
from tests.deploy.places import run
from tests.waiting import eventually


def probe(runtime_dir: Path, *path: str) -> subprocess.CompletedProcess[str]:
    """Run it as a container's engine would."""
    command = (sys.executable, "-m", "kvd.report.probe", *path)
    return run(*command, KVD_RUNTIME_DIR=str(runtime_dir))


def passed(runtime_dir: Path, *path: str) -> subprocess.CompletedProcess[str]:
    """The first that passes: HTTP may not have started yet, and a probe does not wait for long."""
    return eventually(lambda: probe(runtime_dir, *path), lambda done: done.returncode == 0)


def test_probes_follow_readiness_and_life(daemon: Daemon) -> None:
    """Ready: both pass, /readyz by default. Drained: that fails with the reason, /livez passes."""
    for path in ([], ["/readyz"], ["/livez"]):
        done = passed(daemon.runtime_dir, *path)
        assert (done.stdout, done.stderr) == ("ok\n", "")
    assert run_kvd("drain", "--runtime-dir", str(daemon.runtime_dir)).returncode == 0
    done = eventually(lambda: probe(daemon.runtime_dir), lambda done: "drain" in done.stdout)
    assert done.returncode == 1
    passed(daemon.runtime_dir, "/livez")


def test_no_daemon_fails_with_a_hint(tmp_path: Path) -> None:
    """Nobody at the socket: exit status 1, and the path."""
    done = probe(tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path}/http.sock" in done.stderr
