"""A client of the daemon's request sockets that speaks ZMTP by hand, and as badly as wanted."""

import socket
import struct
from pathlib import Path

from kvd_proto.zmtp import frame_header, opening
from tests.waiting import PATIENCE


def connect(path: Path) -> socket.socket:
    """A connection that has said who it is; its sends give up at last."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(PATIENCE)
    sock.connect(str(path))
    sock.sendall(opening(b"DEALER"))
    return sock


def message(body: bytes) -> bytes:
    """A message of one part."""
    return frame_header(len(body)) + body


def part(nbytes: int) -> bytes:
    """A part of zeros that another one follows."""
    return struct.pack(">BQ", 3, nbytes) + bytes(nbytes)


def unfinished(nbytes: int, sent: int) -> bytes:
    """The beginning of a message of `nbytes`."""
    return struct.pack(">BQ", 2, nbytes) + bytes(sent)
