"""Subscribers of KV events: bytes from a socket into indexes."""

from pathlib import Path
from typing import Self

import zmq

from tests.events.expected import Indexes
from tests.routers.wire import decode


class Subscriber:
    """Receives what is published at an address, and has the indexes that follow from it.

    Args:
        address: where to connect to.
        topic: the beginning of the topics that are subscribed to.

    Attributes:
        messages, events: how many came.
        wrong: what no publisher may do, in words: sequence numbers that do not grow.
    """

    def __init__(self, address: str, topic: str = "kv@") -> None:
        self.indexes = Indexes()
        self.messages = self.events = 0
        self.wrong: list[str] = []
        self.address = address
        self._sequences: dict[str, int] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.rcvhwm = 0  # a test's indexes lose nothing
        self._socket.reconnect_ivl = 20
        self._socket.subscribe(topic)
        self._socket.connect(address)

    def pump(self) -> int:
        """Take what has come; how many messages that were."""
        taken = 0
        while self._socket.poll(0):
            topic, sequence, batch = decode(self._socket.recv_multipart())
            before = self._sequences.get(topic, -1)
            if sequence <= before:
                self.wrong.append(f"{topic}: number {sequence} after {before}")
            self._sequences[topic] = sequence
            self.indexes.take(topic, batch)
            self.events += len(batch.events)
            taken += 1
        self.messages += taken
        return taken

    def close(self) -> None:
        """Leave."""
        self._context.destroy(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def address_in(folder: Path) -> str:
    """Where a test's publisher binds."""
    return f"ipc://{folder}/events.sock"
