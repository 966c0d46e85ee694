"""`kvd serve` and `kvd status` as an operator meets them."""

from pathlib import Path

import pytest

from tests.conftest import Daemon
from tests.daemon.serving import run_kvd


def test_status_without_a_daemon_says_how_to_start_one(tmp_path: Path) -> None:
    """No daemon: exit status not 0, and the command to start one."""
    done = run_kvd("status", "--runtime-dir", str(tmp_path))
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
