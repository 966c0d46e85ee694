"""One end of a connection: messages with descriptors over a Unix stream socket.

Used by the broker, its child processes and the client; the only sockets of this package. Every call
sends and receives in the caller's thread and never blocks. libzmq would pass each message through
a thread of its own, which takes longer than the rest of a small job.

The bytes are ZMTP (`kvd_proto.zmtp`): the peer may use a ZeroMQ library as long as no message has
descriptors. Descriptors (SCM_RIGHTS) are sent with the first byte of their message, by a `sendmsg`
of this message's bytes alone. The kernel ends a read after the bytes that descriptors came with, so
received descriptors belong to the message that contains the read's last byte.
"""

import array
import contextlib
import errno
import os
import socket
from collections import deque
from collections.abc import Sequence

from kvd_proto.errors import BadFrame, ChannelFull, DescriptorsLost
from kvd_proto.zmtp import MAX_MESSAGE_BYTES, Decoder, DecoderState, frame_header, opening

READ_BYTES = 64 * 1024
MAX_UNSENT_BYTES = 32 * 2**20
MAX_UNSENT_DESCRIPTORS = 2**14
"""Default bounds of the queue of unsent messages."""
_SCM_MAX_FD = 253  # net/scm.h; not in Python's socket
_ANCILLARY_BYTES = socket.CMSG_SPACE(_SCM_MAX_FD * array.array("i").itemsize)
_TRUNCATED = int(socket.MSG_CTRUNC)  # & of an enum takes microseconds
_NOT_NOW = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS})
_SPLIT_DESCRIPTORS = "descriptors with two parts of one message; send all with the first byte"

ReceivedFrame = tuple[bytes, tuple[int, ...]]
"""A message and its descriptors; the receiver closes them. They are close-on-exec."""


