"""Descriptors of file systems whose owners answer late or never: no process that serves asks."""

import contextlib
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvd.daemon.receiver import READ, serve
from kvd_client.memory import sealed_file
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.daemon.raw_client import RawClient, registration, said_at_the_end
from tests.daemon.users import as_user, needs_root
from tests.descriptors import open_on
from tests.processes import children_running
from tests.slowfs import SlowFilesystem, slow_filesystem
from tests.waiting import PATIENCE, eventually


def receivers(daemon: Daemon) -> set[int]:
    """The processes that receive descriptors and are not on their way out."""
    return {child.pid for child in children_running(daemon.process.pid, "kvd.daemon.receiver")}


@contextmanager
def hostile(daemon: Daemon, slow: SlowFilesystem) -> Iterator[RawClient]:
    """A worker of another user that has sent its file as its control page and memory."""
    with as_user():
        client = RawClient(daemon.runtime_dir)
    client.hello(kind="worker", engine="hostile")
    file = os.open(slow.file, os.O_RDWR)
    client.send_with(registration(), [file, file])
    os.close(file)  # before a process is started that would inherit it, and be held
    try:
        yield client
    finally:
        client.close()


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


@needs_root
def test_a_file_system_that_never_answers_holds_no_process_that_serves(
    open_daemon: Daemon, slow: SlowFilesystem
) -> None:
    """Only the process that is there for it asks; all sessions are served, new ones too."""
    daemon = open_daemon
    eventually(lambda: receivers(daemon), bool)
    with Engine(daemon.runtime_dir, world_size=1).wait_attached() as engine:
        keys = keys_of("safe", 4)
        engine.store(keys)
        wait_hit(engine, keys)
        (receiver,) = receivers(daemon)
        with hostile(daemon, slow) as client:
            assert "descriptor 0 of those that were sent is neither" in said_at_the_end(client)
            eventually(lambda: slow.asked_by(receiver), lambda asked: asked == ["flush"])
            assert engine.load(keys) == (4, 0)
            with Engine(daemon.runtime_dir, name="late", world_size=1).wait_attached() as late:
                assert late.load(keys) == (4, 0)
            assert {pid for pid, _ in slow.asked} <= {os.getpid(), receiver}
        report = daemon.status()
        assert report["lanes"][0]["counters"]["restarts"] == 0
        assert report["pid"] == daemon.process.pid


@needs_root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["ended", "killed"])
def test_a_daemon_that_was_sent_such_a_file_ends_and_another_follows(
    start_daemon: StartDaemon, open_daemon: Daemon, slow: SlowFilesystem, number: int
) -> None:
    """Neither its end nor the next daemon's start waits for the file system."""
    daemon = open_daemon
    eventually(lambda: receivers(daemon), bool)
    with hostile(daemon, slow) as client:
        assert "neither a memory file" in said_at_the_end(client)
        daemon.process.send_signal(number)
        daemon.process.wait(PATIENCE)
        following = start_daemon()
        with Engine(following.runtime_dir, world_size=1).wait_attached() as engine:
            assert engine.store(keys_of("again", 2))


def read_end() -> int:
    """The read end of a pipe."""
    read, write = os.pipe()
    os.close(write)
    return read


FOREIGN: dict[str, Callable[[], int]] = {
    "pipe": read_end,
    "socket": lambda: socket.socket(socket.AF_UNIX).detach(),
    "file": lambda: os.open(__file__, os.O_RDONLY),
    "kernel's file": lambda: os.open("/proc/self/maps", os.O_RDONLY),
    "folder": lambda: os.open("/", os.O_RDONLY),
}


@contextmanager
def sent(*fds: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A client has sent these, and the receiver at the second end is to read them."""
    ours, link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, link, client, connection:
        socket.send_fds(client, [b"frame"], fds)
        socket.send_fds(ours, [READ], [connection.fileno()])
        ours.shutdown(socket.SHUT_WR)
        yield ours, link


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_the_receiver_says_what_is_foreign_without_a_question_to_its_file_system(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], int]
) -> None:
    """It asks for no attributes, by which the owner would learn of it; and it ends, not closes."""

    def asked(*_: object, **__: object) -> None:
        raise AssertionError("a file system is asked")

    good, foreign = os.memfd_create("good"), make()
    with sent(good, foreign) as (ours, link), monkeypatch.context() as patch:
        before = open_on(good, foreign)
        for name in ("stat", "fstat", "lstat", "fstatvfs", "close"):
            patch.setattr(os, name, asked)
        serve(link)
        patch.undo()
        kept = open_on(good, foreign) - before
        assert ours.recv(100) == b"-1"
        assert len(kept) == 2
        for fd in (*kept, good, foreign):
            os.close(fd)


def test_memory_and_devices_are_passed_on() -> None:
    """A sealed or loose memory file, shared memory, a device and an object of the kernel's."""
    with tempfile.TemporaryFile(dir="/dev/shm") as shared:
        fds = [sealed_file("m", 1), os.memfd_create("loose"), os.dup(shared.fileno())]
    fds += [os.open("/dev/null", os.O_RDONLY), os.eventfd(0)]
    with sent(*fds) as (ours, link):
        serve(link)
        frame, passed, _, _ = socket.recv_fds(ours, 100, 10)
    assert frame == b"+"
    assert [os.fstat(fd).st_ino for fd in passed] == [os.fstat(fd).st_ino for fd in fds]
    for fd in (*fds, *passed):
        os.close(fd)


def test_what_was_not_read_goes_with_the_process_that_may_wait(daemon: Daemon) -> None:
    """Junk before descriptors, and a hang-up: the session ends without a reset, and all goes on."""
    client = RawClient(daemon.runtime_dir)
    foreign = FOREIGN["file"]()
    client.control_socket.send(b"junk")
    with contextlib.suppress(BrokenPipeError):
        for _ in range(3):
            socket.send_fds(client.control_socket, [b"more"], [foreign])
    said_at_the_end(client)
    os.close(foreign)
    client.close()
    with Engine(daemon.runtime_dir, world_size=1).wait_attached() as engine:
        assert engine.store(keys_of("served", 2))
