"""Effects: what the broker's decisions order; `kvd.server.loop` executes them in order.

Effects name descriptors: the broker holds none. They are msgspec structs because each reply is one,
and a struct is made in a tenth of a dataclass's time.
"""

from typing import TypeAlias

import msgspec

from kvd.client_names import Fields
from kvd_proto.layout import RankLayout
from kvd_proto.messages import Message


class DirectoryFd(msgspec.Struct, frozen=True):
    """The read-only descriptor of a namespace's directory.

    With an engine's number two more follow: the namespace's descriptions, if kept, and the pipe
    that signals the engine's READY chunks.
    """

    namespace: bytes
    engine: int | None = None


class LifelineFd(msgspec.Struct, frozen=True):
    """The read end of the lifeline of the lane that serves `device`."""

    device: str


class SessionFds(msgspec.Struct, frozen=True):
    """The descriptors that came with a session's registration, in order."""

    session: int


class NamespaceFds(msgspec.Struct, frozen=True):
    """The read-only descriptors of a namespace's directory and, if kept, its descriptions."""

    namespace: bytes


FdName: TypeAlias = DirectoryFd | LifelineFd | SessionFds | NamespaceFds


class Reply(msgspec.Struct, frozen=True):
    """Answer one request of a session."""

    session: int
    request_id: int
    message: Message


class Notify(msgspec.Struct, frozen=True):
    """Send a notice to a session."""

    session: int
    message: Message
    fd: FdName | None = None


class EndSession(msgspec.Struct, frozen=True):
    """Close a session's connection; its client connects and registers anew.

    reason: for the client.
    """

    session: int
    reason: str


class ToLane(msgspec.Struct, frozen=True):
    """Send a message over a lane's link."""

    device: str
    message: Message
    fd: FdName | None = None


class ToTier(msgspec.Struct, frozen=True):
    """Send a message over the link of a tier's process; `tier` is its index."""

    tier: int
    message: Message
    fd: FdName | None = None


class KillTier(msgspec.Struct, frozen=True):
    """Kill a tier's process; `Tiering.lost` follows when it has ended.

    reason: for the log, after "killed by kvd: ".
    back_off: the process was useless: the next one starts after a pause that grows.
    """

    tier: int
    reason: str
    back_off: bool = False


class StartLane(msgspec.Struct, frozen=True):
    """Start a lane process for `device`, and again whenever it ends, until `DropLane`."""

    device: str


class DropLane(msgspec.Struct, frozen=True):
    """Forget the lane of `device`: its process has ended and no worker needs it."""

    device: str


class KillLane(msgspec.Struct, frozen=True):
    """Kill a lane's process; `LaneSupervisor.lost` follows with this reason."""

    device: str
    reason: str


class OpenPool(msgspec.Struct, frozen=True):
    """Open a pool for an engine; `Registration.pool_opened` or `pool_refused` follows.

    layouts, devices: of the engine's ranks, in order.
    """

    layouts: tuple[RankLayout, ...]
    devices: tuple[str, ...]


class DropFds(msgspec.Struct, frozen=True):
    """Close the descriptors that came with a session's registration."""

    session: int


class ChunksReady(msgspec.Struct, frozen=True):
    """Chunks that an engine stored became READY: wake its scheduler's event loop."""

    engine: int


class DropEngine(msgspec.Struct, frozen=True):
    """The last session of an engine is gone."""

    engine: int


class LogEvent(msgspec.Struct, frozen=True):
    """A line for the log and the list of recent events.

    fields: the identifiers in the text, for programs.
    trace: of an exception, for the log only.
    """

    text: str
    level: str = "info"
    fields: Fields = msgspec.field(default_factory=dict)
    trace: str = ""


Effect: TypeAlias = (
    Reply
    | Notify
    | EndSession
    | ToLane
    | ToTier
    | KillTier
    | StartLane
    | DropLane
    | KillLane
    | OpenPool
    | DropFds
    | ChunksReady
    | DropEngine
    | LogEvent
)
