"""A daemon and its service manager, over a real NOTIFY_SOCKET."""

import ctypes
import os
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvd.errors import ConfigError
from kvd.server.notify import SHUTDOWN_SECONDS, Notifier
from tests.conftest import StartDaemon
from tests.processes import children_running

WATCHDOG_SECONDS = 0.8
_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_CREDENTIALS = struct.Struct("3i")


@dataclass
class Manager:
    """Receives what a service says, as systemd would."""

    address: str
    socket: socket.socket
    pids: set[int] = field(default_factory=set)

    def receive(self, seconds: float) -> list[str]:
        """The lines of the next message; none when nothing comes within `seconds`."""
        self.socket.settimeout(seconds)
        try:
            data, control, _, _ = self.socket.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
        except TimeoutError:
            return []
        for _, _, value in control:
            self.pids.add(_CREDENTIALS.unpack(value)[0])
        return data.decode().splitlines()

    def until(self, line: str, seconds: float = 60.0) -> list[str]:
        """Every line up to the message that holds `line` (a beginning suffices)."""
        seen: list[str] = []
        while not any(each.startswith(line) for each in seen):
            message = self.receive(seconds)
            assert message, f"{line} did not come; {seen}"
            seen += message
        return seen

    def drain(self) -> None:
        """Forget what waits to be read."""
        while self.receive(0.01):
            pass


@contextmanager
def listening(address: str) -> Iterator[Manager]:
    """A manager at `address`: a path, or @ and a name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        sock.bind("\0" + address[1:] if address.startswith("@") else address)
        yield Manager(address, sock)


def supervised(
    start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch, manager: Manager, *extra: str
) -> int:
    """A daemon under `manager` with a watchdog; its pid."""
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_SECONDS * 1e6)))
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    return start_daemon(*extra, ready=False).process.pid


def test_a_daemon_tells_its_manager_how_it_stands(
    start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """READY first, though the pool is not there yet; state, pings, a reload, STOPPING."""
    with listening(str(tmp_path / "notify.sock")) as manager:
        pid = supervised(start_daemon, monkeypatch, manager)
        first = manager.receive(60.0)
        assert first[0] == "READY=1"
        assert first[1].startswith("STATUS=serving, not ready: ")
        manager.until("STATUS=ready")
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
        assert int(extend.partition("=")[2]) == int(
            (drain_seconds + unpin_seconds + SHUTDOWN_SECONDS) * 1e6
        )
        assert manager.pids == {pid}


def test_an_abstract_address_is_one_too() -> None:
    """An @ and a name: a socket without a file."""
    address = f"@kvd-test-{os.getpid()}"
    with listening(address) as manager:
        notifier = Notifier(address)
        notifier.notify_stopping(600.0)  # of lanes; what follows takes more
        assert manager.receive(5.0) == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=630000000"]
        notifier.close()


def test_a_wedged_loop_stops_the_pings_while_other_threads_run(
    start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only the loop's thread is held; no other thread of the daemon feeds the watchdog."""
    libc = ctypes.CDLL(None, use_errno=True)
    with listening(str(tmp_path / "notify.sock")) as manager:
        pid = supervised(start_daemon, monkeypatch, manager)
        manager.until("STATUS=ready")
        if libc.ptrace(_SEIZE, pid, None, None):
            pytest.skip(f"a thread cannot be held here: {os.strerror(ctypes.get_errno())}")
        try:
            assert libc.ptrace(_INTERRUPT, pid, None, None) == 0
            os.waitpid(pid, os.WUNTRACED)
            manager.drain()
            assert manager.receive(2.5 * WATCHDOG_SECONDS) == []
        finally:
            libc.ptrace(_DETACH, pid, None, None)
        manager.until("WATCHDOG=1")


def test_an_aborted_daemon_says_where_its_loop_stood(
    start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGABRT, which a missed watchdog sends, leaves the loop's stack in the log."""
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    daemon = start_daemon()
    assert daemon.stop(signal.SIGABRT) == -signal.SIGABRT
    assert "in _turn" in daemon.log.read_text()


def test_lanes_inherit_nothing_of_it(
    start_daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables are for the broker; a lane's process has the rest of its environment."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify.sock"))
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    monkeypatch.setenv("LANE_SEES", "this")
    daemon = start_daemon()
    (lane,) = children_running(daemon.process.pid, "kvd.lane")
    seen = lane.environ()
    assert seen["LANE_SEES"] == "this"
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & set(seen)


def test_the_watchdog_is_fed_twice_in_its_time() -> None:
    """WATCHDOG_USEC for this process."""
    environ = {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier.from_environment(environ)
    assert (notifier.watchdog, notifier.period) == (True, 15.0)


def test_a_watchdog_meant_for_another_process_is_left_alone() -> None:
    """WATCHDOG_PID of somebody else: no pings."""
    environ = {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}
    assert not Notifier.from_environment(environ).watchdog


@pytest.mark.parametrize("usec", ["soon", "0", "-5"])
def test_a_watchdog_that_is_no_number_is_refused(usec: str) -> None:
    """A daemon that could not feed its watchdog does not start."""
    with pytest.raises(ConfigError, match=r"WATCHDOG_USEC.*WatchdogSec"):
        Notifier.from_environment({"WATCHDOG_USEC": usec})


def test_a_manager_that_does_not_read_holds_nobody_up(tmp_path: Path) -> None:
    """A full socket keeps the message for later and returns at once; then it arrives."""
    address = str(tmp_path / "notify.sock")
    with listening(address) as manager:
        notifier = Notifier(address)
        sent = 0
        while not notifier._unsent:
            notifier.notify_stopping(float(sent))
            sent += 1
        for _ in range(sent - 1):
            assert manager.receive(5.0)
        notifier.notify_stopping(1.0)
        assert manager.receive(5.0)
        assert not notifier._unsent
        notifier.close()


def test_a_manager_that_is_gone_may_come_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody at the address: one warning, nothing is kept, and a manager that is back is told."""
    address = str(tmp_path / "notify.sock")
    notifier = Notifier(address)
    for _ in range(3):
        notifier.notify_stopping(1.0)
    assert caplog.text.count(address) == 1
    assert not notifier._unsent
    with listening(address) as manager:
        notifier.notify_stopping(5.0)
        assert manager.receive(5.0)[0] == "STOPPING=1"
        assert notifier.lines(0.0, "", None)[0] == "READY=1"
    notifier.close()


def test_an_address_of_another_kind_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """An address such as vsock: a warning that names the value."""
    notifier = Notifier("vsock:2:1234")
    notifier.notify_stopping(1.0)
    assert "vsock:2:1234" in caplog.text
    assert notifier._socket is None
