"""Looking whether all that the broker believes fits together, a piece at a time.

A piece is some slots of one namespace: their records, the index, eviction order, tickets
and pins say the same. What changes between two pieces does no harm, since each slot is
looked at in one moment.

Cost: about 5 µs for each chunk that is kept, at most a few milliseconds a piece, and
engines are served between two pieces. Where few chunks are kept everything is looked at
once more in one moment, with what takes longer: the division of the pool, overlaps,
and the indexes of sessions and engines.
"""

from collections import deque
from dataclasses import dataclass

from kvd.broker.effects import Effect, Event, Reply
from kvd.broker.state import BrokerState
from kvd.cache.namespaces import Namespace
from kvd.errors import IntegrityError, Refused
from kvd_proto.messages import Checked, ErrorCode

MAX_CHECKS = 4
PIECE_SLOTS = 1024
WHOLE_CHUNKS = 2048  # at most so many are looked at in one moment: some 20 ms


@dataclass(slots=True, eq=False)
class _Check:
    """One that is under way, and who waits for it."""

    session: int
    request_id: int
    namespaces: deque[Namespace]
    position: int = 0
    chunks: int = 0


class Checking:
    """The checks that are under way; the first one moves."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._checks: deque[_Check] = deque()

    def __len__(self) -> int:
        return len(self._checks)

    def start(self, session: int, request_id: int) -> None:
        """Begin one.

        Raises:
            Refused: LIMIT where too many are under way.
        """
        if len(self._checks) >= MAX_CHECKS:
            raise Refused(
                ErrorCode.LIMIT,
                f"{MAX_CHECKS} checks are under way, no more are allowed; try again when they"
                " have ended",
                limit="checks",
            )
        self._checks.append(_Check(session, request_id, deque(self._state.namespaces or ())))

    def work(self) -> list[Effect]:
        """One piece of the first; with the last one, or the first that is wrong, its reply."""
        if not self._checks:
            return []
        check = self._checks[0]
        try:
            if check.namespaces:
                self._piece(check, check.namespaces[0])
                return []
            whole = check.chunks <= WHOLE_CHUNKS
            if whole:
                self._state.check_integrity()
        except IntegrityError as error:
            self._checks.popleft()
            text = f"what the broker believes contradicts itself: {error}"
            reply = Checked(violation=str(error)[:1000], chunks=check.chunks, whole=False)
            return [Reply(check.session, check.request_id, reply), Event(text, "error")]
        self._checks.popleft()
        reply = Checked(violation="", chunks=check.chunks, whole=whole)
        return [Reply(check.session, check.request_id, reply)]

    def _piece(self, check: _Check, namespace: Namespace) -> None:
        open_ones = self._state.namespaces
        slots = namespace.geometry.num_slots
        gone = open_ones is None or open_ones.get(namespace.id) is not namespace
        if gone or check.position >= slots:
            check.namespaces.popleft()
            check.position = 0
            return
        check.chunks += namespace.table.slots.check_slots(check.position, PIECE_SLOTS)
        check.position += PIECE_SLOTS

    def __repr__(self) -> str:
        return f"<Checking {len(self._checks)} under way>"
