"""Descriptors of file systems whose owners answer late or never: no thread that serves asks."""

import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd.wire.listener import MAX_STUCK, closes_at_once
from kvd_client.memory import sealed_file
from kvd_proto.channel import close_all
from kvd_proto.messages import Error, ErrorCode, Ping, Pong, Welcome
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import engine_of, keys_of
from tests.daemon.users import as_user, needs_root
from tests.processes import frozen
from tests.raw_client import RawClient, code_of, registration, text_of
from tests.slowfs import SlowFilesystem, slow_filesystem
from tests.waiting import PATIENCE, eventually


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SlowFilesystem]:
    """A file system that answers this process only."""
    with slow_filesystem(tmp_path / "slow") as mounted:
        yield mounted


@pytest.fixture
def open_daemon(start_daemon: StartDaemon, runtime_dir: Path) -> Daemon:
    """A daemon that other users come as far as."""
    runtime_dir.parent.chmod(0o711)
    return start_daemon()


def other_user(daemon: Daemon) -> RawClient:
    """A session of another user."""
    with as_user():
        client = RawClient(daemon.runtime_dir)
    client.hello(kind="worker", engine="hostile")
    return client


def register(client: RawClient, slow: SlowFilesystem) -> None:
    """Send its file as control page and memory."""
    file = os.open(slow.file, os.O_RDWR)
    client.request(registration(), [file, file])
    os.close(file)


def leave_unread(client: RawClient, slow: SlowFilesystem) -> None:
    """Break the protocol, with such files behind."""
    client.send_bytes(b"\x01\0")
    register(client, slow)


def is_held(daemon: Daemon, slow: SlowFilesystem, times: int = 1) -> bool:
    """Whether so many threads of the daemon wait for the file system; never its main one."""
    pid = daemon.process.pid
    assert pid not in slow.asked
    return slow.waiting(pid) == times


@needs_root
@pytest.mark.parametrize("attack", [register, leave_unread])
def test_a_file_system_that_never_answers_delays_no_session(
    open_daemon: Daemon, slow: SlowFilesystem, attack: Callable[[RawClient, SlowFilesystem], None]
) -> None:
    """Only a thread that closes its file waits; all sessions are served, new ones too."""
    daemon = open_daemon
    with engine_of(daemon) as engine:
        keys = engine.stored("safe", 4)
        with other_user(daemon) as client:
            with frozen(daemon.process.pid):
                attack(client, slow)
            error = client.error_at_the_end()
            assert attack is leave_unread or "descriptor 0 of the message" in text_of(error)
            eventually(lambda: is_held(daemon, slow))
            assert engine.load(keys) == (4, 0)
            with engine_of(daemon, "late") as late:
                assert late.load(keys) == (4, 0)
        report = daemon.status()
        assert report["lanes"][0]["counters"]["restarts"] == 0


@needs_root
def test_a_user_whose_file_systems_hold_threads_is_refused_until_they_answer(
    open_daemon: Daemon, slow: SlowFilesystem
) -> None:
    """Others are served; the refusal says why."""
    daemon = open_daemon
    for times in range(1, MAX_STUCK + 1):
        with other_user(daemon) as client:
            register(client, slow)
            assert client.hung_up()
        eventually(lambda times=times: is_held(daemon, slow, times))  # type: ignore[misc]

    def refusal() -> Error | None:
        with as_user():
            client = RawClient(daemon.runtime_dir)
        with client:
            return client.error_at_the_end() if client.hung_up(0.1) else None

    error = eventually(refusal)
    assert code_of(error) is ErrorCode.LIMIT
    assert "threads wait to close files that processes of uid" in text_of(error)
    with RawClient(daemon.runtime_dir) as another:
        assert isinstance(another.hello(), Welcome)
    slow.give_up()
    eventually(lambda: refusal() is None)
    with other_user(daemon) as client:
        assert isinstance(client.ask(Ping()), Pong)


@needs_root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["ended", "killed"])
def test_a_daemon_ends_when_the_file_system_answers_and_another_follows(
    start_daemon: StartDaemon, open_daemon: Daemon, slow: SlowFilesystem, number: int
) -> None:
    """Its end may wait for that; nothing else does, and nothing of it is in the next one's way."""
    daemon = open_daemon
    with other_user(daemon) as client:
        register(client, slow)
        assert "neither a memory file" in text_of(client.error_at_the_end())
        eventually(lambda: is_held(daemon, slow))
        daemon.process.send_signal(number)
        slow.give_up()
        daemon.process.wait(PATIENCE)
        following = start_daemon()
        with engine_of(following) as engine:
            assert engine.store(keys_of("again", 2))


def test_only_files_of_the_kernel_are_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose a descriptor is gets known without attributes, of which a file system would hear."""
    with tempfile.TemporaryFile(dir="/dev/shm") as shared:
        memory = [sealed_file("m", 1), os.memfd_create("loose"), os.dup(shared.fileno())]
    harmless = [*memory, os.open("/dev/null", os.O_RDONLY), os.eventfd(0)]
    foreign = [*os.pipe(), socket.socket(socket.AF_UNIX).detach()]
    foreign += [os.open(path, os.O_RDONLY) for path in (__file__, "/proc/self/maps", "/")]

    def ask(*_: object, **__: object) -> None:
        raise AssertionError("a file system is asked")

    with monkeypatch.context() as patch:
        for name in ("stat", "fstat", "lstat", "fstatvfs"):
            patch.setattr(os, name, ask)
        assert not any(map(closes_at_once, foreign))
    assert all(map(closes_at_once, harmless))
    close_all([*harmless, *foreign])
