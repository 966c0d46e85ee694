"""A ZeroMQ DEALER's end of one connection to the daemon; its bytes move in the caller's own calls.

libzmq hands each message to a thread of its own, and each answer comes back from there: two more
threads to wake for every job, which takes longer than all else that a small job needs. Here a
call sends what the connection takes, and keeps the rest, within a bound, for the next call. None
waits.

The bytes are those of ZMTP 3.1 (`kvd_proto.zmtp`); libzmq speaks the same.
"""

import socket
from collections import deque

from kvd_proto.codec import MAX_MESSAGE_BYTES
from kvd_proto.zmtp import COMMAND, GREETING_BYTES, LONG, frame_header, opening

READ_BYTES = 64 * 1024
MAX_UNSENT_BYTES = 32 * 2**20
"""Kept for a daemon that does not read, before it is given no more."""
_READY = b"\x05READY"
_OPENING = opening(b"DEALER")


class Dealer:
    """One connection. A new one is made where it is closed.

    Args:
        path: where a lane or the broker listens.

    Attributes:
        open: the other end takes messages; those that are sent before are kept.
        closed: by the other end, or for want of one that listens.

    Raises:
        OSError: no descriptor is free.
    """

    def __init__(self, path: str) -> None:
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        self._socket = socket.socket(socket.AF_UNIX, kind)
        self.closed = False
        self.open = False
        self._greeted = False
        self._arrived = b""  # the beginning of a frame
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        try:
            self._socket.connect(path)
            self._socket.send(_OPENING, socket.MSG_NOSIGNAL)  # a new socket has room for it
        except OSError:  # nobody listens there, or the queue of connections is full
            self.close()

    def fileno(self) -> int:
        """Return the descriptor for polling; -1 where it is closed."""
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether messages wait until others are read."""
        return self.open and bool(self._unsent)

    def send(self, frame: bytes) -> bool:
        """Send a message, or keep it; False where it is closed or too much is kept."""
        if self.closed or self._unsent_bytes > MAX_UNSENT_BYTES:
            return False
        size = len(frame)
        head = frame_header(size)
        sent = self._send(head + frame) if self.open and not self._unsent else 0
        if sent < len(head) + size and not self.closed:
            self._unsent.append(memoryview(head + frame)[sent:])
            self._unsent_bytes += len(head) + size - sent
        return not self.closed

    def receive(self) -> list[bytes]:
        """Return the messages that have arrived; send what was kept, as far as there is room."""
        messages: list[bytes] = []
        while not self.closed:
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.close()
                break
            self._take(data, messages)
            if len(data) < READ_BYTES:
                break
        self._flush()
        return messages

    def close(self) -> None:
        """Close it; what was kept is forgotten. May be called again."""
        self.closed = True
        self.open = False
        self._unsent.clear()
        self._socket.close()

    def _send(self, data: bytes | memoryview) -> int:
        """Send what there is room for; the number of bytes."""
        try:
            return self._socket.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            self.close()
            return 0

    def _flush(self) -> None:
        while self.open and self._unsent:
            part = self._unsent[0]
            sent = self._send(part)
            self._unsent_bytes -= sent
            if sent < len(part):
                if not self.closed:
                    self._unsent[0] = part[sent:]
                return
            self._unsent.popleft()

    def _take(self, data: bytes, messages: list[bytes]) -> None:
        """Add the messages that are whole with this data; close where it is no ZMTP."""
        buffer = self._arrived + data
        at, end = 0, len(buffer)
        if not self._greeted and end >= GREETING_BYTES:
            if buffer[0] != 0xFF or not buffer[9] & 1 or buffer[10] < 3:
                self.close()
                return
            self._greeted = True
            at = GREETING_BYTES
        while self._greeted and end - at >= 2:
            flags, size, start = buffer[at], buffer[at + 1], at + 2
            if flags & LONG:
                size, start = int.from_bytes(buffer[start - 1 : start + 7], "big"), start + 7
            if flags & ~(LONG | COMMAND) or (start <= end and size > MAX_MESSAGE_BYTES):
                self.close()
                return
            if start + size > end:
                break
            if not flags & COMMAND:
                messages.append(buffer[start : start + size])
            elif buffer.startswith(_READY, start):
                self.open = True
            at = start + size
        self._arrived = buffer[at:]

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open" if self.open else "not answered yet"
        return f"<Dealer {state}, {self._unsent_bytes} bytes unsent>"
