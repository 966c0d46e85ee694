"""Encodes messages to bytes and decodes them. No I/O.

A message is one frame: a header of 16 bytes (docs/protocol.md) and a msgpack map of fields. The
header has a fixed shape so that a request whose body cannot be decoded still gets a reply by its
id.

Errors are sent and logged, and a broken client may put a key anywhere. So their texts hold names of
the protocol and numbers, but no name, text or bytes that the sender chose.
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
_SAFE_FAULTS = ("Expected ", "Object missing required field ", "Input data was truncated")
"""Begins of msgspec's errors that name types, bounds and declared fields only."""
_REQUEST_ID_AT = HEADER_BYTES - 8  # it is the header's last field


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
            raise DecodeError(f"no message of kvd: it does not begin with {MAGIC!r}")
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
            # The cause would show in a traceback.
            raise DecodeError(f"{name}: {_fault(error)}") from None


def _fault(error: Exception) -> str:
    """Return why a body cannot be decoded, from msgspec's or a message's own error.

    msgspec repeats unknown fields and values. Of these errors the text has the value's place, which
    follows the value; the place of an unknown field is left out, because at the top there is none,
    and the name may look like one.
    """
    text = str(error)
    if error.__cause__ is not None or text.startswith(_SAFE_FAULTS):
        return text
    if text.startswith(("Invalid enum value", "Invalid value")):
        return f"unknown value - at {text.rpartition(' - at ')[2]}"
    if text.startswith("Object contains unknown field"):
        return "Object contains unknown field"
    return "malformed MessagePack" if isinstance(error, msgspec.DecodeError) else "malformed text"


def with_request_id(frame: bytes, request_id: int) -> bytes:
    """Return a frame's copy under another request id: one encoded reply for several requests."""
    return b"".join(
        (frame[:_REQUEST_ID_AT], request_id.to_bytes(8, "little"), frame[HEADER_BYTES:])
    )


WIRE = Codec(TAGS)
"""The codec of the wire between clients and daemon."""

REQUESTS = Codec({tag: kind for tag, kind in TAGS.items() if kind in REPLY_OF})
"""The codec for what the daemon receives: requests only. Their fields have declared types, which
bounds the work of decoding; a StatusReport can hold any tree and take seconds to decode."""
