"""How a client's process is named: in one way in logs, events and errors, of broker and lanes.

People read ``engine llama-70b rank 3 (pid 41)``; programs get the same as the
fields engine, rank, session and pid of a line of JSON. A lane's job is
``store 17 of engine llama-70b rank 3 (pid 41)``, with the field job.
"""

from dataclasses import dataclass
from typing import TypeAlias

Fields: TypeAlias = dict[str, str | int]
"""Identifiers of an event for programs: see docs/operations.md (The log)."""


@dataclass(frozen=True, slots=True)
class Peer:
    """What the kernel tells of the process at the other end of a connection, as it was then.

    pid: 0 where it cannot be seen from here.
    groups: its supplementary groups.
    """

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """A session's process.

    Attributes:
        session: the broker's number.
        pid: of the process, as far as it can be seen.
        engine: the engine's name; None before it said one, and for tools.
        role: scheduler, worker or tool.
        rank: of a worker that is registered.
    """

    session: int
    pid: int
    engine: str | None = None
    role: str = ""
    rank: int | None = None

    @property
    def fields(self) -> Fields:
        """For programs: those that are known."""
        fields: Fields = {"session": self.session, "pid": self.pid}
        if self.engine is not None:
            fields["engine"] = self.engine
        if self.rank is not None:
            fields["rank"] = self.rank
        return fields

    def __str__(self) -> str:
        if self.engine is None:
            return f"session {self.session} (pid {self.pid})"
        role = self.role if self.rank is None else f"rank {self.rank}"
        return f"engine {self.engine} {role} (pid {self.pid})"
