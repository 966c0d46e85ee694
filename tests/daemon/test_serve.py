"""`kvd serve`: start, settings, log, reload, stop."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvd.logs import MAX_PER_MINUTE, WINDOW_SECONDS
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine
from tests.daemon.serving import run_kvd
from tests.daemon.users import OTHER_UID, as_user, needs_root
from tests.processes import children_running, has_ended, kill_and_wait, python
from tests.raw_client import RawClient
from tests.waiting import PATIENCE, eventually


@pytest.mark.parametrize(
    "command",
    ["status", "engines", "namespaces", "config reload", "config show --running", "selftest"],
)
def test_a_command_for_programs_prints_its_error_as_json(tmp_path: Path, command: str) -> None:
    """With --json and no daemon: one object on stdout, the line for people, exit status 1."""
    done = run_kvd(*command.split(), "--runtime-dir", str(tmp_path), "--json")
    assert done.returncode == 1
    assert done.stderr == f"Error: {json.loads(done.stdout)['error']}\n"
    assert "no daemon answers" in done.stderr


@needs_root
@pytest.mark.parametrize(
    "command",
    [
        "status --wait 2m",
        "top --once",
        "engines",
        "drain",
        "resume",
        "clear --yes",
        "evict --older-than 1h",
        "config reload",
        "config show --running",
        "selftest",
        "purge",
    ],
)
def test_a_directory_that_may_not_be_entered_is_named_at_once(
    runtime_dir: Path, command: str
) -> None:
    """Every command says uid, directory, mode and remedy; none waits or advises `kvd serve`."""
    runtime_dir.parent.chmod(0o711)
    runtime_dir.mkdir(0o750)
    os.chown(runtime_dir, 0, OTHER_UID)
    elsewhere = str(runtime_dir.parent / "elsewhere")
    # The other user may not be able to import: what the command needs is there after this.
    run_kvd(*command.replace("2m", "0").split(), "--runtime-dir", elsewhere)
    begin = time.monotonic()
    with as_user(OTHER_UID + 1):
        done = run_kvd(*command.split(), "--runtime-dir", str(runtime_dir))
    assert time.monotonic() - begin < PATIENCE
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    denied = f"uid {OTHER_UID + 1} may not enter {runtime_dir} (mode 0750, group {OTHER_UID}): "
    assert f"{denied}usermod -aG {OTHER_UID} {OTHER_UID + 1}" in done.stderr
    assert "kvd serve" not in done.stderr


def test_sigterm_drains_and_leaves_nothing(daemon: Daemon) -> None:
    """SIGTERM ends the daemon with 0; sockets, lock and pool are gone."""
    said = daemon.wait_log("pool of 8 MiB at ")
    pool = Path(said.split("pool of 8 MiB at ")[1].split()[0])
    assert pool.exists()
    assert daemon.stop() == 0
    assert not pool.exists()
    assert list(daemon.runtime_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cpu-bytes", "900TiB"], ["the machine's memory", "--cpu-bytes"]),
        (["--pool-dir", "/nonexistent"], ["/nonexistent: no such directory"]),
        (["--pool-dir", "/etc/passwd"], ["/etc/passwd: this is not a directory"]),
        (["--policy", "mru"], ["--policy: policy = 'mru': needs one of adaptive, lru"]),
    ],
)
def test_bad_settings_name_the_value(
    tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    """A setting that cannot work gives one line with key and value, and exit status 78.

    For a pool that does not fit it is 1: there may be more memory later.
    """
    done = run_kvd("serve", "--runtime-dir", str(tmp_path / "run"), *arguments)
    assert done.returncode == (1 if "--cpu-bytes" in arguments else os.EX_CONFIG)
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("place", ["flag", "file"])
def test_errors_of_settings_follow_the_format_of_the_log(tmp_path: Path, place: str) -> None:
    """One line of JSON for each that is wrong, wherever log_format is set."""
    file = tmp_path / "kvd.toml"
    file.write_text('policy = "mru"\nreserve = "x"\n')
    arguments = ["serve", "--config", str(file), "--runtime-dir", str(tmp_path / "run")]
    if place == "flag":
        arguments += ["--log-format", "json"]
    else:
        file.write_text(f'{file.read_text()}log_format = "json"\n')
    done = run_kvd(*arguments)
    assert done.returncode == os.EX_CONFIG
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"].split(":")[1] for line in lines] == ["1", "2"]
    assert {line["level"] for line in lines} == {"error"}


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


def seconds(text: str) -> float:
    """For how long a loop stood still."""
    return float(text.split(" for ")[1].split(maxsplit=1)[0])
