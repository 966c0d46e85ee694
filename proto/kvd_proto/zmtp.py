"""What both ends of a connection say of ZMTP 3.1, the bytes of ZeroMQ's sockets. No I/O.

Specification: https://rfc.zeromq.org/spec/37/ (ZMTP 3.1, NULL mechanism).
"""

import struct

MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame: others follow, its size has eight bytes, it is a command."""
GREETING_BYTES = 64


def command(name: bytes, body: bytes) -> bytes:
    """Return a short command as a frame."""
    content = bytes((len(name),)) + name + body
    return bytes((COMMAND, len(content))) + content


def opening(kind: bytes) -> bytes:
    """Return what one side sends first: version 3.1, no mechanism, and the kind of its socket."""
    signature = b"\xff" + bytes(8) + b"\x7f"
    greeting = signature + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    name = b"Socket-Type"
    return greeting + command(
        b"READY", bytes((len(name),)) + name + struct.pack(">I", len(kind)) + kind
    )


def frame_header(nbytes: int) -> bytes:
    """Return what goes before a message of one part."""
    return bytes((0, nbytes)) if nbytes < 256 else struct.pack(">BQ", LONG, nbytes)
