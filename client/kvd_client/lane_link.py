"""A worker's connection to one lane process: jobs, results, and the certainty of its death."""

import os
import select
import time
from collections.abc import Iterable

from kvd_client.dealer import Dealer
from kvd_client.errors import DaemonLost
from kvd_client.readiness import Readiness
from kvd_proto.codec import WIRE, Header
from kvd_proto.errors import DecodeError
from kvd_proto.messages import Error, ErrorCode, LaneUp, Message, Ok

_SCHEME = "ipc://"


class LaneLink:
    """The connection to one incarnation of a lane, with its lifeline.

    Args:
        up: the notice that announced the lane.
        lifeline: read end of a pipe that only the lane holds open for writing; taken over.
        identity: boot id of the daemon and the session's token.
        readiness: readable while there is something to receive, or room for what was kept.

    Raises:
        DaemonLost: an address that is none.
        OSError: no descriptor is free.
    """

    def __init__(
        self, up: LaneUp, lifeline: int, identity: tuple[bytes, bytes], readiness: Readiness
    ) -> None:
        if not up.endpoint.startswith(_SCHEME):
            raise DaemonLost(f"lanes listen at {_SCHEME} addresses, not at {up.endpoint!r}")
        self.endpoint = up.endpoint
        self._boot_id, self._token = identity
        self.pending: dict[int, int] = {}  # request id -> job id of what has not ended
        self._waits: dict[int, frozenset[int]] = {}  # Wait's request id -> those of its jobs
        self._readiness = readiness
        self._socket = Dealer(up.endpoint.removeprefix(_SCHEME))
        self._lifeline = lifeline
        readiness.watch(lifeline, 0)
        self._poll = select.poll()
        self._poll.register(lifeline, 0)  # the hang-up is always reported
        self._watched = -1, 0  # the connection's descriptor and events
        self._ids = 0
        self._watch_socket()

    def send(self, message: Message) -> int:
        """Send a request; return its id, or 0 where the connection is closed or full."""
        self._ids += 1
        frame = WIRE.encode(message, self._ids, self._boot_id, self._token)
        sent = self._socket.send(frame)
        self._watch_socket()
        return self._ids if sent else 0

    def meet(self, stop: int, seconds: float) -> None:
        """Wait until the lane takes messages, at most so long, or until `stop` is readable.

        What is sent before leaves with a later call.
        """
        end = time.monotonic() + seconds
        poller = select.poll()
        poller.register(stop, select.POLLIN)
        self.watch(poller)
        while not (self._socket.open or self._socket.closed):
            ready = poller.poll(max(0.0, end - time.monotonic()) * 1000)
            if [fd for fd, _ in ready] != [self._socket.fileno()]:
                return
            self._socket.receive()

    @property
    def closed(self) -> bool:
        """Whether the connection is closed. The lane may be alive and take another one."""
        return self._socket.closed

    def reopen(self) -> None:
        """Connect again; what was sent and is not answered can be asked about.

        The endpoint is this incarnation's own, for as long as the daemon lives that named it.
        """
        try:
            self._socket = Dealer(self.endpoint.removeprefix(_SCHEME))
        except OSError:  # no descriptor is free; it is tried again
            return
        self._watch_socket()

    def receive(self) -> tuple[list[tuple[Header, Message | None]], bool]:
        """Return everything that has arrived, and whether the lane has ended.

        There is None in place of an unreadable message. A lane that has ended sends nothing more.
        """
        ready = self._poll.poll(0)
        dead = any(fd == self._lifeline for fd, _ in ready)
        arrived: list[tuple[Header, Message | None]] = []
        if len(ready) > dead:
            for frame in self._socket.receive():
                try:
                    header = WIRE.decode_header(frame)
                except DecodeError:
                    continue
                try:
                    arrived.append((header, WIRE.decode_body(header, frame)))
                except DecodeError:
                    arrived.append((header, None))
            self._watch_socket()
        return arrived, dead

    def awaits(self, number: int, requests: Iterable[int]) -> None:
        """Remember that request `number` is a Wait for the jobs of these requests."""
        open_waits = self._waits.items()
        self._waits = {n: jobs for n, jobs in open_waits if not jobs.isdisjoint(self.pending)}
        self._waits[number] = frozenset(requests)

    def settled(self, number: int, answer: Message | None) -> frozenset[int]:
        """Return pending requests whose jobs have ended, according to this answer.

        Their own answers were sent before this one, to a connection that was closed. A lane that
        does not know the worker has unmapped its memory, after its last job.
        """
        unknown = isinstance(answer, Error) and answer.code is ErrorCode.BAD_SESSION
        if number not in self._waits or not (isinstance(answer, Ok) or unknown):
            return frozenset()
        return self._waits.pop(number) & self.pending.keys()

    @property
    def dead(self) -> bool:
        """Whether the lane process has ended: nothing of it touches memory any more."""
        return any(fd == self._lifeline for fd, _ in self._poll.poll(0))

    def watch(self, poller: select.poll) -> None:
        """Have `poller` wake up when `receive` has something to do."""
        fd, events = self._watched
        if fd >= 0:
            poller.register(fd, events)
        poller.register(self._lifeline, 0)

    def close(self) -> None:
        """Close the connection and the lifeline. May be called again."""
        if self._lifeline >= 0:
            self._socket.close()
            self._watch_socket()
            self._readiness.unwatch(self._lifeline)
            os.close(self._lifeline)
            self._lifeline = -1

    def _watch_socket(self) -> None:
        """Have polls look at the connection that there is now, for what it waits for now."""
        fd = self._socket.fileno()
        events = select.POLLIN | (select.POLLOUT if self._socket.wants_write else 0)
        if fd < 0 or (fd, events) != self._watched:
            before, _ = self._watched
            if before >= 0:
                self._poll.unregister(before)
                self._readiness.unwatch(before)
            if fd >= 0:
                self._poll.register(fd, events)
                self._readiness.watch(fd, events)
            self._watched = fd, events

    def __repr__(self) -> str:
        return f"<LaneLink {self.endpoint}>"
