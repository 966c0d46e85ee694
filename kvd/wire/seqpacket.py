"""Datagrams with descriptors over a SOCK_SEQPACKET Unix socket, never blocking.

Used for the link between broker and lane and for the control socket between daemon and
clients. One datagram is one frame. A frame that the kernel does not take now
is queued; the queue is bounded, so that a peer that does not read costs a
bounded amount of memory and no time.
"""

import array
import contextlib
import errno
import os
import socket
from collections import deque
from collections.abc import Sequence

from kvd.errors import BadDatagram, ChannelFull, DescriptorsLost
from kvd.machine.open_files import open_files_remedy

SOCKET_BUFFER_BYTES = 2**20  # asked for; the kernel clamps it to net.core.wmem_max
MAX_DATAGRAM_BYTES = 2**20
MAX_DESCRIPTORS = 253  # of one datagram: the kernel's own limit, SCM_MAX_FD
MAX_QUEUED_BYTES = 8 * 2**20
MAX_QUEUED_FRAMES = 8192
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)


class Channel:
    """One end of a connection.

    Not thread-safe. Owns the socket and the descriptors that wait in its queue;
    descriptors passed to `send` stay the caller's (they are duplicated if the
    frame has to wait), those that `recv` returns become the caller's and are
    close-on-exec.

    Args:
        sock: a connected SOCK_SEQPACKET socket; made non-blocking here.
        max_queued_bytes: what may wait to be sent, in bytes of frames.
    """

    def __init__(self, sock: socket.socket, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
            raise ValueError(f"a channel needs a Unix SOCK_SEQPACKET socket, got {sock}")
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        self._sock = sock
        self._buffer = bytearray()  # for `recv`, from its first call on
        # Frames that wait for room in the socket, with descriptors of their own.
        self._queue: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._queued_bytes = 0
        self._max_queued_bytes = max_queued_bytes

    @property
    def wants_write(self) -> bool:
        """Whether frames wait: poll for writability and call `flush`."""
        return bool(self._queue)

    def fileno(self) -> int:
        """The socket's descriptor, for polling; -1 once closed."""
        return self._sock.fileno()

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send `frame`, or queue it behind those that wait already.

        Raises:
            ChannelFull: the queue has no room; nothing was queued.
            BadDatagram: too large for one datagram, too many descriptors, or empty.
            EOFError: the peer is gone (what it sent before can still be received).
        """
        if not frame or len(frame) > MAX_DATAGRAM_BYTES or len(fds) > MAX_DESCRIPTORS:
            raise BadDatagram(
                f"a datagram has 1..{MAX_DATAGRAM_BYTES} bytes and at most {MAX_DESCRIPTORS}"
                f" descriptors, got {len(frame)} bytes and {len(fds)} descriptors"
            )
        if not self._queue and self._send_now(frame, fds):
            return
        room = self._max_queued_bytes - self._queued_bytes
        if len(frame) > room or len(self._queue) >= MAX_QUEUED_FRAMES:
            raise ChannelFull(
                f"{len(self._queue)} frames of {self._queued_bytes} bytes wait for a peer that"
                f" does not read; the limit is {self._max_queued_bytes} bytes"
            )
        self._queue.append((frame, _duplicate(fds)))
        self._queued_bytes += len(frame)

    def flush(self) -> bool:
        """Send what waits, as far as the socket takes it; whether nothing waits any more.

        Raises:
            EOFError: the peer is gone.
        """
        while self._queue:
            if not self._send_now(*self._queue[0]):
                return False
            self._drop_head()
        return True

    def duplicate(self) -> socket.socket:
        """Return a second descriptor of the socket, which is the caller's.

        Raises:
            OSError: no descriptor is left.
        """
        return self._sock.dup()

    def waiting_bytes(self) -> int:
        """Return the size of the next frame that has arrived; 0 where there is none.

        Raises:
            EOFError: the peer has closed its end, or died.
            BadDatagram: a datagram above the limit.
        """
        try:
            size = self._sock.recv_into(bytearray(1), 1, socket.MSG_PEEK | socket.MSG_TRUNC)
        except BlockingIOError:
            return 0
        except ConnectionError as error:
            raise EOFError("the peer is gone") from error
        if size > MAX_DATAGRAM_BYTES:
            raise BadDatagram(f"a datagram of {size} bytes, the limit is {MAX_DATAGRAM_BYTES}")
        if size == 0:
            raise EOFError("the peer has closed its end")
        return size

    def hang_up(self) -> socket.socket:
        """Say no more and let nothing more come; the socket, which the caller closes."""
        while self._queue:
            self._drop_head()
        with contextlib.suppress(OSError):  # the peer was faster
            self._sock.shutdown(socket.SHUT_RDWR)
        return self._sock

    def recv(self) -> tuple[bytes, tuple[int, ...]] | None:
        """The next frame and its descriptors, or None where nothing has arrived.

        Raises:
            EOFError: the peer has closed its end, or died.
            BadDatagram: a datagram above the limits; it is consumed, its descriptors are closed.
            DescriptorsLost: this process may open no more files; likewise.
        """
        if not self._buffer:
            self._buffer = bytearray(MAX_DATAGRAM_BYTES)
        try:
            try:
                size, ancillary, flags, _ = self._receive()
            except ConnectionResetError:
                # The peer is gone and left frames unread. The kernel says that once, before it
                # hands over the frames that the peer had sent.
                size, ancillary, flags, _ = self._receive()
        except BlockingIOError:
            return None
        except ConnectionError as error:
            raise EOFError("the peer is gone") from error
        fds = _descriptors(ancillary)
        if flags & socket.MSG_TRUNC:
            close_all(fds)
            raise BadDatagram(f"a datagram above {len(self._buffer)} bytes")
        if size == 0:
            close_all(fds)
            raise EOFError("the peer has closed its end")
        frame = bytes(memoryview(self._buffer)[:size])
        if flags & socket.MSG_CTRUNC:
            close_all(fds)
            text = f"no file descriptor is left to receive; {open_files_remedy()}"
            raise DescriptorsLost(text, frame)
        return frame, fds

    def close(self) -> None:
        """Close the socket and the descriptors that wait."""
        while self._queue:
            self._drop_head()
        self._sock.close()

    def _receive(self) -> tuple[int, list[tuple[int, int, bytes]], int, object]:
        return self._sock.recvmsg_into([self._buffer], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)

    def _send_now(self, frame: bytes, fds: Sequence[int]) -> bool:
        try:
            socket.send_fds(self._sock, [frame], list(fds), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except ConnectionError as error:
            raise EOFError("the peer is gone") from error
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                raise BadDatagram(f"{len(frame)} bytes do not fit one datagram here") from error
            if error.errno in (errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS):
                return False
            raise
        return True

    def _drop_head(self) -> None:
        frame, fds = self._queue.popleft()
        self._queued_bytes -= len(frame)
        close_all(fds)

    def __repr__(self) -> str:
        return f"<Channel fd={self.fileno()} queued={len(self._queue)}>"


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors, those already closed included."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _duplicate(fds: Sequence[int]) -> tuple[int, ...]:
    copies: list[int] = []
    try:
        copies.extend(os.dup(fd) for fd in fds)
    except OSError:
        close_all(copies)
        raise
    return tuple(copies)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, ...]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return tuple(fds)
