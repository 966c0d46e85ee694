"""The lane's two sockets and the one place where it waits.

Between two pieces of a copy the sockets are looked at with one poll system
call (about 1 µs; zmq's own poller takes ten times that). The price is ZeroMQ's
rule about its descriptor: it signals a change, once, so before trusting its
silence `recv` must have been driven to empty, and every `send` may swallow a signal.
"""

import logging
import select
from pathlib import Path
from typing import NamedTuple, cast

import zmq

from kvd.gate import Gate
from kvd.seqpacket import Channel
from kvd_proto.codec import MAX_MESSAGE_BYTES

_log = logging.getLogger(__name__)

REPLIES_WAITING = 65536  # per worker that does not read; beyond, replies are dropped
REQUESTS_WAITING = 16384
LINGER_MS = 500
HANDSHAKE_MS = 5000


class Woken(NamedTuple):
    """Which sockets have something to do."""

    link: bool
    workers: bool


class Sockets:
    """The ROUTER that workers send to, and the link to the broker.

    Args:
        endpoint: where to bind the ROUTER.
        link: the broker.
    """

    def __init__(self, endpoint: str, link: Channel) -> None:
        self.link = link
        self.dropped_replies = 0
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.SNDHWM, REPLIES_WAITING)
        self._router.setsockopt(zmq.RCVHWM, REQUESTS_WAITING)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._router.bind(endpoint)
        self.gate = Gate(Path(endpoint.removeprefix("ipc://")))
        self.gate.path.chmod(0o660)  # as the broker's sockets
        self._router_fd = cast(int, self._router.getsockopt(zmq.FD))
        self._maybe_more = True
        self._poll = select.poll()
        self._poll.register(self._router_fd, select.POLLIN)
        self._poll.register(link, select.POLLIN)
        self._link_writes = False

    def wait(self, milliseconds: int | None) -> Woken:
        """Wait until there is something to do, at most so long; None: for ever."""
        if self.link.wants_write != self._link_writes:
            self._link_writes = self.link.wants_write
            mask = select.POLLIN | (select.POLLOUT if self._link_writes else 0)
            self._poll.modify(self.link, mask)
        workers = self._maybe_more and self._readable()
        self._maybe_more = workers
        ready = {fd for fd, _ in self._poll.poll(0 if workers else milliseconds)}
        return Woken(self.link.fileno() in ready, workers or self._router_fd in ready)

    def _readable(self) -> bool:
        return bool(cast(int, self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def recv(self) -> list[bytes] | None:
        """The next message from a worker, identity first; None where there is none."""
        try:
            parts = self._router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            self._maybe_more = False
            return None
        self._maybe_more = True
        return parts

    def send(self, identity: bytes, frame: bytes) -> None:
        """Send to a worker, or count the reply as dropped: it is gone, or never reads."""
        self._maybe_more = True
        try:
            self._router.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.dropped_replies += 1
            _log.debug("a reply is dropped: %s", error)

    def close(self, *, deliver: bool) -> None:
        """Close both; with `deliver`, replies get half a second to leave."""
        self._router.close(linger=LINGER_MS if deliver else 0)
        self._context.term()
        self.link.close()

    def __repr__(self) -> str:
        return f"<Sockets {self.link!r}, {self.dropped_replies} replies dropped>"
