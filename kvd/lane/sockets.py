"""The lane's two sockets and the one place where it waits.

Between two pieces of a copy the sockets are looked at with one poll system
call (about 1 µs), however many workers are connected.
"""

import logging
import select
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from kvd.wire.router import Router
from kvd.wire.seqpacket import Channel
from kvd_proto.codec import MAX_MESSAGE_BYTES

_log = logging.getLogger(__name__)

LINGER_SECONDS = 0.5
FRAMES_PER_TURN = 64  # to be read of each, before the device gets its turn


class Woken(NamedTuple):
    """Which sockets have something to do."""

    link: bool
    workers: bool


class Sockets:
    """The socket that workers send to, and the link to the broker.

    Args:
        endpoint: where to listen.
        link: to the broker.

    Attributes:
        router: reads from workers.
        dropped_replies: those to workers that are gone, or do not read.
    """

    def __init__(self, endpoint: str, link: Channel) -> None:
        self.link = link
        self.dropped_replies = 0
        self.router = Router(Path(endpoint.removeprefix("ipc://")), max_bytes=MAX_MESSAGE_BYTES)
        self._poll = select.poll()
        self._poll.register(self.router, select.POLLIN)
        self._poll.register(link, select.POLLIN)
        self._link_writes = False

    @property
    def dropped_messages(self) -> int:
        """Messages of workers that had several parts."""
        return self.router.dropped

    @property
    def limits(self) -> Counter[str]:
        """Connections that were closed, by the bound that they were above."""
        return self.router.limits

    def wait(self, milliseconds: int | None) -> Woken:
        """Wait until there is something to do, at most so long; None: for ever."""
        if self.link.wants_write != self._link_writes:
            self._link_writes = self.link.wants_write
            mask = select.POLLIN | (select.POLLOUT if self._link_writes else 0)
            self._poll.modify(self.link, mask)
        waiting = self.router.pending
        ready = {fd for fd, _ in self._poll.poll(0 if waiting else milliseconds)}
        if self.router.fileno() in ready:
            self.router.look()
        return Woken(self.link.fileno() in ready, self.router.pending)

    def send(self, identity: bytes, frame: bytes) -> None:
        """Send to a worker, or count the reply as dropped: it is gone, or never reads."""
        if not self.router.send(identity, frame):
            self.dropped_replies += 1
            _log.debug("a reply is dropped: its worker is gone, or does not read")

    def close(self, *, deliver: bool) -> None:
        """Close both; with `deliver`, replies get half a second to leave."""
        self.router.close(linger=LINGER_SECONDS if deliver else 0.0)
        self.link.close()

    def __repr__(self) -> str:
        return f"<Sockets {self.link!r}, {self.dropped_replies} replies dropped>"
