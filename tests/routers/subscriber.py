"""Rebuilt indexes of routers, fed with the bytes that engines publish."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zmq
from vllm.distributed.kv_events import KVEventBatch

from tests.events.expected import Indexes

_DECODER = msgspec.msgpack.Decoder(KVEventBatch)


class Subscriber:
    """Indexes what engines publish.

    Attributes:
        events: how many came.
        errors: in words: sequence numbers that do not grow, and payloads that vLLM does not decode.
    """

    def __init__(self) -> None:
        self.indexes = Indexes()
        self.events = 0
        self.errors: list[str] = []
        self._drops = False
        self._sequences: dict[str, int] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.rcvhwm = 0  # a test's indexes lose nothing by themselves
        self._socket.reconnect_ivl = 20
        self._socket.subscribe("kv@")

    def follow(self, endpoint: str) -> None:
        """Receive what one engine publishes."""
        self._socket.connect(endpoint)

    def hears(self, topic: str) -> bool:
        """Return whether a message of this topic has arrived since it is followed."""
        self.pump()
        return topic in self._sequences

    def leave(self, topic: str, endpoint: str) -> None:
        """Follow an engine no more, and forget its blocks."""
        self.pump()
        self._socket.disconnect(endpoint)
        self._sequences.pop(topic, None)
        self.indexes.forget(topic)

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Lose every message that arrives within the context."""
        self.pump()
        self._drops = True
        try:
            yield
            self.pump()
        finally:
            self._drops = False

    def pump(self) -> None:
        """Take what has arrived."""
        while self._socket.poll(0):
            name, number, payload = self._socket.recv_multipart()
            topic, sequence = name.decode(), int.from_bytes(number, "big")
            try:
                batch = _DECODER.decode(payload)

            except msgspec.MsgspecError as error:
                self.errors.append(f"{topic}: message {sequence}: {error}")
                continue
            previous = self._sequences.get(topic, -1)
            if sequence <= previous:
                self.errors.append(f"{topic}: number {sequence} after {previous}")
            self._sequences[topic] = sequence
            self.events += len(batch.events)
            if not self._drops:
                self.indexes.take(topic, batch)

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(0)
