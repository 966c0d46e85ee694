"""Life cycles of sessions and jobs, as tables.

A table maps (state, event) to the next state. A `Machine` walks it: what is not in the
table is illegal, raises and leaves the state as it was. docs/protocol.md shows diagrams
generated from these tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from kvd_proto.errors import IllegalTransition


class SessionState(StrEnum):
    """Where one session stands, as the broker sees it."""

    CONNECTED = "connected"  # at the control socket, token given
    WELCOMED = "welcomed"  # handshake done
    REGISTERED = "registered"  # a worker whose memory the lane has imported
    CLOSED = "closed"


class SessionEvent(StrEnum):
    """What moves a session."""

    HELLO = "hello"
    REGISTER = "register"
    UNREGISTER = "unregister"
    LOST = "lost"


class JobState(StrEnum):
    """Where one job stands in its lane."""

    QUEUED = "queued"  # accepted, waits for the timeline and its turn
    COPYING = "copying"  # bytes may be moving
    DRAINING = "draining"  # stopped; waits until nothing moves any more
    ENDED = "ended"  # its Done was sent


class JobEvent(StrEnum):
    """What moves a job."""

    START = "start"
    COPIED = "copied"
    STOP = "stop"
    DRAINED = "drained"


SESSION: Mapping[SessionState, Mapping[SessionEvent, SessionState]] = {
    SessionState.CONNECTED: {
        SessionEvent.HELLO: SessionState.WELCOMED,
        SessionEvent.LOST: SessionState.CLOSED,
    },
    SessionState.WELCOMED: {
        SessionEvent.REGISTER: SessionState.REGISTERED,
        SessionEvent.LOST: SessionState.CLOSED,
    },
    SessionState.REGISTERED: {
        SessionEvent.UNREGISTER: SessionState.WELCOMED,
        SessionEvent.LOST: SessionState.CLOSED,
    },
    SessionState.CLOSED: {},
}

JOB: Mapping[JobState, Mapping[JobEvent, JobState]] = {
    JobState.QUEUED: {JobEvent.START: JobState.COPYING, JobEvent.STOP: JobState.ENDED},
    JobState.COPYING: {JobEvent.COPIED: JobState.ENDED, JobEvent.STOP: JobState.DRAINING},
    JobState.DRAINING: {JobEvent.DRAINED: JobState.ENDED},
    JobState.ENDED: {},
}

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


@dataclass(slots=True)
class Machine(Generic[S, E]):
    """One walk through a transition table."""

    table: Mapping[S, Mapping[E, S]]
    state: S

    def fire(self, event: E) -> S:
        """Move by `event`; the new state.

        Raises:
            IllegalTransition: the table has no such arrow; the state is unchanged.
        """
        following = self.table[self.state].get(event)
        if following is None:
            allowed = ", ".join(self.table[self.state]) or "nothing"
            raise IllegalTransition(f"{event} in state {self.state}; allowed: {allowed}")
        self.state = following
        return following

    def __repr__(self) -> str:
        return f"<Machine {self.state}>"
