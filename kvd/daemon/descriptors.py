"""Descriptors of clients, received by a process that may be lost; see `kvd.daemon.receiver`.

One connection at a time is read, in order. A process that has received a descriptor of a
foreign file system ends, which may take as long as the owner of that file system likes; it is
not waited for, and the next connection gets a new process. From a user whose file systems hold
some already nothing more is received.
"""

import contextlib
import logging
import math
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvd.daemon.child import ChildProcess
from kvd.daemon.receiver import DROP, FOREIGN, FULL, READ, TAKEN
from kvd.errors import DescriptorsLost, KvdError, Refused
from kvd.machine.open_files import open_files_remedy
from kvd.machine.trust import HOW
from kvd.wire.seqpacket import MAX_DATAGRAM_BYTES, Channel, close_all
from kvd_proto.messages import ErrorCode

log = logging.getLogger("kvd.daemon")
SECONDS = 2.0
"""For one connection; the kernel answers in microseconds."""
FIRST_SECONDS = 20.0
"""For the first connection of a process, which may still be starting on a busy machine."""
_START_AFTER_SECONDS = 1.0  # until then what the daemon's own start needs goes first
LAST_MS = 1000
"""For a process to end at the daemon's end."""
MAX_HELD = 4
"""Processes of a user's that wait for a file system, before nothing more of that user is read."""

Taken = tuple[bytes, tuple[int, ...]]
"""A frame and its descriptors, which become the taker's."""


@dataclass(slots=True, eq=False)
class _Order:
    """A connection that is to be read, of which user, and who takes what was there."""

    connection: socket.socket
    uid: int
    take: Callable[[Taken | Refused], None]


class Receiver:
    """The process, and those before it that have not ended."""

    def __init__(self, poller: select.epoll) -> None:
        self._poller = poller
        self._child: ChildProcess | None = None
        self._eager_at: float | None = None  # once; later only where there is something to read
        self._orders: deque[_Order] = deque()
        self._until = 0.0  # when the first of these is given up; 0: it has not been sent
        self._frame = b""  # of that one
        self._answered = False  # the process has read a connection, so it runs
        self._leaving: dict[ChildProcess, int] = {}  # with the user whose descriptor is why

    def read(
        self, connection: socket.socket, uid: int, take: Callable[[Taken | Refused], None]
    ) -> None:
        """Read one frame with descriptors from a connection, which is closed afterwards.

        Args:
            connection: a descriptor of its own; there is a frame to be read.
            uid: whose it is.
            take: gets the frame and descriptors, or why not; in a later turn.

        Raises:
            Refused: this user's file systems hold too many processes.
        """
        held = list(self._leaving.values()).count(uid)
        if held >= MAX_HELD:
            connection.close()
            raise Refused(
                ErrorCode.LIMIT,
                f"{held} processes wait for file systems of uid {uid}, of which they"
                " were sent descriptors: no more are received until these answer",
            )
        self._orders.append(_Order(connection, uid, take))

    def drop(self, connection: socket.socket) -> None:
        """Close a connection, in the other process: it may hold descriptors not received."""
        if self._child is None:
            self._start(time.monotonic())
        if self._link is not None:
            with contextlib.suppress(KvdError, EOFError, OSError):
                self._link.send(DROP, [connection.fileno()])
        connection.close()

    def turn(self, ready: dict[int, int], now: float) -> None:
        """Take answers, give up what takes too long, send the next order."""
        for child in [child for child in self._leaving if child.pidfd in ready]:
            child.reap(now)
            del self._leaving[child]
        if self._link is not None and self._link.fileno() in ready:
            self._receive_answer(self._link)
        elif self._until and now >= self._until:
            self._end(self._orders[0].uid)
            self._done(Refused(ErrorCode.NOT_READY, "a descriptor could not be received in time"))
        if self._eager_at is None:
            self._eager_at = now + _START_AFTER_SECONDS
        if self._child is None and (self._orders or now >= self._eager_at):
            self._start(now)
        if self._orders and not self._until:
            self._send(now)
        if self._link is not None and self._link.wants_write:
            with contextlib.suppress(EOFError):
                self._link.flush()

    def close(self) -> None:
        """End the processes; wait for none that a file system holds."""
        self._end(None)
        for child, uid in self._leaving.items():
            poller = select.poll()
            poller.register(child.pidfd, select.POLLIN)
            if poller.poll(LAST_MS):
                child.reap(0.0)
            else:
                log.warning("process %d waits for a file system of uid %d", child.pid, uid)
        for order in self._orders:
            order.connection.close()

    @property
    def _link(self) -> Channel | None:
        return self._child.link if self._child is not None else None

    def _start(self, now: float) -> None:
        self._eager_at = math.inf
        child = ChildProcess(
            "kvd.daemon.receiver", "the process that receives descriptors", self._poller
        )
        if child.spawn([], now):
            self._child = child
            self._answered = False

    def _send(self, now: float) -> None:
        if self._link is None:
            text = f"no process or descriptor is left to receive descriptors; {open_files_remedy()}"
            self._done(Refused(ErrorCode.LIMIT, text))
            return
        connection = self._orders[0].connection
        try:
            self._frame = connection.recv(MAX_DATAGRAM_BYTES, socket.MSG_PEEK)
        except OSError as error:  # its peer is gone, with notices unread
            self._done(Refused(ErrorCode.BAD_LAYOUT, f"nothing can be received: {error}"))
            return
        try:
            self._link.send(READ, [connection.fileno()])
        except EOFError:
            self._end(None)
        else:
            self._until = now + (SECONDS if self._answered else FIRST_SECONDS)

    def _receive_answer(self, link: Channel) -> None:
        received: Taken | None = b"", ()
        try:
            received = link.recv()
        except DescriptorsLost as error:
            self._done(Refused(ErrorCode.LIMIT, str(error)))
            return
        except EOFError:
            pass
        if received is None:
            return
        frame, fds = received
        self._answered = True
        if frame.startswith(TAKEN):
            self._done((self._frame, fds))
            return
        close_all(fds)
        uid = self._orders[0].uid if self._until else None
        code = ErrorCode.BAD_LAYOUT
        if frame.startswith(FOREIGN):
            text = (
                f"descriptor {int(frame[1:])} of those that were sent is neither a memory file nor"
                f" a device; make memory with {HOW}"
            )
            self._end(uid)
        elif frame == FULL:
            code = ErrorCode.LIMIT
            text = f"no file descriptor is left to receive; {open_files_remedy()}"
        elif frame:
            text = "descriptors were cut off on their way"
        else:
            code, text = ErrorCode.NOT_READY, "the process that receives descriptors has ended"
            self._end(uid)
        if uid is not None:
            self._done(Refused(code, text))

    def _done(self, outcome: Taken | Refused) -> None:
        order = self._orders.popleft()
        order.connection.close()
        self._until, self._frame = 0.0, b""
        order.take(outcome)

    def _end(self, uid: int | None) -> None:
        """Kill the process; it ends now, or when a file system of this user answers."""
        if self._child is not None:
            self._child.close_link()
            self._child.kill()
            self._leaving[self._child] = -1 if uid is None else uid
            self._child = None

    def __repr__(self) -> str:
        return f"<Receiver {self._child!r}, {len(self._orders)} to read, {self._leaving!r}>"
