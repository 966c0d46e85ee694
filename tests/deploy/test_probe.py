"""The probe of containers, against a real daemon."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import Daemon
from tests.http.serving import over_unix


def probe(runtime_dir: Path, *path: str) -> subprocess.CompletedProcess[str]:
    """Run it as a container's engine would."""
    return subprocess.run(
        [sys.executable, "-m", "kvd.http.probe", *path],
        env=os.environ | {"KVD_RUNTIME_DIR": str(runtime_dir)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_probes_follow_readiness_and_life(daemon: Daemon) -> None:
    """Ready: both pass, /readyz by default. Drained: that fails with the reason, /livez passes."""
    with over_unix(daemon) as client:  # its process may take its time to start; a probe does not
        assert client.get("/livez").status_code == 200
    for path in ([], ["/readyz"], ["/livez"]):
        done = probe(daemon.runtime_dir, *path)
        assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    drain = [sys.executable, "-m", "kvd", "drain", "--runtime-dir", str(daemon.runtime_dir)]
    subprocess.run(drain, check=True, capture_output=True, timeout=60)
    while (done := probe(daemon.runtime_dir)).returncode == 0:
        pass  # HTTP's report may be half a second old
    assert "drain" in done.stdout, done.stderr
    assert probe(daemon.runtime_dir, "/livez").returncode == 0


def test_no_daemon_fails_with_a_hint(tmp_path: Path) -> None:
    """Nobody at the socket: exit status 1, and the path."""
    done = probe(tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path}/http.sock" in done.stderr
