"""The unit and what lies beside it, and a daemon with its service manager."""

import ctypes
import itertools
import os
import re
import shutil
import signal
import socket
import struct
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import click
import pytest

from kvd.cli import cli
from kvd.config.sources import Sources
from kvd.errors import ConfigError
from kvd.server.notify import SHUTDOWN_SECONDS, Notifier
from tests.conftest import StartDaemon
from tests.deploy.places import DEPLOY, run, tool
from tests.processes import children_running
from tests.waiting import eventually

SYSTEMD = DEPLOY / "systemd"
NAMES = ("kvd.service", "run-hugepages-kvd.mount")
HIGHEST_EXPOSURE = 20  # of 100


def parsed(name: str) -> ConfigParser:
    """A unit file; of keys given twice the last."""
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((SYSTEMD / name).read_text())
    return parser


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """Unit, mount and drop-ins verify without a word, and the unit exposes little."""
    own = Path("/lib/systemd/system")
    if not own.is_dir():
        pytest.skip("systemd's own units are not installed")
    root = tmp_path / "root"
    shutil.copytree(own, root / "usr/lib/systemd/system", symlinks=True)
    (root / "lib").symlink_to("usr/lib")
    units = root / "etc/systemd/system"
    (units / "kvd.service.d").mkdir(parents=True)
    for name in NAMES:
        shutil.copy(SYSTEMD / name, units)
    for name in ("hugepages.conf", "wait-ready.conf"):
        shutil.copy(SYSTEMD / name, units / "kvd.service.d")
    kvd = root / "opt/kvd/bin/kvd"
    kvd.parent.mkdir(parents=True)
    kvd.write_text("#!/bin/sh\n")
    kvd.chmod(0o755)
    analyze = tool("systemd-analyze")
    done = run(analyze, "verify", "--man=no", f"--root={root}", *NAMES)
    assert done.stdout + done.stderr == ""
    security = (analyze, "security", "--no-pager", "--offline=yes")
    done = run(*security, f"--threshold={HIGHEST_EXPOSURE}", SYSTEMD / "kvd.service")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


@pytest.mark.parametrize("old", ['pool_dir = "/mnt/old"', ""])
def test_the_pool_moves_to_huge_pages_whatever_the_settings_file_has(
    tmp_path: Path, old: str
) -> None:
    """The command of the README sets the mount's directory, also where a section ends the file."""
    (command,) = re.findall(r"^sed -i .*", (SYSTEMD / "README.md").read_text(), re.MULTILINE)
    file = tmp_path / "kvd.toml"
    file.write_text(f'# mine\n{old}\ncpu_bytes = "1GiB"\n[quota.llama]\nfloor = "8MiB"\n')
    for _ in range(2):
        done = run("sh", "-c", command.replace("/etc/kvd/kvd.toml", str(file)))
        assert done.returncode == 0, done.stderr
        settings = Sources(config=file, flags={}, environment={}).load().settings
        assert settings.pool_dir == parsed("run-hugepages-kvd.mount")["Mount"]["Where"]
        assert (settings.cpu_bytes, list(settings.quota)) == ("1GiB", ["llama"])


def test_the_unit_and_what_lies_beside_it_agree_with_the_daemon() -> None:
    """A wrong setting is not tried again, a stop has time to drain, directories are the same.

    The user is a system user; nothing of systemd's removes the pool's file between two starts.
    """
    service = parsed("kvd.service")["Service"]
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == str(os.EX_CONFIG)
    assert service["RemoveIPC"] == "no"
    assert service["RuntimeDirectoryPreserve"] == "yes"
    assert "DynamicUser" not in service
    settings = Sources(config=DEPLOY / "kvd.toml", environment={}).load().settings
    assert float(service["TimeoutStopSec"]) >= settings.drain_seconds + 60
    user = (SYSTEMD / "kvd.sysusers.conf").read_text().splitlines()[-1].split()
    assert user[:3] == ["u", service["User"], "-"]
    directory = (SYSTEMD / "kvd.tmpfiles.conf").read_text().splitlines()[-1].split()
    expected = [f"/run/{service['RuntimeDirectory']}", service["RuntimeDirectoryMode"]]
    assert directory[1:5] == [*expected, service["User"], service["Group"]]


