"""ZMTP 3.1, the wire format of ZeroMQ's sockets, for either end of one connection. No I/O.

Both ends send `opening` at once. Feed received bytes to a `Decoder`, which returns messages::

    GREETING ──64 bytes──▶ HANDSHAKE ──READY──▶ OPEN ──▶ messages, PING

Any other input raises `BadFrame`: close the connection. A message has one part; libzmq assembles
messages of many parts without a bound, here such a message is a `BadFrame`.

The decoder answers each PING with a PONG. This side sends no PING and ignores a PING's time to
live: the kernel reports the end of a Unix socket's peer.

Specification: https://rfc.zeromq.org/spec/37/ (ZMTP 3.1, NULL mechanism).
"""

import struct
from enum import Enum

from kvd_proto.errors import BadFrame

MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame: more frames follow, its size has eight bytes, it is a command."""
GREETING_BYTES = 64
MAX_MESSAGE_BYTES = 16 * 2**20
MAX_COMMAND_BYTES = 4096
MAX_COMMANDS = 64
"""Commands decoded in one call at most: a flood of short commands must not block the caller."""
_LARGE_BYTES = 64 * 1024
_READY, _PING = b"\x05READY", b"\x04PING"
_TTL_BYTES, _MAX_CONTEXT_BYTES = 2, 16


def command(name: bytes, body: bytes) -> bytes:
    """Return a short command as a frame."""
    content = bytes((len(name),)) + name + body
    return bytes((COMMAND, len(content))) + content


def opening(socket_type: bytes) -> bytes:
    """Return the first bytes of one end: greeting and READY, for a `DEALER` or a `ROUTER`."""
    signature = b"\xff" + bytes(8) + b"\x7f"
    greeting = signature + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    name = b"Socket-Type"
    metadata = bytes((len(name),)) + name + struct.pack(">I", len(socket_type)) + socket_type
    return greeting + command(b"READY", metadata)


_SHORT_HEADERS = [bytes((0, nbytes)) for nbytes in range(256)]
_pack_long_header = struct.Struct(">BQ").pack


def frame_header(nbytes: int) -> bytes:
    """Return the frame header of a message of `nbytes` bytes."""
    return _SHORT_HEADERS[nbytes] if nbytes < 256 else _pack_long_header(LONG, nbytes)


class DecoderState(Enum):
    """The states of a connection."""

    GREETING = "greeting"
    HANDSHAKE = "handshake"
    OPEN = "open"


class Decoder:
    """Decodes one peer's stream of bytes, from its first byte on.

    Args:
        max_bytes: the longest message allowed.

    Attributes:
        state: of the connection.
        consumed: bytes decoded since the connection began.
        paused: `next_message` stopped before the end of the bytes fed so far; call it again.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._start = 0  # of the bytes not decoded yet
        self._pongs: list[bytes] = []
        self.state = DecoderState.GREETING
        self.consumed = 0
        self.paused = False

    def __len__(self) -> int:
        """Return the number of bytes fed and not decoded yet."""
        return len(self._buffer) - self._start

    def feed(self, data: bytes | memoryview) -> None:
        """Add received bytes."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += data

    def only_message(self, buffer: memoryview, size: int) -> bytes | None:
        """Return the message if the first `size` bytes are exactly one; None: `feed` them.

        The common case: one read, one message, nothing buffered.
        """
        if self._buffer or self.state is not DecoderState.OPEN:
            return None
        flags = buffer[0]
        if flags == 0 and size >= 2 and buffer[1] == size - 2:
            body = 2
        elif flags == LONG and size >= 9 and int.from_bytes(buffer[1:9], "big") == size - 9:
            body = 9
        else:
            return None
        if size - body > self._max_bytes:
            return None
        self.consumed += size
        return buffer[body:size].tobytes()

    def next_message(self) -> bytes | None:
        """Return the next message; None if it is incomplete.

        Also None after `MAX_COMMANDS` commands; then `paused` is set, and the next call continues.

        Raises:
            BadFrame: the bytes are no ZMTP, or a message is too long.
        """
        if self.state is DecoderState.GREETING and not self._decode_greeting():
            return None
        self.paused = False
        for _ in range(MAX_COMMANDS):
            buffer, start = self._buffer, self._start
            available = len(buffer) - start
            if available < 2:
                return None
            flags, size, body = buffer[start], buffer[start + 1], start + 2
            if flags & LONG:
                if available < 9:
                    return None
                size, body = int.from_bytes(buffer[start + 1 : start + 9], "big"), start + 9
            end = body + size
            if flags & COMMAND:
                if size > MAX_COMMAND_BYTES or flags & MORE:
                    raise BadFrame(f"a command of {size} bytes, flags 0x{flags:02x}")
                if end > len(buffer):
                    return None
                self._decode_command(body, end)
                self._consume(end)
                continue
            self._check_message(flags, size)
            if end > len(buffer):
                return None
            message = bytes(memoryview(buffer)[body:end])
            self._consume(end)
            return message
        self.paused = True
        return None

    def take_pongs(self) -> bytes:
        """Return the PONGs to send for the PINGs decoded since the last call."""
        if not self._pongs:
            return b""
        pongs = b"".join(self._pongs)
        self._pongs.clear()
        return pongs

    def _consume(self, end: int) -> None:
        self.consumed += end - self._start
        self._start = end
        if end == len(self._buffer) or (end > _LARGE_BYTES and 2 * end > len(self._buffer)):
            self._buffer, self._start = self._buffer[end:], 0  # frees a large buffer

    def _decode_greeting(self) -> bool:
        greeting = bytes(self._buffer[:GREETING_BYTES])
        complete = len(greeting) == GREETING_BYTES
        if (
            greeting[:1] not in {b"", b"\xff"}
            or (len(greeting) > 10 and greeting[10] < 3)
            or (complete and (not greeting[9] & 1 or greeting[12:32].rstrip(b"\0") != b"NULL"))
        ):
            raise BadFrame("no greeting of ZMTP 3 without a mechanism")
        if complete:
            self._consume(GREETING_BYTES)
            self.state = DecoderState.HANDSHAKE
        return complete

    def _check_message(self, flags: int, size: int) -> None:
        if self.state is not DecoderState.OPEN or flags & ~(MORE | LONG):
            raise BadFrame(f"unexpected frame with flags 0x{flags:02x}")
        if flags & MORE:
            raise BadFrame(
                "a message of several parts; send one part, from a DEALER, without an empty frame",
                limit="message_parts",
            )
        if size > self._max_bytes:
            raise BadFrame(
                f"a message of {size} bytes, the limit is {self._max_bytes}",
                limit="message_bytes",
            )

    def _decode_command(self, body: int, end: int) -> None:
        buffer = self._buffer
        if self.state is DecoderState.HANDSHAKE:
            if not buffer.startswith(_READY, body):
                raise BadFrame("the first command is not READY")
            self.state = DecoderState.OPEN
        elif buffer.startswith(_PING, body):
            content = bytes(buffer[body + len(_PING) : end])
            if not _TTL_BYTES <= len(content) <= _TTL_BYTES + _MAX_CONTEXT_BYTES:
                raise BadFrame(f"a PING with {len(content)} bytes, it has 2 to 18")
            self._pongs.append(command(b"PONG", content[_TTL_BYTES:]))
