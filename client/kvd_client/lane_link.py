"""A worker's connection to one lane process: jobs, results, and the certainty of its death."""

import os
import select
from collections.abc import Iterable

import zmq

from kvd_client.connection import dealer
from kvd_client.readiness import Readiness
from kvd_proto.codec import WIRE, Header
from kvd_proto.errors import DecodeError
from kvd_proto.messages import Error, ErrorCode, LaneUp, Message, Ok


class LaneLink:
    """The request socket to one incarnation of a lane, with its lifeline.

    Args:
        context: the session's ZeroMQ context.
        up: the notice that announced the lane.
        lifeline: read end of a pipe that only the lane holds open for writing; taken over.
        identity: boot id of the daemon and the session's token.
        readiness: readable while there may be something to receive.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        up: LaneUp,
        lifeline: int,
        identity: tuple[bytes, bytes],
        readiness: Readiness,
    ) -> None:
        self.endpoint = up.endpoint
        self._boot_id, self._token = identity
        self.pending: dict[int, int] = {}  # request id -> job id of what has not ended
        self._waits: dict[int, frozenset[int]] = {}  # Wait's request id -> those of its jobs
        self._lifeline = lifeline
        self._context = context
        self._readiness = readiness
        self._dealer = dealer(context, up.endpoint)
        readiness.watch(self._dealer.FD)
        readiness.watch(lifeline, 0)
        self._watch = select.poll()
        self._watch.register(lifeline, 0)  # the hang-up is always reported
        self._ids = 0
        self.blocked = False  # the last message could not be sent

    def send(self, message: Message) -> int:
        """Send a request; return its id, or 0 where the connection is closed or full."""
        self._ids += 1
        try:
            self._dealer.send(
                WIRE.encode(message, self._ids, self._boot_id, self._token), zmq.NOBLOCK
            )
        except zmq.Again:
            self.blocked = True
            return 0
        self.blocked = False
        return self._ids

    def reopen(self) -> None:
        """Connect again, after `receive`; what was sent and is not answered can be asked about.

        The endpoint is this incarnation's own, for as long as the daemon lives that named it.
        """
        try:
            fresh = dealer(self._context, self.endpoint)
        except zmq.ZMQError:  # no descriptor is free; it is tried again
            return
        self._readiness.unwatch(self._dealer.FD)
        self._dealer.close(linger=0)
        self._dealer, self.blocked = fresh, False
        self._readiness.watch(fresh.FD)

    def receive(self) -> list[tuple[Header, Message | None]]:
        """Return everything that has arrived; None in place of an unreadable message."""
        arrived: list[tuple[Header, Message | None]] = []
        while True:
            try:
                frame = self._dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                return arrived
            try:
                header = WIRE.decode_header(frame)
            except DecodeError:
                continue
            try:
                arrived.append((header, WIRE.decode_body(header, frame)))
            except DecodeError:
                arrived.append((header, None))

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
        return bool(self._watch.poll(0))

    def watch(self, poller: select.poll) -> None:
        """Have `poller` wake up when there may be something to receive.

        To be called right after `receive`: ZeroMQ's descriptor tells of changes only.
        """
        poller.register(self._dealer.FD, select.POLLIN)
        poller.register(self._lifeline, 0)

    def close(self) -> None:
        """Close the socket and the lifeline. May be called again."""
        if self._lifeline >= 0:
            self._readiness.unwatch(self._dealer.FD)
            self._readiness.unwatch(self._lifeline)
            self._dealer.close(linger=0)
            os.close(self._lifeline)
            self._lifeline = -1

    def __repr__(self) -> str:
        return f"<LaneLink {self.endpoint}>"