def test_the_commands_of_the_units_are_ones_that_kvd_takes() -> None:
    """Command and options exist."""
    service, drop_in = parsed("kvd.service")["Service"], parsed("wait-ready.conf")["Service"]
    for line in (service["ExecStart"], service["ExecReload"], drop_in["ExecStartPost"]):
        _, *words = line.split()
        command: click.Command | None = cli
        while isinstance(command, click.Group):
            command = command.get_command(click.Context(command), words.pop(0))
        assert command is not None
        known = {option for parameter in command.params for option in parameter.opts}
        assert {option for option in words if option.startswith("--")} <= known


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_the_installer_refuses_a_python_that_the_service_cannot_run(
    runtime_dir: Path, mode: int
) -> None:
    """One below a closed directory is named with the remedy, and nothing is installed with it."""
    if os.geteuid() or Path("/opt/kvd").exists():
        pytest.skip("needs root, and no kvd in /opt")
    folder = runtime_dir.parent
    folder.chmod(0o755)
    log, stubs = folder / "log", folder / "stubs"
    log.touch()
    log.chmod(0o666)
    stubs.mkdir(0o755)
    for name, script in {
        "install": 'echo "install $*" >>"$LOG"',
        "systemd-sysusers": 'echo "systemd-sysusers $*" >>"$LOG"',
        "systemd-tmpfiles": 'echo "systemd-tmpfiles $*" >>"$LOG"',
        "runuser": 'shift 3; exec setpriv --reuid 65534 --regid 65534 --clear-groups -- "$@"',
        "python/python3": 'echo "$*" >>"$LOG"',  # makes no environment
    }.items():
        (stubs / name).parent.mkdir(exist_ok=True)
        (stubs / name).write_text(f"#!/bin/sh\n{script}\n")
        (stubs / name).chmod(0o755)
    python = stubs / "python/python3"
    stubs.chmod(0o755)  # whatever the umask is
    python.parent.chmod(mode)
    install = ("sh", SYSTEMD / "install.sh", ".[daemon]")
    path = f"{stubs}:{os.environ['PATH']}"
    done = run(*install, PATH=path, LOG=str(log), PYTHON=str(python))
    assert done.returncode
    refused = f"user kvd cannot run {python}" in done.stderr
    assert refused is (mode == 0o700)
    assert ("PYTHON=/usr/bin/python3" in done.stderr) is refused
    assert ("-m venv /opt/kvd\n" in log.read_text()) is not refused
    assert "kvd.service" not in log.read_text()


WATCHDOG_SECONDS = 0.8
_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17


