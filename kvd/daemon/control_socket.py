"""The control socket: one Unix connection for every session's whole life.

It tells who came (peer credentials), carries descriptors and notices, and its
end of file says that the other process is gone. Where the peer's pid is
visible here a pidfd says so too, which holds even if a forked child of the
engine keeps the socket open.
"""

import array
import contextlib
import errno
import logging
import os
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path

from kvd.broker.sessions import Peer, Session
from kvd.daemon.runtime_dir import no_socket
from kvd.errors import KvdError
from kvd.wire.seqpacket import Channel

log = logging.getLogger("kvd.daemon")
_UCRED = struct.Struct("iII")
_SO_PEERGROUPS = 59  # asm-generic/socket.h; not in Python's socket
_MAX_GROUPS = 65536  # the kernel's own limit, NGROUPS_MAX


@dataclass(slots=True, eq=False)
class Connection:
    """One open connection: its channel, its session, and the descriptors of its registration.

    receiving: a frame of it is being received, until which nothing else is read.
    """

    channel: Channel
    peer: Peer
    pidfd: int = -1
    session: Session | None = None
    fds: list[int] = field(default_factory=list)
    receiving: bool = False

    def drop_fds(self) -> None:
        """Close the descriptors that it sent."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def tell(self, frame: bytes) -> None:
        """Say why it may not stay; whoever does not listen is not waited for."""
        with contextlib.suppress(KvdError, EOFError, OSError):
            self.channel.send(frame)

    def close(self) -> None:
        """Close everything."""
        self.drop_fds()
        self.channel.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def __repr__(self) -> str:
        return f"<Connection pid {self.peer.pid}, {len(self.fds)} descriptors, {self.session!r}>"


class ControlSocket:
    """The listening socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind(str(path))
            path.chmod(0o660)
            self._socket.listen(128)
        except OSError as error:
            self._socket.close()
            raise no_socket(path, error) from error
        # Given up to turn a connection away when no descriptor is left to let it in.
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._socket.setblocking(False)  # the socket API's own form
        self.turned_away = 0
        """Connections for whom no descriptor was left, since that was last looked at."""

    def fileno(self) -> int:
        """For polling."""
        return self._socket.fileno()

    def accept(self) -> Connection | None:
        """The next connection, or None.

        Without a free descriptor the connection is turned away; it will try again.
        """
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._turn_away()
            return None
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, uid, gid = _UCRED.unpack(credentials)
        pidfd = -1
        if pid > 0:  # 0: the peer's pid namespace is not visible from here
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(pid)
        return Connection(Channel(connection), Peer(pid, uid, gid, _groups(connection)), pidfd)

    def _turn_away(self) -> None:
        log.error("no file descriptor is left for a new session; raise LimitNOFILE")
        self.turned_away += 1
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with contextlib.suppress(OSError):
            self._socket.accept()[0].close()
        with contextlib.suppress(OSError):  # somebody else was faster; then without one
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Let nobody in any more."""
        self._socket.close()
        if self._spare >= 0:
            os.close(self._spare)

    def __repr__(self) -> str:
        return f"<Control socket {self.fileno()}>"


def _groups(connection: socket.socket) -> tuple[int, ...]:
    """The peer's supplementary groups, as they were when it connected."""
    ids = array.array("I")
    for limit in (64, _MAX_GROUPS):
        try:
            ids.frombytes(
                connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, limit * ids.itemsize)
            )
        except OSError as error:
            if error.errno == errno.ERANGE:
                continue
            raise
        break
    return tuple(ids)
