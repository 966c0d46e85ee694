"""Errors of the protocol package."""


class ProtoError(Exception):
    """Base of everything that kvd_proto raises."""


class DecodeError(ProtoError):
    """The other side sent something that is not the protocol."""


class BadHeader(DecodeError):
    """Too short, or wrong magic: not even a request id can be read."""


class VersionMismatch(DecodeError):
    """The message is of a protocol version that this side does not have."""


class Malformed(DecodeError):
    """No message has this tag, or the body is not its fields; the text names the fault."""


class WrongType(DecodeError):
    """Numbers that an array of their type cannot hold."""


class Oversize(DecodeError):
    """A message, array, string or map is above its limit."""


class LayoutError(ProtoError):
    """A KV layout that cannot be served."""


class LayoutMismatch(LayoutError):
    """Ranks of one engine disagree about what they must share."""


class SizeError(LayoutError):
    """Sizes that hold nothing, or that cannot be read."""


class JobShapeError(LayoutError):
    """A job whose arrays do not fit each other or the layout."""


class DirectoryError(ProtoError):
    """A buffer that is not a chunk directory of this version."""