class Manager:
    """Receives what a service says at a path, as systemd would."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.socket.bind(address)
        self.pids: set[int] = set()

    def receive(self, seconds: float) -> list[str]:
        """The lines of the next message; none when nothing comes within `seconds`."""
        self.socket.settimeout(seconds)
        try:
            data, ((_, _, credentials),), _, _ = self.socket.recvmsg(4096, 100)
        except TimeoutError:
            return []
        self.pids.add(struct.unpack("3i", credentials)[0])
        return data.decode().splitlines()

    def until(self, line: str, seconds: float = 60.0) -> list[str]:
        """Every line up to the message that holds `line` (a beginning suffices)."""
        seen: list[str] = []
        while not any(said.startswith(line) for said in seen):
            message = self.receive(seconds)
            assert message, f"{line} did not come; {seen}"
            seen += message
        return seen


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    """A manager that listens."""
    made = Manager(str(tmp_path / "notify.sock"))
    yield made
    made.socket.close()


@pytest.fixture
def pid(start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch, manager: Manager) -> int:
    """A daemon under `manager` with a watchdog."""
    monkeypatch.setenv("LANE_SEES", "this")
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_SECONDS * 1e6)))
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    return start_daemon(ready=False).process.pid


def test_a_daemon_tells_the_service_manager_its_state(manager: Manager, pid: int) -> None:
    """READY first, though the pool is not there yet; state, pings, a reload, STOPPING.

    The variables are for the broker; a lane's process has the rest of its environment.
    """
    first = manager.receive(60.0)
    assert first[0] == "READY=1"
    assert first[1].startswith("STATUS=serving, not ready: ")
    manager.until("STATUS=ready")
    (lane,) = children_running(pid, "kvd.lane")
    seen_by_lane = lane.environ()
    assert seen_by_lane["LANE_SEES"] == "this"
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & set(seen_by_lane)
    for _ in range(3):
        manager.until("WATCHDOG=1")
    os.kill(pid, signal.SIGHUP)
    seen = manager.until("RELOADING=1")
    assert any(line.startswith("MONOTONIC_USEC=") for line in seen)
    manager.until("READY=1")
    os.kill(pid, signal.SIGTERM)
    last = manager.until("STOPPING=1")
    (extend,) = [line for line in last if line.startswith("EXTEND_TIMEOUT_USEC=")][-1:]
    drain_seconds, unpin_seconds = 10.0, 10.0  # nothing is pinned
    extended = int(extend.partition("=")[2])
    assert extended == int((drain_seconds + unpin_seconds + SHUTDOWN_SECONDS) * 1e6)
    assert manager.pids == {pid}


def test_a_wedged_loop_stops_the_pings_while_other_threads_run(manager: Manager, pid: int) -> None:
    """Only the loop's thread is held; no other thread of the daemon feeds the watchdog."""
    libc = ctypes.CDLL(None, use_errno=True)
    manager.until("STATUS=ready")
    if libc.ptrace(_SEIZE, pid, None, None):
        pytest.skip(f"a thread cannot be held here: {os.strerror(ctypes.get_errno())}")
    try:
        assert libc.ptrace(_INTERRUPT, pid, None, None) == 0
        os.waitpid(pid, os.WUNTRACED)
        while manager.receive(0.01):
            pass
        assert manager.receive(2.5 * WATCHDOG_SECONDS) == []
    finally:
        libc.ptrace(_DETACH, pid, None, None)
    manager.until("WATCHDOG=1")


def test_a_watchdog_that_is_no_number_is_refused() -> None:
    """A daemon that could not feed its watchdog does not start."""
    for usec in ("soon", "0", "-5"):
        with pytest.raises(ConfigError, match=r"WATCHDOG_USEC.*WatchdogSec"):
            Notifier.from_environment({"WATCHDOG_USEC": usec})


def test_a_service_manager_that_does_not_read_or_is_gone_blocks_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full socket keeps the message for later; nobody at the address is one warning."""
    address = str(tmp_path / "notify.sock")
    notifier = Notifier(address)
    for _ in range(3):
        notifier.notify_stopping(1.0)
    assert caplog.text.count(address) == 1
    manager = Manager(address)
    for _ in range(1000):  # more than a socket holds
        notifier.notify_stopping(1.0)

    def last_heard() -> list[str]:  # what waited comes first, as much as finds room
        notifier.notify_stopping(2.0)
        return list(iter(lambda: manager.receive(0.1), []))[-1]

    last = ["STOPPING=1", f"EXTEND_TIMEOUT_USEC={2 + SHUTDOWN_SECONDS:.0f}000000"]
    eventually(last_heard, last.__eq__)
    manager.socket.close()
    notifier.close()


def test_the_watchdog_is_fed_at_half_its_interval() -> None:
    """A loop that turns feeds the watchdog every half interval, within one turn."""
    notices, turns = Notifier(watchdog_seconds=30.0), [turn / 4 for turn in range(480)]
    fed = [
        at
        for at in turns
        if notices.is_due(at) and "WATCHDOG=1" in notices.take_lines(at, "", None)
    ]
    gaps = [after - before for before, after in itertools.pairwise(fed)]
    assert len(gaps) >= 6
    assert all(15.0 <= gap <= 15.25 for gap in gaps)


def test_time_is_asked_for_only_while_the_pool_grows() -> None:
    """Progress since the last beat asks for one interval more; standing still and ready do not."""
    notices = Notifier(watchdog_seconds=10.0)
    extend = "EXTEND_TIMEOUT_USEC=10000000"
    assert extend in notices.take_lines(0.0, "0 %", 0.0)
    assert extend in notices.take_lines(5.0, "10 %", 10.0)
    assert extend not in notices.take_lines(10.0, "10 %", 10.0)
    assert extend in notices.take_lines(15.0, "11 %", 11.0)
    assert extend not in notices.take_lines(20.0, "ready", None)
