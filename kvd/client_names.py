"""Identity of a client's process, as logs, events and errors of broker and lanes show it.

As text: ``engine llama-70b rank 3 (pid 41)``. In JSON: the fields engine, rank, session and pid. A
lane's job is ``store 17 of engine llama-70b rank 3 (pid 41)``, with the field job.
"""

from dataclasses import dataclass
from typing import TypeAlias

Fields: TypeAlias = dict[str, str | int]
"""Identifiers of an event in JSON; see docs/operations.md (The log)."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Credentials of a process at the time when it connected, as the kernel reports them.

    Attributes:
        pid: 0 if the process is in a pid namespace that is not visible from here.
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
        session: the broker's number of the session.
        pid: 0 if it is not visible from here.
        engine: the engine's name; None for tools and before HELLO.
        role: scheduler, worker or tool.
        rank: of a registered worker; else None.
    """

    session: int
    pid: int
    engine: str | None = None
    role: str = ""
    rank: int | None = None

    @property
    def fields(self) -> Fields:
        """The identifiers that are known, for JSON."""
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
