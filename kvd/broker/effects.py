"""What the broker's decisions ask the outside to do.

The core returns lists of these; `kvd.daemon.loop` carries them out in order.
Descriptors are named, not held: the core has no file descriptors.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

from kvd.client_names import Fields
from kvd_proto.layout import RankLayout
from kvd_proto.messages import Message


@dataclass(frozen=True, slots=True)
class DirectoryFd:
    """The read-only descriptor of a namespace's directory.

    With an engine's number also that of the pipe that tells of its READY chunks.
    """

    namespace: bytes
    engine: int | None = None


@dataclass(frozen=True, slots=True)
class LifelineFd:
    """The read end of the lifeline of the lane that serves `device`."""

    device: str


@dataclass(frozen=True, slots=True)
class SessionFds:
    """All descriptors that a session has sent over the control socket, in order."""

    session: int


FdName: TypeAlias = DirectoryFd | LifelineFd | SessionFds


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer one request of a session."""

    session: int
    request_id: int
    message: Message


@dataclass(frozen=True, slots=True)
class Notify:
    """Send a notice over a session's control socket."""

    session: int
    message: Message
    fd: FdName | None = None


@dataclass(frozen=True, slots=True)
class ToLane:
    """Send a message over a lane's link."""

    device: str
    message: Message
    fd: FdName | None = None


@dataclass(frozen=True, slots=True)
class StartLane:
    """Start a lane process for `device`, and again whenever it ends, until `DropLane`."""

    device: str


@dataclass(frozen=True, slots=True)
class DropLane:
    """Nobody needs the lane of `device`, whose process has ended."""

    device: str


@dataclass(frozen=True, slots=True)
class KillLane:
    """End a lane process; its end is reported back as lost."""

    device: str


@dataclass(frozen=True, slots=True)
class OpenPool:
    """Open a pool for an engine of these ranks; `pool_opened` or `pool_refused` follows."""

    layouts: tuple[RankLayout, ...]


@dataclass(frozen=True, slots=True)
class DropFds:
    """Close the descriptors that a session has sent."""

    session: int


@dataclass(frozen=True, slots=True)
class ChunksReady:
    """Chunks that an engine stored became READY: wake its scheduler's event loop."""

    engine: int


@dataclass(frozen=True, slots=True)
class DropEngine:
    """The last session of an engine is gone."""

    engine: int


@dataclass(frozen=True, slots=True)
class Event:
    """Something worth a line in the log and a place in the list of recent events.

    fields: identifiers in the text, for programs.
    """

    text: str
    level: str = "info"
    fields: Fields = field(default_factory=dict)


Effect: TypeAlias = (
    Reply
    | Notify
    | ToLane
    | StartLane
    | DropLane
    | KillLane
    | OpenPool
    | DropFds
    | ChunksReady
    | DropEngine
    | Event
)
