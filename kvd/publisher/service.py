"""The publisher's loop: what the broker says, what subscribers ask, what directories tell.

Nothing that a subscriber does ends it, nor what it reads: a description that is damaged is none.
"""

import contextlib
import logging
import mmap
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import zmq

from kvd.errors import ChannelFull
from kvd.publisher.answers import Answers
from kvd.publisher.note import Note
from kvd.publisher.publication import Publication
from kvd.publisher.replay import ReplayBuffer
from kvd.publisher.sockets import LINGER_SECONDS, Sockets
from kvd.publisher.topics import Topics
from kvd.publisher.wire import Message, topic
from kvd.wire.publishing import (
    PUBLISHING,
    BeginPublisher,
    PublishEngine,
    PublisherReport,
    WithdrawEngine,
)
from kvd.wire.seqpacket import Channel, close_all
from kvd_proto.descriptions import DescriptionsView
from kvd_proto.directory import DirectoryView
from kvd_proto.errors import DirectoryError
from kvd_proto.messages import KvEvents

log = logging.getLogger("kvd.publisher")
POLL_MS = 10
IDLE_MS = 500
REPORT_SECONDS = 1.0
LEFT_SECONDS = 60.0
"""For so long who subscribes may have heard the publisher before, which took nothing back."""
_END_SECONDS = 2 * LINGER_SECONDS + 1.0


@dataclass(slots=True)
class Opened:
    """A namespace, mapped."""

    publication: Publication
    directory: DirectoryView
    memory: mmap.mmap
    descriptions_fd: int

    def close(self) -> None:
        """Unmap it."""
        self.directory.release()
        self.memory.close()
        close_all([self.descriptions_fd])


