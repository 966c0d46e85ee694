"""The publisher's two sockets. Nothing here waits for a subscriber.

A subscriber that does not read loses what is above its queue's bound; over TCP the kernel ends its
connection after half a minute, and its queue goes with it.
"""

import logging
from collections.abc import Iterator, Sequence

import zmq

from kvd.publisher.wire import Message
from kvd.wire.publishing import BeginPublisher

log = logging.getLogger("kvd.publisher")
QUEUED_MESSAGES = 8192  # for one subscriber, of at most some 16 KiB each
LINGER_SECONDS = 1.0
_UNREAD_MS = 30_000
_AT_ONCE = 256
_MAX_REQUEST_BYTES = 1024
_RECONNECT_MS = 5000
_SUBSCRIBE, _UNSUBSCRIBE = 1, 0


class Sockets:
    """Where events go out, and where requests for replay come in.

    Args:
        begin: the endpoints.
        fds: sockets that listen there, in the order of `begin`; they are taken over.

    Attributes:
        subscriptions: how many there are now.
        replay: where requests come; None where there is no such socket.
    """

    def __init__(self, begin: BeginPublisher, fds: Sequence[int]) -> None:
        listening = list(fds)
        self._context = zmq.Context()
        self.events = self._socket(zmq.XPUB)
        self.events.setsockopt(zmq.XPUB_VERBOSER, 1)  # every subscription is told, and its end
        if begin.connects:
            self.events.setsockopt(zmq.IMMEDIATE, 1)  # no queue for an indexer that is not there
            self.events.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS)
            self.events.connect(begin.events)
        else:
            self._listen(self.events, begin.events, listening.pop(0))
        self.replay: zmq.Socket[bytes] | None = None
        if begin.replay:
            self.replay = self._socket(zmq.ROUTER)
            self.replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue is told
            self._listen(self.replay, begin.replay, listening.pop(0))
        self.subscriptions = 0

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        made = self._context.socket(kind)
        made.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
        made.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        made.setsockopt(zmq.TCP_MAXRT, _UNREAD_MS)
        made.setsockopt(zmq.TCP_KEEPALIVE, 1)
        made.setsockopt(zmq.LINGER, int(LINGER_SECONDS * 1000))
        made.setsockopt(zmq.IPV6, 1)
        return made

    @staticmethod
    def _listen(made: "zmq.Socket[bytes]", endpoint: str, fd: int) -> None:
        made.setsockopt(zmq.USE_FD, fd)  # bound by the broker, which keeps it for the next process
        made.bind(endpoint)

    def send(self, message: Message) -> None:
        """Publish a message."""
        self.events.send_multipart(message.frames, zmq.NOBLOCK)

    def subscribed(self) -> Iterator[bytes]:
        """Yield the prefixes of topics that were subscribed to since the last call."""
        for _ in range(_AT_ONCE):
            try:
                told = self.events.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if told[:1] == bytes((_SUBSCRIBE,)):
                self.subscriptions += 1
                yield told[1:]
            elif told[:1] == bytes((_UNSUBSCRIBE,)):
                self.subscriptions -= 1

    def requests(self) -> Iterator[list[bytes]]:
        """Yield the requests for replay that have come since the last call, as frames."""
        if self.replay is None:
            return
        for _ in range(_AT_ONCE):
            try:
                yield self.replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def answer(self, identity: bytes, frames: Sequence[bytes]) -> bool | None:
        """Send a part of an answer; False: there is no room now; None: who asked is gone."""
        if self.replay is None:
            return None
        try:
            self.replay.send_multipart([identity, b"", *frames], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            return None
        return True

    def close(self) -> None:
        """Send what waits, for a second at most, and close."""
        self.events.close()
        if self.replay is not None:
            self.replay.close()
        self._context.term()

    def __repr__(self) -> str:
        return f"<Sockets {self.subscriptions} subscriptions>"
