"""Errors of the protocol package.

::

    ProtoError
    ├── DecodeError
    │   └── VersionMismatch
    ├── WrongType
    ├── Oversize
    ├── LayoutError
    │   ├── SizeError
    │   └── JobShapeError
    ├── DirectoryError
    ├── DescriptionError
    ├── BadFrame
    ├── ChannelFull
    └── DescriptorsLost
"""


class ProtoError(Exception):
    """Base of everything that kvd_proto raises."""


class DecodeError(ProtoError):
    """The other side sent something that is not the protocol; the text names the fault."""


class VersionMismatch(DecodeError):
    """The message is of a protocol version that this side does not have."""


class WrongType(ProtoError):
    """Numbers that an array of their type cannot hold."""


class Oversize(ProtoError):
    """A message or an array that is to be sent is above its limit."""


class LayoutError(ProtoError):
    """A KV layout that cannot be served."""


class SizeError(LayoutError):
    """Sizes that hold nothing; sizes and durations that cannot be read.

    `meant` is the size that a text with half a unit, such as 64Gi, stands for; else empty.
    """

    def __init__(self, text: str, meant: str = "") -> None:
        super().__init__(f"{text}; did you mean {meant}?" if meant else text)
        self.meant = meant


class JobShapeError(LayoutError):
    """A job whose arrays do not fit each other or the layout."""


class DirectoryError(ProtoError):
    """A buffer that is not a chunk directory of this version."""


class DescriptionError(ProtoError):
    """What is to describe a chunk contradicts itself, or bytes that are no description."""


class BadFrame(ProtoError):
    """A peer speaks no ZMTP, or goes above a bound, which `limit` names."""

    def __init__(self, text: str, limit: str = "") -> None:
        super().__init__(text)
        self.limit = limit


class ChannelFull(ProtoError):
    """What waits to be sent is above its bound: the peer does not read."""


class DescriptorsLost(ProtoError):
    """This process's limit of open files left no room for a message's descriptors.

    `frame` is the message.
    """

    def __init__(self, text: str, frame: bytes) -> None:
        super().__init__(text)
        self.frame = frame