class Service:
    """One publisher, until its daemon ends.

    Args:
        link: to the broker.
        begin: its orders.
        fds: that came with them.

    Raises:
        zmq.ZMQError, OSError: an endpoint or the note cannot be had.
    """

    def __init__(self, link: Channel, begin: BeginPublisher, fds: tuple[int, ...]) -> None:
        self._link = link
        self._locality = begin.locality
        self._note = Note(Path(begin.note))  # waits until the publisher before has ended
        self._sockets = Sockets(begin, fds)
        self._topics = Topics(time.time)
        self._buffer = ReplayBuffer()
        self._answers = Answers(self._buffer, self._topics, time.time)
        self._open: dict[bytes, Opened] = {}  # by namespace
        self._namespaces: dict[str, bytes] = {}  # by engine
        self._left = dict.fromkeys(self._note.left)
        for name in self._left:
            self._topics.closed(self._topics.open(name))
        self._left_until = time.monotonic() + LEFT_SECONDS
        self._gone = [0, 0, 0]  # published, snapshots, overruns of namespaces that were closed
        self._lag_ns = 0
        self._report_at = 0.0
        self._poller = zmq.Poller()
        self._poller.register(link.fileno(), zmq.POLLIN)
        self._poller.register(self._sockets.events, zmq.POLLIN)
        if self._sockets.replay is not None:
            self._poller.register(self._sockets.replay, zmq.POLLIN)

    def run(self) -> None:
        """Serve until the link's end of file, then take everything back."""
        busy = False
        with contextlib.suppress(EOFError):
            while True:
                patience = POLL_MS if self._open else IDLE_MS
                self._poller.poll(0 if busy else patience)
                busy = self._turn(time.monotonic())
        self._finish()

    def _turn(self, now: float) -> bool:
        """Do what is there to do, some of it; whether more waits."""
        self._orders()
        for prefix in self._sockets.subscribed():
            self._subscribed(prefix)
        for frames in self._sockets.requests():
            self._answers.request(frames)
        busy = self._answers.turn(self._sockets.answer)
        for opened in self._open.values():
            publication = opened.publication
            began = time.monotonic_ns()
            self._send(publication.turn(now))
            if lag := publication.take_lag():
                self._lag_ns = max(self._lag_ns, lag + time.monotonic_ns() - began)
            busy |= publication.behind
        if self._left and now > self._left_until:
            self._left = {}
            self._write_note()
        if now >= self._report_at:
            self._report_at = now + REPORT_SECONDS
            self._report()
        return busy

    def _send(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._sockets.send(message)
            self._buffer.add(message)

    # ---------------------------------------------------------- subscribers

    def _subscribed(self, prefix: bytes) -> None:
        """Have everything told on the topics of a new subscription."""
        for found in self._topics.matching(prefix):
            if found.name in self._left:
                self._send(found.cleared())
            found.due = found.open

    # --------------------------------------------------------------- orders

    def _orders(self) -> None:
        self._link.flush()
        while (received := self._link.recv()) is not None:
            frame, fds = received
            _, order = PUBLISHING.decode(frame)
            if isinstance(order, PublishEngine):
                self._publish(order, fds)
            else:
                close_all(fds)
                if isinstance(order, WithdrawEngine):
                    self._withdraw(order.engine)
                    self._write_note()

    def _publish(self, order: PublishEngine, fds: tuple[int, ...]) -> None:
        opened = self._open.get(order.namespace)
        if opened is not None:
            close_all(fds)
        else:
            try:
                opened = _map(fds, self._locality)
            except (DirectoryError, OSError, ValueError) as error:
                log.error("engine %s: nothing is published: %s", order.engine, error)  # noqa: TRY400  # the text has the reason
                return
            self._open[order.namespace] = opened
        found = self._topics.open(topic(order.engine, order.model))
        opened.publication.topics[order.engine] = found
        self._namespaces[order.engine] = order.namespace
        if found.name in self._left:
            self._send(found.cleared())
        self._write_note()
        log.info("engine %s is published as %s", order.engine, found.name.decode())

    def _withdraw(self, engine: str) -> None:
        namespace = self._namespaces.pop(engine, None)
        if namespace is None:
            return
        opened = self._open[namespace]
        found, messages = opened.publication.withdraw(engine)
        self._send(messages)
        self._topics.closed(found)
        if not opened.publication.topics:
            self._close(namespace)

    def _close(self, namespace: bytes) -> None:
        opened = self._open.pop(namespace)
        self._gone = [a + b for a, b in zip(self._gone, _figures(opened), strict=True)]
        opened.close()

    def _write_note(self) -> None:
        self._note.write([*self._left, *(found.name for found in self._topics.opened)])

    def _report(self) -> None:
        sums = list(map(sum, zip(self._gone, *map(_figures, self._open.values()), strict=True)))
        totals = KvEvents(
            published=sums[0], snapshots=sums[1], overruns=sums[2], lag_us=self._lag_ns // 1000
        )
        self._lag_ns = 0
        report = PublisherReport(
            totals=totals,
            subscriptions=self._sockets.subscriptions,
            topics=len(self._namespaces),
        )
        with contextlib.suppress(ChannelFull):  # the broker hangs; it has enough to read
            self._link.send(PUBLISHING.encode(report))

    # ------------------------------------------------------------------ end

    def _finish(self) -> None:
        """Take everything back, and give it a moment to be sent."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _END_SECONDS)  # whatever holds it up
        for engine in list(self._namespaces):
            self._withdraw(engine)
        self._sockets.close()
        self._write_note()
        log.info("what was published is taken back")

    def __repr__(self) -> str:
        return f"<publisher.Service {self._sockets!r}, {self._topics!r}>"


def _figures(opened: Opened) -> tuple[int, int, int]:
    publication = opened.publication
    return publication.published, publication.snapshots, publication.overruns


def _map(fds: tuple[int, ...], locality: str | None) -> Opened:
    """Map a namespace's directory and take its descriptions, where they are.

    Args:
        fds: of both.
        locality: of what lies in tiers.
    """
    directory_fd, *rest = fds
    descriptions_fd = rest[0] if rest else -1
    try:
        memory = mmap.mmap(directory_fd, 0, prot=mmap.PROT_READ)
        directory = DirectoryView(memory)
    except (DirectoryError, OSError, ValueError):
        close_all(rest)
        raise
    finally:
        os.close(directory_fd)
    descriptions = DescriptionsView(descriptions_fd) if rest else None
    publication = Publication(directory, descriptions, time.monotonic_ns, locality)
    return Opened(publication, directory, memory, descriptions_fd)
