"""The clients of a listening socket: what they hold, and which of them goes above a bound.

No I/O but the credentials of a peer. `kvd.wire.server` disconnects.
"""

import array
import contextlib
import select
import socket
import struct
import time
from collections import Counter, OrderedDict
from operator import attrgetter, itemgetter
from typing import Any

from kvd.client_names import Peer
from kvd_proto.channel import Channel

DESCRIPTOR_SECONDS = 10.0
"""Time limit for the rest of a message whose descriptors have arrived."""
_UCRED = struct.Struct("iII")
_SO_PEERGROUPS = 59  # asm-generic/socket.h; not in Python's socket
_GROUPS_BYTES = 1024  # 4 bytes a group; the maximum of Python's getsockopt


class Client:
    """One connection.

    Attributes:
        peer: the process that connected.
        owner: the owner's object for this client; None for a stranger.
        closed: the connection has ended; nothing more is sent.
        gone: the peer has closed its end and reads no reply; messages that it sent can be left.
        paused: it is not read.
    """

    __slots__ = (
        "buffered_bytes",
        "channel",
        "closed",
        "events",
        "fd",
        "gone",
        "num_descriptors",
        "owner",
        "paused",
        "peer",
        "refusal",
    )

    def __init__(self, channel: Channel, peer: Peer) -> None:
        self.channel = channel
        self.fd = channel.fileno()
        self.peer = peer
        self.owner: Any = None
        self.refusal = b""  # the only frame to send, after the handshake
        self.closed = self.gone = self.paused = False
        self.buffered_bytes = self.num_descriptors = 0  # as included in the sums of `Clients`
        self.events = select.EPOLLIN  # registered with epoll

    @property
    def reads(self) -> bool:
        """Whether a reply may find a reader."""
        return not self.closed and not self.gone


class Clients:
    """All clients of one socket, by descriptor, with what they hold.

    Attributes:
        strangers: clients without an owner, by descriptor, oldest first.
        total_bytes: of unfinished messages and unread replies.
    """

    def __init__(self) -> None:
        self.by_fd: dict[int, Client] = {}
        self.strangers: OrderedDict[int, Client] = OrderedDict()
        self.total_bytes = 0
        self._num_strangers: Counter[int] = Counter()  # by process
        # Clients whose unfinished message has descriptors, oldest first.
        self._descriptor_deadlines: dict[Client, float] = {}
        self._descriptors_of_user: Counter[int] = Counter()

    def add(self, client: Client) -> None:
        """Add a client, which is a stranger."""
        self.by_fd[client.fd] = client
        self.add_stranger(client)

    def remove(self, client: Client) -> None:
        """Remove a client and what it holds."""
        del self.by_fd[client.fd]
        self.remove_stranger(client)
        self._set_descriptors(client, 0)
        self.total_bytes -= client.buffered_bytes

    # -------------------------------------------------------------- strangers

    def add_stranger(self, client: Client) -> None:
        """Count a client among the strangers."""
        self.strangers[client.fd] = client
        self._num_strangers[client.peer.pid] += 1

    def remove_stranger(self, client: Client) -> None:
        """Count a client among the strangers no more. Idempotent."""
        if self.strangers.pop(client.fd, None) is not None:
            pid = client.peer.pid
            self._num_strangers[pid] -= 1
            if not self._num_strangers[pid]:
                del self._num_strangers[pid]

    def crowding_stranger(self, allowance: int) -> Client | None:
        """Return the oldest stranger of the process with the most; None if that has `allowance`."""
        pid, num_strangers = max(self._num_strangers.items(), key=itemgetter(1), default=(0, 0))
        if num_strangers <= allowance:
            return None
        return next(client for client in self.strangers.values() if client.peer.pid == pid)

    # ------------------------------------------------------------------ bytes

    def count_bytes(self, client: Client) -> None:
        """Update a client's buffered bytes."""
        buffered_bytes = client.channel.undecoded_bytes + client.channel.unsent_bytes
        self.total_bytes += buffered_bytes - client.buffered_bytes
        client.buffered_bytes = buffered_bytes

    def largest(self) -> tuple[Client, int]:
        """Return the largest client of the process with the most buffered bytes, and these bytes.

        Strangers come first: only if they have none, adopted clients are counted.
        """
        strangers = [client for client in self.strangers.values() if client.buffered_bytes]
        clients = strangers or self.by_fd.values()
        bytes_by_process: Counter[int] = Counter()
        for client in clients:
            bytes_by_process[client.peer.pid] += client.buffered_bytes
        pid, process_bytes = max(bytes_by_process.items(), key=itemgetter(1))
        of_process = [client for client in clients if client.peer.pid == pid]
        return max(of_process, key=attrgetter("buffered_bytes")), process_bytes

    # ------------------------------------------------------------ descriptors

    def count_descriptors(self, client: Client) -> bool:
        """Update a client's descriptors of unfinished messages; return whether it has more now."""
        num_before, num_descriptors = client.num_descriptors, client.channel.num_descriptors
        if num_descriptors != num_before:
            self._set_descriptors(client, num_descriptors)
        return num_descriptors > num_before

    def _set_descriptors(self, client: Client, num_descriptors: int) -> None:
        uid = client.peer.uid
        self._descriptors_of_user[uid] += num_descriptors - client.num_descriptors
        client.num_descriptors = num_descriptors
        if num_descriptors:
            self._descriptor_deadlines.setdefault(client, time.monotonic() + DESCRIPTOR_SECONDS)
        else:
            self._descriptor_deadlines.pop(client, None)
        if not self._descriptors_of_user[uid]:
            del self._descriptors_of_user[uid]

    def descriptors_of(self, uid: int) -> int:
        """Return the number of descriptors that a user's unfinished messages have."""
        return self._descriptors_of_user[uid]

    def oldest_with_descriptors(self, uid: int) -> Client:
        """Return the user's client that has held some of these descriptors for longest."""
        return next(client for client in self._descriptor_deadlines if client.peer.uid == uid)

    def late(self) -> list[Client]:
        """Return clients that did not complete a message with descriptors in time."""
        if not self._descriptor_deadlines:
            return []
        now = time.monotonic()
        deadlines = self._descriptor_deadlines
        return [client for client, deadline in deadlines.items() if now >= deadline]


def peer_of(sock: socket.socket) -> Peer:
    """Return the credentials of the process that connected."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(credentials)
    groups = array.array("I")
    with contextlib.suppress(OSError):  # too many groups to read: none counts
        groups.frombytes(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES))
    return Peer(pid, uid, gid, tuple(groups))
