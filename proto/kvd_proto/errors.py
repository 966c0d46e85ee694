"""Errors of the protocol package.

::

    ProtoError
    ├── IllegalTransition         an event that the state machine does not allow
    ├── DecodeError               the other side sent something that is not the protocol
    │   ├── BadHeader             too short, wrong magic: not even a request id can be read
    │   ├── VersionMismatch       a protocol version that is not spoken here
    │   ├── Malformed             not msgpack, or not the fields of a message
    │   ├── WrongType             numbers that an array cannot hold
    │   └── Oversize              a message, array, string or map above its limit
    ├── LayoutError               a KV layout that cannot be served
    │   ├── LayoutMismatch        ranks of one engine that disagree
    │   ├── SizeError             sizes that hold nothing, or that are unreadable
    │   └── JobShapeError         a job whose arrays do not fit each other or the layout
    ├── DurationError             text that is no duration
    └── DirectoryError            a buffer that is not a directory of this version
"""


class ProtoError(Exception):
    """Base of everything that kvd_proto raises."""


class IllegalTransition(ProtoError):
    """The state machine does not allow this event now; its state is unchanged."""


class DecodeError(ProtoError):
    """Bytes from the other side are not a message of this protocol."""


class BadHeader(DecodeError):
    """The header cannot be read; no request id is known."""


class VersionMismatch(DecodeError):
    """The message speaks a protocol version that is not spoken here."""


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
    """Sizes that make no pool."""


class JobShapeError(LayoutError):
    """A job whose arrays do not fit each other or the layout."""


class DurationError(ProtoError):
    """Text that is no duration."""


class DirectoryError(ProtoError):
    """A buffer that is not a chunk directory of this version."""
