"""Dropping many chunks, a piece at a time, so that engines are served in between.

Operators clear and evict. A sweep goes once over the slots of its namespaces. What is
stored behind it stays, what is stored before it may go too; all that was there when it
began is gone when it is answered.

An engine's reset is answered before, for nothing of it is found any more; here the slots
that it left behind are freed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvd.broker.effects import DropDirectory, Effect, Event, Reply
from kvd.broker.state import BrokerState
from kvd.cache.chunks import EMPTY_PIECES, PIECE_SLOTS
from kvd.cache.namespaces import Namespace
from kvd.client_names import Fields
from kvd.errors import Refused
from kvd_proto.messages import ErrorCode, Message
from kvd_proto.sizes import format_size

MAX_SWEEPS = 16


@dataclass(slots=True)
class Tally:
    """What a sweep has done: chunks and bytes dropped, chunks that go when their leases end."""

    chunks: int = 0
    bytes: int = 0
    deferred: int = 0


class Answer(Protocol):
    """Makes the reply from what was done."""

    def __call__(self, tally: Tally) -> Message:
        """Called once, at the end."""


@dataclass(slots=True, eq=False)
class Sweep:
    """Chunks of `namespaces` on their way out, and who is waiting for the end of it.

    unused_for: only those that were of no use for so many seconds; None: all.
    what: for the log, in words, such as "cleared by uid 0 pid 7"; empty where nobody needs to know.
    """

    session: int
    request_id: int
    what: str
    answer: Answer
    namespaces: tuple[Namespace, ...]
    unused_for: float | None = None
    fields: Fields = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    index: int = 0
    position: int = 0


class Sweeps:
    """The sweeps that are under way; the first one moves."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._sweeps: deque[Sweep] = deque()

    def __len__(self) -> int:
        return len(self._sweeps)

    @property
    def busy(self) -> bool:
        """There is `work` to do."""
        return bool(self._sweeps) or self._unswept is not None

    def start(self, sweep: Sweep) -> list[Effect]:
        """Begin one. Without an age, stores that are under way are given up at once.

        Raises:
            Refused: LIMIT where too many are under way.
        """
        if len(self) >= MAX_SWEEPS:
            raise Refused(
                ErrorCode.LIMIT,
                f"{MAX_SWEEPS} clears and evictions are under way, no more are allowed; try again"
                " when they have ended",
                limit="sweeps",
            )
        effects: list[Effect] = []
        if sweep.unused_for is None:
            for namespace in sweep.namespaces:
                refs = namespace.table.give_up_stores()
                sweep.tally.chunks += len(refs)
                sweep.tally.bytes += len(refs) * namespace.geometry.bytes_per_chunk
                effects += self._state.revoke(namespace, refs)
        self._sweeps.append(sweep)
        return effects

    def work(self) -> list[Effect]:
        """Do one piece, and one of what a reset has left; at the end of a sweep its reply."""
        unswept = self._unswept
        if unswept is not None:
            unswept.table.sweep()
        if not self._sweeps:
            return []
        sweep = self._sweeps[0]
        if sweep.index < len(sweep.namespaces):
            self._piece(sweep, sweep.namespaces[sweep.index])
            return []
        self._sweeps.popleft()
        closed = close_unused(self._state, sweep.namespaces) if sweep.unused_for is None else []
        tally = sweep.tally
        text = f"{sweep.what}: {tally.chunks} chunks dropped, {format_size(tally.bytes)}"
        if tally.deferred:
            text += f"; {tally.deferred} more go when their leases end"
        told = [Event(text, fields=sweep.fields)] if sweep.what else []
        return [Reply(sweep.session, sweep.request_id, sweep.answer(tally)), *told, *closed]

    def _piece(self, sweep: Sweep, namespace: Namespace) -> None:
        slots = namespace.geometry.num_slots
        if not self._is_open(namespace) or sweep.position >= slots:
            sweep.index += 1
            sweep.position = 0
            return
        table = namespace.table
        for _ in range(EMPTY_PIECES):
            gone, kept = table.remove(
                sweep.position,
                PIECE_SLOTS,
                unused_for=sweep.unused_for,
            )
            sweep.position += PIECE_SLOTS
            sweep.tally.chunks += gone
            sweep.tally.bytes += gone * namespace.geometry.bytes_per_chunk
            sweep.tally.deferred += kept
            if sweep.position >= slots:
                table.give_back()
                return
            if gone or kept:
                return

    @property
    def _unswept(self) -> Namespace | None:
        namespaces = self._state.namespaces or ()
        return next((each for each in namespaces if not each.table.is_swept), None)

    def _is_open(self, namespace: Namespace) -> bool:
        namespaces = self._state.namespaces
        return namespaces is not None and namespaces.get(namespace.id) is namespace

    def __repr__(self) -> str:
        return f"<Sweeps {[sweep.what for sweep in self._sweeps]}>"


def close_unused(state: BrokerState, namespaces: Sequence[Namespace]) -> list[Effect]:
    """Close those of the namespaces that no engine uses and where nothing is under way."""
    if state.namespaces is None:
        return []
    effects: list[Effect] = []
    closable = set(state.namespaces.closable())
    for namespace in namespaces:
        if namespace in closable:
            state.namespaces.close(namespace)
            effects.append(DropDirectory(namespace.id))
    return effects
