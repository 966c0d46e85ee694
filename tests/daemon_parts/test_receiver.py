"""The process that receives descriptors may be lost: what the broker does then."""

import os
import resource
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from kvd.daemon import descriptors as receiver
from kvd.daemon import receiver as process
from kvd.daemon.child import ChildProcess
from kvd.daemon.descriptors import FIRST_SECONDS, MAX_HELD, SECONDS, Receiver, Taken
from kvd.errors import Refused
from kvd_client.memory import sealed_file
from kvd_proto.messages import ErrorCode
from tests.waiting import PATIENCE

HOSTILE, HONEST = 4242, 4243


class Child(ChildProcess):
    """Stands in for a process that a file system holds: nothing ends it until it is let go."""

    all: list["Child"] = []  # noqa: RUF012  # emptied by the fixture
    deaf = False
    full = False

    def _begin(self, arguments: Sequence[str], fds: Sequence[int]) -> None:
        """Serve in a thread, or take orders and never answer."""
        assert arguments == [str(fds[0])]
        if Child.full:
            raise OSError(24, "Too many open files")
        self.pidfd = os.eventfd(0)
        self.reaped = False
        self.there = socket.socket(fileno=os.dup(fds[0]))
        self.thread = threading.Thread(target=lambda: process.serve(self.there))
        Child.all.append(self)
        if not Child.deaf:
            self.thread.start()

    def let_go(self) -> None:
        """The file system has answered."""
        os.eventfd_write(self.pidfd, 1)

    def reap(self, now: float) -> str:
        """It has ended."""
        self.reaped = True
        self._poller.unregister(self.pidfd)
        os.close(self.pidfd)
        return f"at {now}"


class Rig:
    """A receiver with the poller that it is registered with."""

    def __init__(self) -> None:
        self.poller = select.epoll()
        self.receiver = Receiver(self.poller)
        self.now = 1000.0
        self.outcomes: list[Taken | Refused] = []

    def turn(self, seconds: float = 0) -> None:
        """One turn of the broker's loop."""
        self.receiver.turn(dict(self.poller.poll(seconds)), self.now)

    def send(self, fd: int, uid: int) -> None:
        """A client of this user sends a frame with a descriptor, which is to be read."""
        client, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with client, connection:
            socket.send_fds(client, [b"frame"], [fd])
            self.receiver.read(connection.dup(), uid, self.outcomes.append)
        self.turn()

    def outcome(self) -> Any:
        """What became of the first of them."""
        while not self.outcomes:
            self.turn(PATIENCE)
        return self.outcomes.pop(0)


@pytest.fixture
def memory() -> Iterator[int]:
    """A memory file."""
    fd = sealed_file("m", 1)
    yield fd
    os.close(fd)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """With processes that nothing ends."""
    monkeypatch.setattr(receiver, "ChildProcess", Child)
    Child.all = []
    Child.deaf = Child.full = False
    made = Rig()
    yield made
    for child in Child.all:
        if not child.reaped:
            child.let_go()
    made.receiver.close()
    for child in Child.all:
        if child.thread.ident is not None:
            child.thread.join()
        child.there.close()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The broker's end of a link, which has an order to read a frame in it, and the process's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, client, connection:
        client.send(b"frame")
        socket.send_fds(ours, [process.READ], [connection.fileno()])
        yield ours, theirs


def test_a_process_whose_broker_is_gone_ends_without_a_traceback(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Also where it has an answer to send."""
    ours, theirs = ends
    ours.close()
    process.serve(theirs)


def test_a_process_without_descriptors_says_so_and_serves_on(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """The answer to an order whose connection it cannot receive is that it has no room."""
    ours, theirs = ends
    ours.shutdown(socket.SHUT_WR)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        process.serve(theirs)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert ours.recv(16) == process.FULL


def test_one_user_holds_a_bounded_number_of_processes(rig: Rig, memory: int) -> None:
    """Then nothing of that user is received until one ends; others' descriptors are."""
    with ExitStack() as stack:
        pipe, _ = (stack.enter_context(os.fdopen(fd)).fileno() for fd in os.pipe())
        for _ in range(MAX_HELD):
            rig.send(pipe, HOSTILE)
            assert "neither a memory file nor a device" in str(rig.outcome())
        with pytest.raises(Refused, match=f"{MAX_HELD} processes wait .* of uid {HOSTILE}"):
            rig.send(pipe, HOSTILE)
        rig.send(memory, HONEST)
        frame, fds = rig.outcome()
        assert frame == b"frame"
        assert [os.fstat(fd).st_ino for fd in fds] == [os.fstat(memory).st_ino]
        os.close(fds[0])
        Child.all[0].let_go()
        rig.turn(PATIENCE)
        rig.send(memory, HOSTILE)
        _, fds = rig.outcome()
        os.close(fds[0])
        assert [child.reaped for child in Child.all] == [True, *[False] * MAX_HELD]


def test_a_process_that_does_not_answer_is_replaced(rig: Rig, memory: int) -> None:
    """After a bounded time the session whose turn it was may try again; the next is served."""
    Child.deaf = True
    rig.send(memory, HOSTILE)
    rig.send(memory, HONEST)
    rig.now += FIRST_SECONDS / 2
    rig.turn()
    assert not rig.outcomes
    Child.deaf = False
    rig.now += FIRST_SECONDS
    rig.turn()
    refused = rig.outcome()
    assert refused.code is ErrorCode.NOT_READY
    assert "could not be received in time" in str(refused)
    _, fds = rig.outcome()
    os.close(fds[0])
    assert len(Child.all) == 2


def test_only_a_process_that_has_not_answered_yet_may_take_long(rig: Rig, memory: int) -> None:
    """The first answer is waited for as long as a start may take, later ones are not."""
    assert FIRST_SECONDS > 4 * SECONDS
    Child.deaf = True
    rig.send(memory, HONEST)
    rig.now += 4 * SECONDS
    rig.turn()
    assert not rig.outcomes
    Child.all[0].there.send(process.NOTHING)
    assert "cut off" in str(rig.outcome())
    rig.send(memory, HONEST)
    rig.now += SECONDS
    rig.turn()
    assert "could not be received in time" in str(rig.outcome())


def test_a_process_that_has_ended_is_replaced(rig: Rig, memory: int) -> None:
    """The session whose turn it was may try again, another process serves the next one."""
    Child.deaf = True
    rig.send(memory, HONEST)
    Child.deaf = False
    Child.all[0].there.close()
    refused = rig.outcome()
    assert refused.code is ErrorCode.NOT_READY
    assert "has ended" in str(refused)
    rig.send(memory, HONEST)
    _, fds = rig.outcome()
    os.close(fds[0])
    assert len(Child.all) == 2


def test_without_a_process_to_receive_registrations_are_refused(rig: Rig, memory: int) -> None:
    """The reason is the limit of descriptors; when there are some again all is as before."""
    Child.full = True
    rig.send(memory, HONEST)
    assert "raise LimitNOFILE" in str(rig.outcome())
    Child.full = False
    rig.send(memory, HONEST)
    _, fds = rig.outcome()
    os.close(fds[0])