class Channel:
    """One end of a connection. Not thread-safe.

    Owns its socket and duplicates of queued messages' descriptors; the caller keeps the descriptors
    passed to `send`.

    Args:
        sock: a connected Unix stream socket; becomes non-blocking.
        socket_type: the ZeroMQ socket type of this end: `DEALER` connects, `ROUTER` listens.
        max_bytes: the longest message to receive.
        max_unsent_bytes: above it `send` raises `ChannelFull`.
        max_unsent_descriptors: the same for descriptors.
        takes_descriptors: False: the kernel drops received descriptors.
        scratch: the buffer for reads; channels of one thread may share it.

    Attributes:
        unsent_bytes: bytes queued until the peer reads.
        undecoded_bytes: bytes read and not yet returned by `receive`.
        more: `receive` may have messages although polling reports none.
    """

    def __init__(
        self,
        sock: socket.socket,
        socket_type: bytes = b"DEALER",
        *,
        max_bytes: int = MAX_MESSAGE_BYTES,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
        max_unsent_descriptors: int = MAX_UNSENT_DESCRIPTORS,
        takes_descriptors: bool = True,
        scratch: memoryview | None = None,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = Decoder(max_bytes)
        self._scratch = memoryview(bytearray(READ_BYTES)) if scratch is None else scratch
        self._max_unsent_bytes = max_unsent_bytes
        self._max_unsent_descriptors = max_unsent_descriptors
        # Bytes that the socket did not take, with duplicates of their descriptors.
        self._unsent: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._unsent_descriptors = 0
        self.unsent_bytes = 0
        self._buffers = [self._scratch]
        self._takes_descriptors = takes_descriptors
        self._recv_into, self._recvmsg_into = sock.recv_into, sock.recvmsg_into
        self.undecoded_bytes = 0
        # Descriptors of messages not returned yet: the stream position where their read ended,
        # the descriptors, and whether the kernel dropped some.
        self._received_fds: deque[tuple[int, tuple[int, ...], bool]] = deque()
        self._orphans: tuple[int, ...] = ()  # their message's other descriptors were lost
        self._deferred: Exception | None = None  # for the next `receive_all` to raise
        self.more = False
        with contextlib.suppress(EOFError):  # the peer's messages can still be received
            self._write(opening(socket_type), ())

    def fileno(self) -> int:
        """Return the socket's descriptor, for polling; -1 once closed."""
        return self._sock.fileno()

    @property
    def open(self) -> bool:
        """Whether the peer has completed the handshake."""
        return self._decoder.state is DecoderState.OPEN

    @property
    def wants_write(self) -> bool:
        """Whether unsent bytes are queued: poll for writability and call `flush`."""
        return bool(self._unsent)

    @property
    def num_descriptors(self) -> int:
        """The number of received descriptors whose message is not returned yet."""
        return sum(len(fds) for _, fds, _ in self._received_fds)

    # ------------------------------------------------------------------- send

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message with descriptors; bytes that the socket does not take are queued.

        Raises:
            ChannelFull: the queue is full; nothing of this message was sent.
            OSError: the limit of open files leaves no room to queue the descriptors.
            EOFError: the peer is gone; its messages can still be received.
        """
        num_queued = self._unsent_descriptors + len(fds) if self._unsent and fds else 0
        if self.unsent_bytes > self._max_unsent_bytes or num_queued > self._max_unsent_descriptors:
            raise ChannelFull(
                f"{self.unsent_bytes} bytes and {self._unsent_descriptors} descriptors wait for a"
                " peer that does not read"
            )
        self._write(frame_header(len(frame)) + frame, fds)

    def flush(self) -> bool:
        """Send queued bytes as far as the socket takes them; return whether the queue is empty.

        Raises:
            EOFError: the peer is gone.
        """
        while self._unsent:
            data, fds = self._unsent[0]
            sent = self._write_now(data, fds)
            if not sent:
                return False
            self.unsent_bytes -= sent
            self._unsent_descriptors -= len(fds)
            close_all(fds)
            if sent < len(data):
                self._unsent[0] = data[sent:], ()
                return False
            self._unsent.popleft()
        return True

    def _write(self, data: bytes, fds: Sequence[int]) -> None:
        sent = 0 if self._unsent else self._write_now(data, fds)
        if sent < len(data):
            copies = () if sent else duplicated(fds)
            self._unsent.append((memoryview(data)[sent:], copies))
            self._unsent_descriptors += len(copies)
            self.unsent_bytes += len(data) - sent

    def _write_now(self, data: bytes | memoryview, fds: Sequence[int]) -> int:
        """Return how many bytes the socket took; descriptors are sent with the first byte."""
        try:
            if fds:
                return socket.send_fds(self._sock, [data], list(fds), socket.MSG_NOSIGNAL)
            return self._sock.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except ConnectionError as error:
            self._drop_unsent()
            raise EOFError("the peer is gone") from error
        except OSError as error:
            if error.errno in _NOT_NOW:
                return 0
            raise

    # ---------------------------------------------------------------- receive

    def receive(self) -> ReceivedFrame | None:
        """Return the next message with its descriptors; None if none is complete.

        Reads the socket once if no message is buffered. Afterwards `more` says whether another call
        may return a message without polling the socket.

        Raises:
            EOFError: the peer closed its end, or died, and all its messages were returned.
            BadFrame: see `Decoder.next_message`; or descriptors came without a message, or with
                two parts of one.
            DescriptorsLost: this process reached its limit of open files; the error has the
                message. Call `take_descriptors`; the channel stays usable.
        """
        if self.more and ((received := self._next_message()) is not None or self.more):
            return received  # otherwise only commands were decoded: read on
        try:
            if self._takes_descriptors:
                size, ancillary, flags, _ = self._recvmsg_into(
                    self._buffers, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
                if ancillary or flags & _TRUNCATED:
                    return self._receive_with_descriptors(size, ancillary, flags)
            else:
                size = self._recv_into(self._scratch)
        except BlockingIOError:
            return None
        except ConnectionError as error:
            raise EOFError("the peer is gone") from error
        if not size:
            raise EOFError("the peer has closed its end")
        frame = self._decoder.only_message(self._scratch, size)
        if frame is not None:
            return frame, ()
        return self._decode(size)

    def _decode(self, size: int) -> ReceivedFrame | None:
        self._decoder.feed(self._scratch[:size])
        received = self._next_message()
        self.more |= size == len(self._scratch)
        return received

    def _receive_with_descriptors(
        self, size: int, ancillary: list[tuple[int, int, bytes]], flags: int
    ) -> ReceivedFrame | None:
        end = self._decoder.consumed + self.undecoded_bytes + size
        truncated = bool(flags & _TRUNCATED)
        self._received_fds.append((end, _descriptors_in(ancillary), truncated))
        received = self._decode(size)
        self.more = True
        return received

    def receive_all(self) -> list[ReceivedFrame]:
        """Return every complete message.

        Raises as `receive` does; an error after some messages is raised by the next call.
        """
        messages: list[ReceivedFrame] = []
        if (deferred := self._deferred) is not None:
            self._deferred = None
            raise deferred
        while True:
            try:
                received = self.receive()
            except (EOFError, BadFrame, DescriptorsLost) as error:
                if not messages:
                    raise
                self._deferred = error
                return messages
            if received is not None:
                messages.append(received)
            if not self.more:
                return messages

    def _next_message(self) -> ReceivedFrame | None:
        decoder = self._decoder
        frame = decoder.next_message()
        pongs = decoder.take_pongs()
        if pongs:
            with contextlib.suppress(EOFError):
                self._write(pongs, ())
        self.undecoded_bytes = len(decoder)
        self.more = decoder.paused or (frame is not None and self.undecoded_bytes > 0)
        if self._received_fds:
            if decoder.consumed >= self._received_fds[0][0]:
                return self._with_descriptors(frame)
            if frame is None and not decoder.paused and len(self._received_fds) > 1:
                raise BadFrame(_SPLIT_DESCRIPTORS)
        return None if frame is None else (frame, ())

    def _with_descriptors(self, frame: bytes | None) -> ReceivedFrame:
        if frame is None:
            raise BadFrame("descriptors without a message")
        if len(self._received_fds) > 1 and self._decoder.consumed >= self._received_fds[1][0]:
            raise BadFrame(_SPLIT_DESCRIPTORS)
        _, fds, truncated = self._received_fds.popleft()
        if truncated:
            self._orphans += fds
            raise DescriptorsLost("no file descriptor is left to receive", frame)
        return frame, fds

    def take_descriptors(self) -> tuple[int, ...]:
        """Return all descriptors held here, for the caller to close.

        They belong to incomplete messages, for which `receive` then raises `DescriptorsLost`, or
        are those that the kernel could deliver before a `DescriptorsLost`.
        """
        fds = self._orphans + tuple([fd for _, fds, _ in self._received_fds for fd in fds])
        self._orphans = ()
        self._received_fds = deque([(end, (), True) for end, _, _ in self._received_fds])
        return fds

    # -------------------------------------------------------------------- end

    def detach(self) -> socket.socket:
        """Return the socket, shut down, for the caller to close; unsent messages are dropped.

        Closing the socket drops bytes of the peer that were not read.
        """
        self._drop_unsent()
        with contextlib.suppress(OSError):  # the peer closed first
            self._sock.shutdown(socket.SHUT_RDWR)
        return self._sock

    def close(self) -> None:
        """Close the socket and every descriptor held here. May be called again."""
        self._drop_unsent()
        close_all(self.take_descriptors())
        self._sock.close()

    def _drop_unsent(self) -> None:
        for _, fds in self._unsent:
            close_all(fds)
        self._unsent.clear()
        self.unsent_bytes = self._unsent_descriptors = 0


def _descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, ...]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return tuple(fds)


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors; errors are ignored."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def duplicated(fds: Sequence[int]) -> tuple[int, ...]:
    """Return duplicates of descriptors.

    Raises:
        OSError: this process reached its limit of open files; no duplicate stays open.
    """
    copies: list[int] = []
    try:
        copies.extend(os.dup(fd) for fd in fds)
    except OSError:
        close_all(copies)
        raise
    return tuple(copies)
