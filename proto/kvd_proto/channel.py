"""One end of a connection: messages with descriptors over a Unix stream socket.

The broker, its child processes and the client use it; it is the only I/O of this package. Every
call sends and receives in the caller's thread and returns at once. libzmq passes each message
through a thread of its own, which takes longer than the rest of a small job.

The bytes are ZMTP (`kvd_proto.zmtp`): a ZeroMQ library can be the peer as long as no message has
descriptors. Descriptors (SCM_RIGHTS) are sent with the first byte of their message, by a `sendmsg`
of this message's bytes alone. A read ends behind the bytes that descriptors came with, so they
belong to the message of the read's last byte.
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
"""Default bounds of what waits for a peer that does not read."""
_SCM_MAX_FD = 253  # net/scm.h; not in Python's socket
_ANCILLARY_BYTES = socket.CMSG_SPACE(_SCM_MAX_FD * array.array("i").itemsize)
_NOT_NOW = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS})
_TWICE = "descriptors with two parts of one message; send all with the first"

ReceivedFrame = tuple[bytes, tuple[int, ...]]
"""A message and its descriptors, which are the receiver's and close-on-exec."""


class Channel:
    """One end of a connection. Not thread-safe.

    Owns its socket, and the descriptors of messages that wait; those passed to `send` stay the
    caller's.

    Args:
        sock: a connected Unix stream socket; made non-blocking here.
        socket_type: which ZeroMQ socket this end is: `DEALER` connects, `ROUTER` listens.
        max_bytes: of a message that arrives.
        max_unsent_bytes: what may wait to be sent.
        max_unsent_descriptors: what may wait of these.
        takes_descriptors: without, the kernel drops those that come.
        scratch: what reads fill before they copy; channels of one thread may share it.

    Attributes:
        unsent_bytes: how much waits for the peer to read.
        undecoded_bytes: how much has been read and was not returned by `receive`.
        more: messages may wait that polling does not report.
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
        sock.setblocking(False)  # the socket API's own form
        self._sock = sock
        self._decoder = Decoder(max_bytes)
        self._scratch = memoryview(bytearray(READ_BYTES)) if scratch is None else scratch
        self._max_unsent_bytes = max_unsent_bytes
        self._max_unsent_descriptors = max_unsent_descriptors
        # What the socket did not take, with descriptors of its own.
        self._unsent: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._unsent_descriptors = 0
        self.unsent_bytes = 0
        self._buffers = [self._scratch]
        self._takes_descriptors = takes_descriptors
        self._recv_into, self._recvmsg_into = sock.recv_into, sock.recvmsg_into
        self.undecoded_bytes = 0
        # With messages that were not returned: up to which byte of the stream the read went that
        # brought them, the descriptors, and whether some were lost.
        self._with: deque[tuple[int, tuple[int, ...], bool]] = deque()
        self._orphans: tuple[int, ...] = ()
        self._deferred: Exception | None = None
        self.more = False
        with contextlib.suppress(EOFError):  # what the peer has sent can be received all the same
            self._write(opening(socket_type), ())

    def fileno(self) -> int:
        """Return the socket's descriptor, for polling; -1 once closed."""
        return self._sock.fileno()

    @property
    def open(self) -> bool:
        """Whether the peer has greeted."""
        return self._decoder.state is DecoderState.OPEN

    @property
    def wants_write(self) -> bool:
        """Whether something waits to be sent: poll for writability and call `flush`."""
        return bool(self._unsent)

    @property
    def holds_descriptors(self) -> bool:
        """Whether descriptors have come with a message that is not complete."""
        return bool(self._with)

    # ------------------------------------------------------------------- send

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message with descriptors; what the socket does not take now waits.

        Raises:
            ChannelFull: too much waits already; nothing of this one was sent.
            EOFError: the peer is gone; what it has sent can still be received.
        """
        waiting = self._unsent_descriptors + len(fds) if self._unsent and fds else 0
        if self.unsent_bytes > self._max_unsent_bytes or waiting > self._max_unsent_descriptors:
            raise ChannelFull(
                f"{self.unsent_bytes} bytes and {self._unsent_descriptors} descriptors wait for a"
                " peer that does not read"
            )
        self._write(frame_header(len(frame)) + frame, fds)

    def flush(self) -> bool:
        """Send what waits, as far as the socket takes it; return whether nothing waits any more.

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
        """Return how many bytes the socket has taken; descriptors go with the first."""
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
        """Return the next message with its descriptors; None where none has arrived in full.

        Reads the socket once, where no message waits. `more` says afterwards whether another call
        may return a message before the socket is polled again.

        Raises:
            EOFError: the peer has closed its end, or died, and all its messages were returned.
            BadFrame: see `Decoder.next_message`; descriptors that come with no message, or with
                two parts of one.
            DescriptorsLost: this process may open no more files; the message is in the error. Call
                `take_descriptors`; the channel goes on.
        """
        if self.more and ((received := self._next_message()) is not None or self.more):
            return received  # else only commands were decoded
        try:
            if self._takes_descriptors:
                size, ancillary, flags, _ = self._recvmsg_into(
                    self._buffers, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
                if ancillary or flags & socket.MSG_CTRUNC:
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
        self._with.append((end, _descriptors_in(ancillary), bool(flags & socket.MSG_CTRUNC)))
        received = self._decode(size)
        self.more = True
        return received

    def receive_all(self) -> list[ReceivedFrame]:
        """Return every message that has arrived in full.

        Raises as `receive` does; an error that comes behind messages is raised by the next call.
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
        if self._with:
            if decoder.consumed >= self._with[0][0]:
                return self._with_descriptors(frame)
            if frame is None and not decoder.paused and len(self._with) > 1:
                raise BadFrame(_TWICE)
        return None if frame is None else (frame, ())

    def _with_descriptors(self, frame: bytes | None) -> ReceivedFrame:
        if frame is None:
            raise BadFrame("descriptors that came with no message")
        if len(self._with) > 1 and self._decoder.consumed >= self._with[1][0]:
            raise BadFrame(_TWICE)
        _, fds, lost = self._with.popleft()
        if lost:
            self._orphans += fds
            raise DescriptorsLost("no file descriptor is left to receive", frame)
        return frame, fds

    def take_descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that are held, for the caller to close.

        They came with messages that have not arrived in full, which have lost theirs then, or
        are what there was room for of those that a `DescriptorsLost` is about.
        """
        untaken = self._orphans + tuple([fd for _, fds, _ in self._with for fd in fds])
        self._orphans = ()
        self._with = deque([(end, (), True) for end, _, _ in self._with])
        return untaken

    # -------------------------------------------------------------------- end

    def detach(self) -> socket.socket:
        """Return the socket, shut down, for the caller to close; what waits is dropped.

        What the peer has sent and was not read goes when the socket is closed.
        """
        self._drop_unsent()
        with contextlib.suppress(OSError):  # the peer was faster
            self._sock.shutdown(socket.SHUT_RDWR)
        return self._sock

    def close(self) -> None:
        """Close the socket and every descriptor that is held. May be called again."""
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
    """Close descriptors, those already closed included."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def duplicated(fds: Sequence[int]) -> tuple[int, ...]:
    """Return descriptors of the same files.

    Raises:
        OSError: the limit of open files leaves no room; none is left open.
    """
    copies: list[int] = []
    try:
        copies.extend(os.dup(fd) for fd in fds)
    except OSError:
        close_all(copies)
        raise
    return tuple(copies)
