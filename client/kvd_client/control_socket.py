"""The control socket: the Unix socket that a session holds for life.

Notices and descriptors travel here; its end of file means that the other
process is gone, which the kernel says at once and without fail.
"""

import errno
import os
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvd_client.errors import DaemonLost, DaemonSilent
from kvd_proto.codec import WIRE, Header
from kvd_proto.errors import DecodeError, Oversize
from kvd_proto.messages import MAX_DESCRIPTORS, Message

MAX_NOTICE_BYTES = 64 * 2**10
SOCKET_BUFFER_BYTES = 2**20


@dataclass(slots=True)
class Notice:
    """One message from the control socket; its descriptors belong to whoever holds it."""

    header: Header
    message: Message
    fds: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Close the descriptors that nobody took."""
        while self.fds:
            os.close(self.fds.pop())


class ControlSocket:
    """The client's end of a control socket.

    Args:
        path: the daemon's `control.sock`.
        end: `time.monotonic()` when to give up.

    Raises:
        OSError: nobody listens there, or it may not be opened.
    """

    def __init__(self, path: Path, end: float) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
            sock.settimeout(max(0.001, end - time.monotonic()))
            sock.connect(os.fspath(path))
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        self._sock = sock

    def fileno(self) -> int:
        """The descriptor, for polling; -1 once closed."""
        return self._sock.fileno()

    def receive(self) -> Notice | None:
        """The next notice, or None where there is none yet. Never waits.

        Raises:
            DaemonLost: end of file, or something that is no notice.
        """
        try:
            frame, fds, flags, _ = socket.recv_fds(
                self._sock, MAX_NOTICE_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError as error:
            raise DaemonLost(f"the control socket broke: {error}") from error
        try:
            if not frame:
                raise DaemonLost("the daemon has closed the control socket")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise DaemonLost("a notice arrived cut off; is the limit of open files reached?")
            header, message = WIRE.decode(frame)
        except (DaemonLost, DecodeError) as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, DaemonLost):
                raise
            raise DaemonLost(f"the control socket said something unreadable: {error}") from error
        return Notice(header, message, list(fds))

    def wait(self, end: float, stop: int) -> Notice:
        """The next notice.

        Args:
            end: `time.monotonic()` when to give up.
            stop: descriptor that becomes readable when nobody wants it any more.

        Raises:
            DaemonSilent: none until `end`.
            DaemonLost: as `receive`; or stopped.
        """
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        poller.register(stop, select.POLLIN)
        while (notice := self.receive()) is None:
            ready = poller.poll(max(0.0, end - time.monotonic()) * 1000)
            if not ready:
                raise DaemonSilent("no word from the control socket")
            if stop in dict(ready):
                raise DaemonLost("this session is being closed")
        return notice

    def send(self, frame: bytes, fds: Sequence[int], end: float) -> None:
        """Send a frame with descriptors, numbered from 0 in this order.

        Raises:
            Oversize: the frame is larger than a datagram may be.
            DaemonSilent: the daemon takes nothing until `end`.
            DaemonLost: it is gone.
        """
        while True:
            try:
                socket.send_fds(self._sock, [frame], list(fds), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._wait_for_room(end)
            except OSError as error:
                if error.errno == errno.EMSGSIZE:
                    raise Oversize(
                        f"{len(frame)} bytes do not fit one datagram here; put tensors into fewer"
                        " storages or groups, or raise the sysctl net.core.wmem_max"
                    ) from error
                raise DaemonLost(f"the control socket broke: {error}") from error
            else:
                return

    def _wait_for_room(self, end: float) -> None:
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        if not poller.poll(max(0.0, end - time.monotonic()) * 1000):
            raise DaemonSilent("the control socket is not read")

    def close(self) -> None:
        """Close this end; the daemon sees it at once."""
        self._sock.close()

    def __repr__(self) -> str:
        return f"<Control socket {'closed' if self.fileno() < 0 else f'fd {self.fileno()}'}>"
