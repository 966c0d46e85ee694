"""Encodes messages to bytes and decodes them. No I/O.

A message is one frame: a header of 16 bytes (docs/protocol.md) and a msgpack map of fields. The
header has a fixed shape so that a request whose body cannot be decoded still gets a reply by its
id.
"""

import struct
from collections.abc import Mapping

import msgspec

from kvd_proto import zmtp
from kvd_proto.errors import DecodeError, Oversize, VersionMismatch
from kvd_proto.messages import PROTOCOL_VERSION, REPLY_OF, TAGS, Message, Register

MAGIC = b"kvd\x00"
MAX_MESSAGE_BYTES = zmtp.MAX_MESSAGE_BYTES
MAX_REGISTER_BYTES = 2**20
_HEADER = struct.Struct("<4sHHQ")
HEADER_BYTES = _HEADER.size


class Header(msgspec.Struct, frozen=True):
    """The fixed part of a message."""

    tag: int
    request_id: int
    version: int = PROTOCOL_VERSION


class Codec:
    """Encodes and decodes the messages of one tag table.

    Args:
        tags: tag → message type, such as `messages.TAGS`.
    """

    def __init__(self, tags: Mapping[int, type[Message]]) -> None:
        self._decoders = {tag: msgspec.msgpack.Decoder(kind) for tag, kind in tags.items()}
        self._tags = {kind: tag for tag, kind in tags.items()}

    def encode(self, message: Message, request_id: int = 0) -> bytes:
        """Return the frame of `message`.

        Raises:
            Oversize: the frame is longer than `MAX_MESSAGE_BYTES`.
        """
        header = _HEADER.pack(MAGIC, PROTOCOL_VERSION, self._tags[type(message)], request_id)
        frame: bytes = header + msgspec.msgpack.encode(message)
        if len(frame) > MAX_MESSAGE_BYTES:
            raise Oversize(
                f"{type(message).__name__} of {len(frame)} bytes, the limit is {MAX_MESSAGE_BYTES}"
            )
        return frame

    def decode_header(self, frame: bytes) -> Header:
        """Return the header of `frame`; neither body nor version are checked.

        Raises:
            DecodeError: `frame` is too short, or no kvd message.
        """
        if len(frame) < HEADER_BYTES:
            raise DecodeError(f"{len(frame)} bytes, a header has {HEADER_BYTES}")
        magic, version, tag, request_id = _HEADER.unpack_from(frame)
        if magic != MAGIC:
            raise DecodeError(f"magic {magic!r}, expected {MAGIC!r}")
        return Header(tag, request_id, version)

    def decode(self, frame: bytes) -> tuple[Header, Message]:
        """Return header and message of `frame`, validated; raises as the two calls inside do."""
        header = self.decode_header(frame)
        return header, self.decode_body(header, frame)

    def decode_body(self, header: Header, frame: bytes) -> Message:
        """Return the message of `frame`, validated, given its header.

        Raises:
            VersionMismatch: the frame has another protocol version.
            DecodeError: the tag or the body is invalid, or the frame too long.
        """
        if header.version != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"the other side speaks protocol version {header.version}, this side"
                f" {PROTOCOL_VERSION}; install the same version of kvd on both"
            )
        decoder = self._decoders.get(header.tag)
        if decoder is None:
            raise DecodeError(f"tag 0x{header.tag:02x} names no message here")
        name = decoder.type.__name__
        limit = MAX_REGISTER_BYTES if decoder.type is Register else MAX_MESSAGE_BYTES
        if len(frame) > limit:
            raise DecodeError(f"a {name} of {len(frame)} bytes, the limit is {limit}")
        try:
            return decoder.decode(memoryview(frame)[HEADER_BYTES:])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(f"{name}: {error}") from error


WIRE = Codec(TAGS)
"""The codec of the wire between clients and daemon."""

REQUESTS = Codec({tag: kind for tag, kind in TAGS.items() if kind in REPLY_OF})
"""The codec for what the daemon receives: requests only. Their fields have declared types, which
bounds the work of decoding; a StatusReport can hold any tree and take seconds to decode."""
