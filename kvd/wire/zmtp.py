"""ZMTP 3.1, the bytes of ZeroMQ's sockets, for one connection of a server. No I/O.

libzmq puts a message of several parts together before it hands it over, however
many there are, and has a bound for the part alone: one client could fill the
daemon's memory. Messages of kvd have one part. So here a part that others follow is
skipped as it arrives, and what is kept of a connection is one unfinished frame.

A peer that sends PING gets its PONG; the time to live that it may set with it is not needed:
the end of a Unix socket's peer is seen without. For the same reason this side sends no PING.

Specification: https://rfc.zeromq.org/spec/37/ (ZMTP 3.1, NULL mechanism).
"""

from enum import Enum

from kvd.errors import BadFrame
from kvd_proto.zmtp import COMMAND, GREETING_BYTES, LONG, MORE, command

_MAX_COMMAND_BYTES = 4096
MAX_PARTS = 64
"""Parts of a message that is skipped, before its sender is given up."""
MAX_PINGS = 64
"""PINGs that are taken in before their PONGs have been fetched."""
_PING, _PONG = b"PING", b"PONG"
_TTL_BYTES, _MAX_CONTEXT_BYTES = 2, 16
FRAMES_AT_ONCE = 128
"""Frames that are no message of one part and are looked at in one go."""


class _State(Enum):
    GREETING = "greeting"
    READY = "ready"
    OPEN = "open"


class Incoming:
    """Decoder of what one peer sends, from its first byte on.

    Args:
        max_bytes: of a message.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._at = 0
        self._state = _State.GREETING
        self._skip = 0  # bytes to come of a part that is skipped
        self._parts = 0  # parts of the message that is skipped so far
        self._skipped = 0  # their bytes
        self.dropped = 0
        """Messages of several parts, none of which was kept."""
        self.more = False
        """`take` has not looked at all that is kept: call it again."""
        self.pongs: list[bytes] = []
        """Answers to PINGs; the caller sends and clears them."""

    def __len__(self) -> int:
        """Bytes that are kept."""
        return len(self._buffer) - self._at

    def feed(self, data: bytes | memoryview) -> None:
        """Add bytes that have arrived."""
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        if self._skip:
            passed = min(self._skip, len(data))
            self._skip -= passed
            data = data[passed:]
        self._buffer += data

    def only(self, data: memoryview) -> bytes | None:
        """Return the message that `data` is, and nothing more; None: `feed` it, and `take`.

        So it is as a rule with requests, and then nothing has to be kept.
        """
        if len(self) or self._skip or self._parts or self._state is not _State.OPEN:
            return None
        if self._at:
            self._buffer.clear()
            self._at = 0
        have, flags = len(data), data[0]
        if flags == 0 and have >= 2 and data[1] == have - 2:
            return bytes(data[2:])
        if flags == LONG and have >= 9 and int.from_bytes(data[1:9], "big") == have - 9:
            return bytes(data[9:]) if have - 9 <= self._max_bytes else None
        return None

    def take(self) -> bytes | None:
        """Return the next message; None where it is incomplete, or too much came before it.

        Raises:
            BadFrame: this is no ZMTP, or a message above its bounds; close the connection.
        """
        if self._state is _State.GREETING and not self._greeted():
            return None
        self.more = False
        for _ in range(FRAMES_AT_ONCE):
            if self._skip or len(self.pongs) >= MAX_PINGS:
                return None
            head = self._head()
            if head is None:
                return None
            flags, size, start = head
            buffer = self._buffer
            if flags & COMMAND:
                if not self._command(flags, size, start):
                    return None
            elif self._state is not _State.OPEN or flags & ~(MORE | LONG):
                raise BadFrame(f"a frame with flags 0x{flags:02x} that has no place here")
            elif flags & MORE or self._parts:
                self._pass_over(flags, size, start)
            elif size > self._max_bytes:
                raise BadFrame(
                    f"a message of {size} bytes, the limit is {self._max_bytes}",
                    limit="message_bytes",
                )
            elif len(buffer) - start < size:
                return None
            else:
                self._at = start + size
                return bytes(memoryview(buffer)[start : start + size])
        self.more = True
        return None

    def _head(self) -> tuple[int, int, int] | None:
        """Return flags, size and place of the next frame's body; None where they are to come."""
        buffer, at = self._buffer, self._at
        have = len(buffer) - at
        if have < 2:
            return None
        flags = buffer[at]
        if not flags & LONG:
            return flags, buffer[at + 1], at + 2
        if have < 9:
            return None
        return flags, int.from_bytes(buffer[at + 1 : at + 9], "big"), at + 9

    def _greeted(self) -> bool:
        seen = bytes(self._buffer[:GREETING_BYTES])
        wrong = (seen[:1] not in (b"", b"\xff")) or (len(seen) > 10 and seen[10] < 3)
        whole = len(seen) == GREETING_BYTES
        if wrong or (whole and (not seen[9] & 1 or seen[12:32].rstrip(b"\0") != b"NULL")):
            raise BadFrame("no greeting of ZMTP 3 without a mechanism")
        if whole:
            self._at += GREETING_BYTES
            self._state = _State.READY
        return whole

    def _command(self, flags: int, size: int, start: int) -> bool:
        """Take a command in; return False where it has not arrived in full."""
        if size > _MAX_COMMAND_BYTES or flags & MORE:
            raise BadFrame(f"a command of {size} bytes, flags 0x{flags:02x}")
        if len(self._buffer) - start < size:
            return False
        if self._state is _State.READY:
            if self._buffer[start : start + 6] != b"\x05READY":
                raise BadFrame("the first command is not READY")
            self._state = _State.OPEN
        elif self._buffer[start : start + 5] == b"\x04" + _PING:
            self._ping(bytes(self._buffer[start + 5 : start + size]))
        self._at = start + size
        return True

    def _ping(self, body: bytes) -> None:
        if not _TTL_BYTES <= len(body) <= _TTL_BYTES + _MAX_CONTEXT_BYTES:
            raise BadFrame(f"a PING with {len(body)} bytes, it has 2 to 18")
        self.pongs.append(command(_PONG, body[_TTL_BYTES:]))

    def _pass_over(self, flags: int, size: int, start: int) -> None:
        """Skip a part of a message that has several."""
        self._parts += 1
        self._skipped += size
        if self._parts > MAX_PARTS or self._skipped > self._max_bytes:
            raise BadFrame(
                f"a message of {self._parts} parts, {self._skipped} bytes, and no end; one part is"
                " needed",
                limit="message_parts",
            )
        here = min(size, len(self._buffer) - start)
        self._at = start + here
        self._skip = size - here
        if not flags & MORE:
            self._parts = self._skipped = 0
            self.dropped += 1

    def __repr__(self) -> str:
        return f"<Incoming {self._state.value}, {len(self)} bytes kept>"
