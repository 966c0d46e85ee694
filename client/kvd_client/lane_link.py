"""A worker's connection to one lane process: it sends jobs, receives results, detects its death."""

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
MAX_UNSENT_BYTES = 32 * 2**20  # may wait for a lane that does not read; beyond, `send` fails
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.1, 2.0  # between connections without an answer to Join

log = get_logger()


class LaneLink:
    """The connection to one incarnation of a lane, with its lifeline.

    Its first message is Join; requests may follow before the lane has answered it.

    Args:
        notice: it announced the lane.
        lifeline_fd: read end of a pipe whose write end only the lane has; taken over.
        readiness: made readable by what arrives, and by room for data that waits.

    Attributes:
        job_by_request: job id by request id, of jobs that have not ended.

    Raises:
        DaemonLost: the notice has no valid address. A lane that cannot be reached now is no error:
            see `is_closed`.
    """

    def __init__(self, notice: LaneUp, lifeline_fd: int, readiness: Readiness) -> None:
        if not notice.endpoint.startswith(_SCHEME):
            raise DaemonLost(
                f"the daemon announced a lane at {notice.endpoint!r}, which is no {_SCHEME} address"
            )
        self.endpoint = notice.endpoint
        self._token = notice.token
        self.job_by_request: dict[int, int] = {}
        self._readiness = readiness
        self._lifeline_fd = lifeline_fd
        readiness.watch(lifeline_fd, 0)
        self._poll = select.poll()
        self._poll.register(lifeline_fd, 0)  # poll always reports a hang-up
        self._polled_fd = -1  # the connection's; -1: it is closed
        self._polled_events = 0
        # Request ids continue across reconnects, so a late reply cannot match a newer job.
        self._ids = itertools.count(1)
        self._join_id = 0  # request id of the last Join
        self._reopen_pause = 0.0  # seconds before the next reopen
        self._reopen_at = 0.0  # not before this time
        self._close_reason = ""  # why the lane closed a connection
        self._channel: Channel | None = None
        self.reopen()

    def send(self, message: Message) -> int:
        """Send a request; return its id, or 0 if the connection is closed or full."""
        channel, request_id = self._channel, next(self._ids)
        if channel is None:
            return 0
        try:
            channel.send(WIRE.encode(message, request_id))
        except (ChannelFull, EOFError, OSError):  # `receive` still takes what the lane has sent
            return 0
        self._update_polls()
        return request_id

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed. The lane may be alive and accept another one."""
        return self._channel is None

    def reopen(self) -> None:
        """Connect and join again; the lane stops earlier jobs, see `lost_requests`.

        The connection stays closed if nothing listens, the backlog is full or no descriptor is
        free, and during the pause after a connection on which Join was not answered. The endpoint
        is this incarnation's own as long as its daemon lives.
        """
        now = time.monotonic()
        if now < self._reopen_at:
            return
        self._reopen_pause = min(max(2 * self._reopen_pause, MIN_PAUSE_SECONDS), MAX_PAUSE_SECONDS)
        self._reopen_at = now + self._reopen_pause
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
                with contextlib.suppress(EOFError):  # `receive` takes the lane's reason first
                    channel.send(WIRE.encode(Join(token=self._token), self._join_id))
            except OSError:
                connecting.close()
                raise
            self._channel = channel
        self._update_polls()

    def receive(self) -> tuple[list[tuple[Header, Message | None]], bool]:
        """Return all messages that have arrived, and whether the lane process has ended.

        None stands for an unreadable message. A lane that has ended sends nothing more.
        """
        ready = self._poll.poll(0)
        is_dead = any(fd == self._lifeline_fd for fd, _ in ready)
        messages: list[tuple[Header, Message | None]] = []
        if len(ready) > is_dead:
            for frame, _ in self._receive_frames():
                try:
                    header = WIRE.decode_header(frame)
                except DecodeError:
                    continue
                try:
                    message = WIRE.decode_body(header, frame)
                except DecodeError:
                    messages.append((header, None))
                    continue
                messages.append((header, message))
                if not header.request_id and isinstance(message, Error):
                    self._note_close_reason(message.text)
            self._update_polls()
        return messages, is_dead

    def _receive_frames(self) -> list[ReceivedFrame]:
        channel = self._channel
        if channel is None:
            return []
        try:
            if channel.wants_write:
                with contextlib.suppress(EOFError):  # receive what the lane has sent first
                    channel.flush()
            return channel.receive_all()
        except (EOFError, BadFrame, OSError):
            channel.close()
            self._channel = None
            return []

    def _note_close_reason(self, text: str) -> None:
        if text != self._close_reason:
            log.warning("the lane at %s has closed the connection: %s", self.endpoint, text)
        self._close_reason = text

    @property
    def send_error(self) -> str:
        """Why `send` has returned 0."""
        return self._close_reason or "too many messages wait, or there is no connection"

    def lost_requests(self, request_id: int, message: Message | None) -> frozenset[int]:
        """Return the pending requests of earlier connections, if this is the answer to Join.

        Their jobs have ended: the lane answers Ok when they have, `bad_session` when it has
        unmapped the worker's memory. After any other answer they may go on: join again.
        """
        if request_id != self._join_id:
            return frozenset()
        unmapped = isinstance(message, Error) and message.code is ErrorCode.BAD_SESSION
        if not unmapped and not isinstance(message, Ok):
            self._close_channel()
            return frozenset()
        self._reopen_pause = self._reopen_at = 0.0
        self._close_reason = ""
        return frozenset(earlier for earlier in self.job_by_request if earlier < request_id)

    @property
    def is_dead(self) -> bool:
        """Whether the lane process has ended, and so does not touch memory any more."""
        return any(fd == self._lifeline_fd for fd, _ in self._poll.poll(0))

    def watch(self, poller: select.poll) -> None:
        """Register with `poller` the descriptors for which to call `receive`."""
        if self._polled_fd >= 0:
            poller.register(self._polled_fd, self._polled_events)
        poller.register(self._lifeline_fd, 0)

    def close(self) -> None:
        """Close the connection and the lifeline. May be called again."""
        if self._lifeline_fd >= 0:
            self._close_channel()
            self._readiness.unwatch(self._lifeline_fd)
            os.close(self._lifeline_fd)
            self._lifeline_fd = -1

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._update_polls()

    def _update_polls(self) -> None:
        """Poll the current connection, for writing too if data waits."""
        channel = self._channel
        fd, events = -1, 0
        if channel is not None:
            fd = channel.fileno()
            events = select.POLLIN | (select.POLLOUT if channel.wants_write else 0)
        if channel is None or (fd, events) != (self._polled_fd, self._polled_events):
            if self._polled_fd >= 0:
                self._poll.unregister(self._polled_fd)
                self._readiness.unwatch(self._polled_fd)
            if channel is not None:
                self._poll.register(fd, events)
                self._readiness.watch(fd, events)
            self._polled_fd, self._polled_events = fd, events
