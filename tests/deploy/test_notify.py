"""A daemon and its service manager, over a real NOTIFY_SOCKET."""

import ctypes
import itertools
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
from tests.waiting import eventually

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


@contextmanager
def listening(address: str) -> Iterator[Manager]:
    """A manager at this path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        sock.bind(address)
        yield Manager(address, sock)


def supervised(
    start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch, manager: Manager, *extra: str
) -> int:
    """A daemon under `manager` with a watchdog; its pid."""
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_SECONDS * 1e6)))
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    return start_daemon(*extra, ready=False).process.pid


def test_a_daemon_tells_the_service_manager_its_state(
    start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """READY first, though the pool is not there yet; state, pings, a reload, STOPPING.

    The variables are for the broker; a lane's process has the rest of its environment.
    """
    monkeypatch.setenv("LANE_SEES", "this")
    with listening(str(tmp_path / "notify.sock")) as manager:
        pid = supervised(start_daemon, monkeypatch, manager)
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
        assert int(extend.partition("=")[2]) == int(
            (drain_seconds + unpin_seconds + SHUTDOWN_SECONDS) * 1e6
        )
        assert manager.pids == {pid}


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
            while manager.receive(0.01):
                pass
            assert manager.receive(2.5 * WATCHDOG_SECONDS) == []
        finally:
            libc.ptrace(_DETACH, pid, None, None)
        manager.until("WATCHDOG=1")


@pytest.mark.parametrize("usec", ["soon", "0", "-5"])
def test_a_watchdog_that_is_no_number_is_refused(usec: str) -> None:
    """A daemon that could not feed its watchdog does not start."""
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
    with listening(address) as manager:
        for _ in range(1000):  # more than a socket holds
            notifier.notify_stopping(1.0)

        def last_heard() -> list[str]:  # what waited comes first, as much as finds room
            notifier.notify_stopping(2.0)
            messages = list(iter(lambda: manager.receive(0.1), []))
            return messages[-1]

        told = ["STOPPING=1", f"EXTEND_TIMEOUT_USEC={2 + SHUTDOWN_SECONDS:.0f}000000"]
        eventually(last_heard, told.__eq__)
    notifier.close()


def test_the_watchdog_is_fed_at_half_its_interval() -> None:
    """A loop that turns feeds the watchdog every half interval, within one turn."""
    notices, turns = Notifier(watchdog_seconds=30.0), [turn / 4 for turn in range(480)]
    fed = [at for at in turns if notices.is_due(at) and "WATCHDOG=1" in notices.lines(at, "", None)]
    gaps = [after - before for before, after in itertools.pairwise(fed)]
    assert len(gaps) >= 6
    assert all(15.0 <= gap <= 15.25 for gap in gaps)


def test_time_is_asked_for_only_while_the_pool_grows() -> None:
    """Progress since the last beat asks for one interval more; standing still and ready do not."""
    notices = Notifier(watchdog_seconds=10.0)
    extend = "EXTEND_TIMEOUT_USEC=10000000"
    assert extend in notices.lines(0.0, "0 %", 0.0)
    assert extend in notices.lines(5.0, "10 %", 10.0)
    assert extend not in notices.lines(10.0, "10 %", 10.0)
    assert extend in notices.lines(15.0, "11 %", 11.0)
    assert extend not in notices.lines(20.0, "ready", None)
