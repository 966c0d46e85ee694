"""A worker's connection to one lane process: jobs, results, and the certainty of its death."""

import contextlib
import itertools
import os
import select
import socket
import time

from kvd_client.errors import DaemonLost, get_logger
from kvd_client.readiness import Readiness
from kvd_proto.channel import Channel, ReceivedFrame
from kvd_proto.codec import WIRE, Header
from kvd_proto.errors import BadFrame, ChannelFull, DecodeError
from kvd_proto.messages import Error, ErrorCode, Join, LaneUp, Message, Ok

_SCHEME = "ipc://"
MAX_UNSENT_BYTES = 32 * 2**20
"""What waits for a lane that does not read, before it is given no more."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0
"""Between two connections, as long as the lane does not answer Join."""

log = get_logger()


class LaneLink:
    """The connection to one incarnation of a lane, with its lifeline.

    Its first message is Join; requests may follow before the lane has answered that.

    Args:
        up: the notice that announced the lane.
        lifeline: read end of a pipe that only the lane holds open for writing; taken over.
        readiness: readable while there is something to receive, or room for what waits.

    Raises:
        DaemonLost: an address that is none.
    """

    def __init__(self, up: LaneUp, lifeline: int, readiness: Readiness) -> None:
        if not up.endpoint.startswith(_SCHEME):
            raise DaemonLost(f"lanes listen at {_SCHEME} addresses, not at {up.endpoint!r}")
        self.endpoint = up.endpoint
        self._token = up.token
        self.pending: dict[int, int] = {}  # request id -> job id of what has not ended
        self._readiness = readiness
        self._lifeline = lifeline
        readiness.watch(lifeline, 0)
        self._poll = select.poll()
        self._poll.register(lifeline, 0)  # the hang-up is always reported
        self._watched = -1, 0  # the connection's descriptor and events
        # Ids do not begin again with a connection: jobs of those before may still end.
        self._ids = itertools.count(1)
        self._join_id = 0
        self._pause = self._reopen_at = 0.0
        self._refusal = ""  # why the lane has closed a connection
        self._channel: Channel | None = None
        self.reopen()

    def send(self, message: Message) -> int:
        """Send a request; return its id, or 0 where the connection is closed or full."""
        channel, request_id = self._channel, next(self._ids)
        if channel is None:
            return 0
        try:
            channel.send(WIRE.encode(message, request_id))
        except (ChannelFull, EOFError, OSError):  # what the lane has sent is still received
            return 0
        self._watch_channel()
        return request_id

    @property
    def closed(self) -> bool:
        """Whether the connection is closed. The lane may be alive and take another one."""
        return self._channel is None

    def reopen(self) -> None:
        """Connect and join again; the lane stops what was sent before, see `settled`.

        The endpoint is this incarnation's own, for as long as the daemon lives that named it. Where
        nothing listens, the queue is full or no descriptor is free, this stays closed. So it does
        in the pause after a connection on which Join was not answered.
        """
        now = time.monotonic()
        if now < self._reopen_at:
            return
        self._pause = min(max(2 * self._pause, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
        self._reopen_at = now + self._pause
        with contextlib.suppress(OSError):
            connecting = socket.socket(
                socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
            )
            try:
                connecting.connect(self.endpoint.removeprefix(_SCHEME))
                channel = Channel(
                    connecting, max_unsent_bytes=MAX_UNSENT_BYTES, takes_descriptors=False
                )
                self._join_id = next(self._ids)
                with contextlib.suppress(EOFError):  # the lane's reason is received first
                    channel.send(WIRE.encode(Join(token=self._token), self._join_id))
            except OSError:
                connecting.close()
                raise
            self._channel = channel
        self._watch_channel()

    def receive(self) -> tuple[list[tuple[Header, Message | None]], bool]:
        """Return everything that has arrived, and whether the lane has ended.

        There is None in place of an unreadable message. A lane that has ended sends nothing more.
        """
        ready = self._poll.poll(0)
        dead = any(fd == self._lifeline for fd, _ in ready)
        arrived: list[tuple[Header, Message | None]] = []
        if len(ready) > dead:
            for frame, _ in self._receive_frames():
                try:
                    header = WIRE.decode_header(frame)
                except DecodeError:
                    continue
                try:
                    message = WIRE.decode_body(header, frame)
                except DecodeError:
                    arrived.append((header, None))
                    continue
                arrived.append((header, message))
                if not header.request_id and isinstance(message, Error):
                    self._note_refusal(message.text)
            self._watch_channel()
        return arrived, dead

    def _receive_frames(self) -> list[ReceivedFrame]:
        channel = self._channel
        if channel is None:
            return []
        try:
            if channel.wants_write:
                with contextlib.suppress(EOFError):  # what the lane has sent is received first
                    channel.flush()
            return channel.receive_all()
        except (EOFError, BadFrame, OSError):
            channel.close()
            self._channel = None
            return []

    def _note_refusal(self, text: str) -> None:
        if text != self._refusal:
            log.warning("the lane at %s has closed the connection: %s", self.endpoint, text)
        self._refusal = text

    @property
    def lack(self) -> str:
        """Why `send` has returned 0."""
        return self._refusal or "too many wait, or there is no connection"

    def settled(self, number: int, message: Message | None) -> frozenset[int]:
        """Return pending requests of earlier connections, if this is the answer to Join.

        Their jobs have ended: the lane answers Ok when they have, `bad_session` when it has
        unmapped the worker's memory. Any other answer says nothing of them: join again.
        """
        if number != self._join_id:
            return frozenset()
        unmapped = isinstance(message, Error) and message.code is ErrorCode.BAD_SESSION
        if not unmapped and not isinstance(message, Ok):
            self._close_channel()
            return frozenset()
        self._pause = self._reopen_at = 0.0
        self._refusal = ""
        return frozenset(request for request in self.pending if request < number)

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
            self._close_channel()
            self._readiness.unwatch(self._lifeline)
            os.close(self._lifeline)
            self._lifeline = -1

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._watch_channel()

    def _watch_channel(self) -> None:
        """Have polls look at the connection that there is, for what it waits for."""
        channel = self._channel
        watched = -1, 0
        if channel is not None:
            events = select.POLLIN | (select.POLLOUT if channel.wants_write else 0)
            watched = channel.fileno(), events
        if channel is None or watched != self._watched:
            before, _ = self._watched
            if before >= 0:
                self._poll.unregister(before)
                self._readiness.unwatch(before)
            if channel is not None:
                self._poll.register(*watched)
                self._readiness.watch(*watched)
            self._watched = watched
