"""What a scheduler tells its ranks, and what they answer: datagrams of JSON."""

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LARGEST = 2**16


@dataclass(frozen=True, slots=True)
class Order:
    """Store or load these chunks of a group, then take the blocks back after `patience` seconds."""

    number: int
    way: Literal["store", "load"]
    group: int
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    patience: float
    cancel: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """A rank has done with an order; its blocks are its own again."""

    number: int
    rank: int
    success: bool


def listen(path: Path) -> socket.socket:
    """The scheduler's end; one of a scheduler before is replaced."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(16)
    listener.setblocking(False)  # the socket API's own form
    return listener


def connect(path: Path) -> socket.socket:
    """A rank's end.

    Raises:
        OSError: no scheduler listens.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        raise
    return sock
