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
    """Base of every error that kvd_proto raises."""


class DecodeError(ProtoError):
    """Received bytes are no message of the protocol; the text names the fault."""


class VersionMismatch(DecodeError):
    """A message has a protocol version that this side does not speak."""


class WrongType(ProtoError):
    """Values that do not fit the array's integer type."""


class Oversize(ProtoError):
    """A message or an array to be sent is above its limit."""


class LayoutError(ProtoError):
    """A KV layout that cannot be served."""


class SizeError(LayoutError):
    """A size or duration that is out of range or cannot be read.

    `suggestion` is the size that half a unit, such as 64Gi, stands for; otherwise empty.
    """

    def __init__(self, text: str, suggestion: str = "") -> None:
        super().__init__(f"{text}; did you mean {suggestion}?" if suggestion else text)
        self.suggestion = suggestion


class JobShapeError(LayoutError):
    """A job whose arrays do not fit each other or the layout."""


class DirectoryError(ProtoError):
    """A buffer is no directory of this version, or a directory's figures are out of range."""


class DescriptionError(ProtoError):
    """A chunk's description contradicts itself, or bytes are no description."""


class BadFrame(ProtoError):
    """A peer sent bytes that are no ZMTP, or exceeded a bound, which `limit` names."""

    def __init__(self, text: str, limit: str = "") -> None:
        super().__init__(text)
        self.limit = limit


class ChannelFull(ProtoError):
    """The queue of unsent messages is full: the peer does not read."""


class DescriptorsLost(ProtoError):
    """A message's descriptors exceeded this process's limit of open files.

    `frame` is the message.
    """

    def __init__(self, text: str, frame: bytes) -> None:
        super().__init__(text)
        self.frame = frame
