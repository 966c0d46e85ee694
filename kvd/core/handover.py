"""Leaving to another daemon: an upgrade that engines see as a moment of misses.

The new daemon asks over a tool's session and then waits for the lock on the runtime
directory. This one takes no new stores and waits for what has begun, has its lanes
finish and end, and leaves; the process does that with everything put in order first,
the lock let go of last. Until it leaves, the end of the new daemon's session undoes
all of it::

    SERVING ──asked──▶ DRAINING ──drained──▶ STOPPING ──stopped──▶ LEAVING
       ▲                   │                     │
       └───────lost────────┴────────lost─────────┘

Loads are served in DRAINING as ever: what began before is waited for, what begins
meanwhile is not. The whole takes drain_seconds at most, and DRAINING half of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvd.core.effects import Effect, Event, Reply, RunLanes
from kvd.core.operations import Handler, by, for_tools, in_flight
from kvd.core.sessions import Session
from kvd.core.state import BrokerState, Successor
from kvd.core.sweeps import Sweeps
from kvd.errors import IntegrityError, Refused
from kvd_proto.durations import format_duration
from kvd_proto.messages import ErrorCode, HandingOver, HandOver, Message
from kvd_proto.states import Machine

DRAINING_SHARE = 0.5


class HandoverState(StrEnum):
    """How far this daemon is on its way out for another."""

    SERVING = "serving"
    DRAINING = "draining"  # no new stores; what has begun ends
    STOPPING = "stopping"  # lanes finish their queues and end
    LEAVING = "leaving"  # nothing undoes this


class HandoverEvent(StrEnum):
    """What moves it."""

    ASKED = "asked"
    DRAINED = "drained"
    STOPPED = "stopped"
    LOST = "lost"
    SIGNAL = "signal"


HANDOVER: Mapping[HandoverState, Mapping[HandoverEvent, HandoverState]] = {
    HandoverState.SERVING: {HandoverEvent.ASKED: HandoverState.DRAINING},
    HandoverState.DRAINING: {
        HandoverEvent.DRAINED: HandoverState.STOPPING,
        HandoverEvent.LOST: HandoverState.SERVING,
        HandoverEvent.SIGNAL: HandoverState.LEAVING,
    },
    HandoverState.STOPPING: {
        HandoverEvent.STOPPED: HandoverState.LEAVING,
        HandoverEvent.LOST: HandoverState.SERVING,
        HandoverEvent.SIGNAL: HandoverState.LEAVING,
    },
    HandoverState.LEAVING: {},
}


@dataclass(frozen=True, slots=True)
class WayOut:
    """What decides whether this daemon can leave to another, as the outside knows it.

    uid: its user; another user's daemon could not use the pool.
    managed: a service manager watches this very process.
    keeps: whether the chunks stay when the daemon ends.
    """

    uid: int = 0
    managed: bool = False
    keeps: Callable[[], bool] = lambda: False


class Handover:
    """Decisions about leaving, over the shared state.

    Args:
        state: shared; `state.successor` is set from ASKED on.
        sweeps: clears and evictions, which are finished first.
        way_out: see there.
    """

    def __init__(self, state: BrokerState, sweeps: Sweeps, way_out: WayOut) -> None:
        self._state = state
        self._sweeps = sweeps
        self._way_out = way_out
        self._machine = Machine(HANDOVER, HandoverState.SERVING)

    def handlers(self) -> dict[type[Message], Handler]:
        """Who serves which request."""
        return {HandOver: for_tools(self._asked)}

    @property
    def leaving(self) -> bool:
        """The process is to end now."""
        return self._machine.state is HandoverState.LEAVING

    def turn(self, now: float, *, lanes_running: bool) -> list[Effect]:
        """A turn of the loop: go on as far as things have come.

        Args:
            now: monotonic seconds.
            lanes_running: some lane's process has not ended.
        """
        state, successor = self._state, self._state.successor
        if successor is None or self.leaving:
            return []
        effects: list[Effect] = []
        total = state.settings.drain_seconds
        passed = now - successor.since
        if self._machine.state is HandoverState.DRAINING:
            stores, leases = in_flight(state, successor.since)
            late = passed >= total * DRAINING_SHARE
            if (stores or leases or self._sweeps) and not late:
                return []
            if stores or leases:
                text = f"{stores} chunks in writing and {leases} leases have not ended"
                effects.append(Event(f"{text}: they are given up for the handover", "warning"))
            self._machine.fire(HandoverEvent.DRAINED)
            state.stopping = True
            effects.append(RunLanes(wanted=False))
        elif not lanes_running or passed >= total:
            self._machine.fire(HandoverEvent.STOPPED)
            if lanes_running:
                text = f"lanes have not finished within {total:g} s and are ended"
                effects.append(Event(text, "warning"))
            lasted = format_duration(passed)
            effects.append(Event(f"handed over to pid {successor.pid} after {lasted}: leaving"))
        return effects

    def lost(self, session: Session) -> list[Effect]:
        """A session has ended; if it was the new daemon's, this one serves on."""
        state, successor = self._state, self._state.successor
        if successor is None or successor.session != session.number or self.leaving:
            return []
        effects: list[Effect] = []
        stopped = self._machine.state is HandoverState.STOPPING
        self._machine.fire(HandoverEvent.LOST)
        state.successor = None
        text = f"pid {successor.pid}, which was to take over, is gone: this daemon serves on"
        effects.append(Event(text, "warning", session.who.fields))
        if stopped:
            state.stopping = False
            effects.append(RunLanes(wanted=True))
        return effects

    def overtaken(self) -> None:
        """A signal ends this daemon, whatever becomes of the new one."""
        if self._state.successor is not None and not self.leaving:
            self._machine.fire(HandoverEvent.SIGNAL)

    def _asked(
        self, session: Session, request_id: int, message: HandOver, now: float
    ) -> list[Effect]:
        state = self._state
        self._check(session, message)
        self._machine.fire(HandoverEvent.ASKED)
        state.successor = Successor(session.number, message.pid, session.peer, now)
        seconds, kept = state.settings.drain_seconds, self._way_out.keeps()
        text = f"handing over to pid {message.pid}, asked by {by(session.peer)}: no new stores"
        if not kept:
            text += "; nothing is kept, so the cache starts empty"
        effects: list[Effect] = [
            Reply(session.number, request_id, HandingOver(seconds=seconds, kept=kept)),
            Event(text, fields=session.who.fields),
        ]
        if state.drain is not None:
            text = f"the drain by {by(state.drain.by)} ends with this daemon: the new one is not"
            effects.append(Event(f"{text} drained", "warning"))
        return effects

    def _check(self, session: Session, message: HandOver) -> None:
        state, way_out = self._state, self._way_out
        if message.boot_id != state.boot_id:
            raise Refused(
                ErrorCode.STALE_BOOT, "another daemon was meant, which has ended; ask again"
            )
        if state.successor is not None:
            raise Refused(
                ErrorCode.BAD_STATE,
                f"pid {state.successor.pid} is taking over already; let it, or end it first",
            )
        if state.stopping:
            raise Refused(ErrorCode.DRAINING, "the daemon is stopping already")
        if session.peer.uid != way_out.uid:
            raise Refused(
                ErrorCode.FORBIDDEN,
                f"it is uid {session.peer.uid} that asks, the daemon and its pool belong to uid"
                f" {way_out.uid}; start the new one as that user, such as with runuser -u",
            )
        if way_out.managed:
            raise Refused(
                ErrorCode.BAD_STATE,
                "a service manager watches this daemon's process and would not know the new one;"
                " use it, such as systemctl restart kvd: that keeps the cache too",
            )

    def check_integrity(self) -> None:
        """State and successor agree.

        Raises:
            IntegrityError: they do not.
        """
        serving = self._machine.state is HandoverState.SERVING
        if serving != (self._state.successor is None):
            raise IntegrityError(f"{self!r} with {self._state.successor}")

    def __repr__(self) -> str:
        return f"<Handover {self._machine.state}>"
