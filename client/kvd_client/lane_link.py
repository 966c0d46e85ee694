"""A worker's way to one lane process: jobs out, results in, and the certainty of its death."""

import os
import select
from collections.abc import Iterable

import zmq

from kvd_client.connection import dealer
from kvd_client.readiness import Readiness
from kvd_proto.codec import WIRE, Header
from kvd_proto.errors import DecodeError
from kvd_proto.messages import Error, ErrorCode, LaneUp, Message, WaitDone


class LaneLink:
    """The request socket to one incarnation of a lane, with its lifeline.

    Args:
        context: the session's ZeroMQ context.
        up: the notice that announced the lane.
        lifeline: read end of a pipe that only the lane holds open for writing; taken over.
        boot_id, token: of the session.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        up: LaneUp,
        lifeline: int,
        boot_id: bytes,
        token: bytes,
    ) -> None:
        self.endpoint = up.endpoint
        self.incarnation = up.incarnation
        self.token = token
        self.pending: dict[int, int] = {}  # request id -> job id of what has not ended
        self._waits: dict[int, frozenset[int]] = {}  # Wait's request id -> those of its jobs
        self._boot_id = boot_id
        self._lifeline = lifeline
        self._context = context
        self._dealer = dealer(context, up.endpoint)
        self._watch = select.poll()
        self._watch.register(lifeline, 0)  # the hang-up is always reported
        self._ids = 0
        self.blocked = False  # the last message could not be sent

    def send(self, message: Message) -> int:
        """Send a request; its id, or 0 where there is no way to the lane, or no room on it."""
        self._ids += 1
        try:
            self._dealer.send(
                WIRE.encode(message, self._ids, self._boot_id, self.token), zmq.NOBLOCK
            )
        except zmq.Again:
            self.blocked = True
            return 0
        self.blocked = False
        return self._ids

    def reopen(self, readiness: Readiness | None) -> None:
        """Connect anew, after `receive`; what was sent and is not answered can be asked about.

        The endpoint is this incarnation's own, for as long as the daemon lives that named it.
        """
        try:
            fresh = dealer(self._context, self.endpoint)
        except zmq.ZMQError:  # no descriptor is left; a later try
            return
        if readiness is not None:
            self.hush(readiness)
        self._dealer.close(linger=0)
        self._dealer, self.blocked = fresh, False
        if readiness is not None:
            self.tell(readiness)

    def receive(self) -> list[tuple[Header, Message | None]]:
        """Everything that has arrived; None in place of a message that cannot be read."""
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
        """Note that request `number` was a Wait for the jobs of these requests."""
        open_waits = self._waits.items()
        self._waits = {n: jobs for n, jobs in open_waits if not jobs.isdisjoint(self.pending)}
        self._waits[number] = frozenset(requests)

    def settled(self, number: int, answer: Message | None) -> frozenset[int]:
        """The requests still pending whose jobs have ended all the same, by what was answered.

        Their answers were sent before this one, to a connection that is no more. A lane that
        does not know the worker has let go of its memory, after its last job.
        """
        unknown = isinstance(answer, Error) and answer.code is ErrorCode.BAD_SESSION
        if number not in self._waits or not (isinstance(answer, WaitDone) or unknown):
            return frozenset()
        return self._waits.pop(number) & self.pending.keys()

    @property
    def dead(self) -> bool:
        """Whether the lane process has ended: nothing of it touches memory any more."""
        return bool(self._watch.poll(0))

    def watch(self, poller: select.poll) -> None:
        """Have `poller` wake up when there may be something new.

        To be called right after `receive`: ZeroMQ's descriptor tells of changes only.
        """
        poller.register(self._dealer.FD, select.POLLIN)
        poller.register(self._lifeline, 0)

    def tell(self, readiness: Readiness) -> None:
        """Have it be readable when there may be something new, till `receive` has taken it in."""
        readiness.watch(self._dealer.FD)
        readiness.watch(self._lifeline, 0)

    def hush(self, readiness: Readiness) -> None:
        """Undo `tell`, before the end."""
        readiness.unwatch(self._dealer.FD)
        readiness.unwatch(self._lifeline)

    def close(self) -> None:
        """Close the socket and the lifeline."""
        self._dealer.close(linger=0)
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def __repr__(self) -> str:
        return f"<LaneLink {self.endpoint} incarnation {self.incarnation}>"
