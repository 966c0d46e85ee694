"""The rest of a kept pool: what lies beside the chunks in use may be anybody's, and must go.

It is gone through piece by piece of the filling (`kvd.filling`), in its order. A piece is
clean once the scrubber's pieces of it are wiped; so one number, as while the pool is being
filled, says how much may be given out.
"""

from collections import deque
from collections.abc import Iterable

from kvd.errors import IntegrityError
from kvd.filling import FillOrder
from kvd.state.scrubbing import Run, Scrubber
from kvd.state.space import Space


class Rest:
    """How far the rest has been wiped; all of it counts as clean until `begin`."""

    def __init__(self, fill: FillOrder) -> None:
        self._fill = fill
        self._unseen: deque[int] = deque()  # pieces of the filling that nobody has looked at yet
        self._pending = 0  # pieces of the scrubber for the last one that somebody has
        self._clean_bytes = fill.nbytes

    def begin(self) -> None:
        """Nothing is clean any more."""
        self._unseen = deque(self._fill.order)
        self._clean_bytes = 0

    @property
    def clean_bytes(self) -> int | None:
        """How much of the pool may be given out, in the order of filling; None: all of it."""
        return None if self._clean_bytes >= self._fill.nbytes else self._clean_bytes

    @property
    def left_bytes(self) -> int:
        """What nobody has looked at yet, chunks in use and all."""
        return sum(end - begin for begin, end in map(self._fill.span, self._unseen))

    def advance(self, scrubber: Scrubber, spaces: Iterable[Space]) -> bool:
        """Have the next piece wiped. False: the last one is not clean yet, or there is none."""
        if not self._unseen or self._pending:
            return False
        position = self._unseen.popleft()
        self._pending = scrubber.add_rest(self._idle_runs(position, spaces))
        if not self._pending:
            self._clean_bytes = self._fill.filled_with[position]
        return True

    def _idle_runs(self, position: int, spaces: Iterable[Space]) -> list[Run]:
        """Bytes of a piece of the filling in which no slot is in use."""
        begin, end = self._fill.span(position)
        runs = []
        for used, after in sorted(run for space in spaces for run in space.used_runs(begin, end)):
            if begin < used:
                runs.append((begin, used))
            begin = after
        return [*runs, (begin, end)] if begin < end else runs

    def wiped(self) -> None:
        """One of the scrubber's pieces is clean."""
        self._pending -= 1
        if not self._pending:
            self._clean_bytes = self._fill.filled_with[self._last_seen]

    @property
    def _last_seen(self) -> int:
        return self._fill.order[len(self._fill.order) - len(self._unseen) - 1]

    def check_integrity(self, scrubber: Scrubber) -> None:
        """As many pieces wait as the scrubber has of the rest.

        Raises:
            IntegrityError: otherwise.
        """
        if self._pending != scrubber.rest_pieces:
            raise IntegrityError(f"{scrubber.rest_pieces} pieces of the rest: {self!r}")

    def __repr__(self) -> str:
        return (
            f"<Rest {self._clean_bytes} of {self._fill.nbytes} bytes clean,"
            f" {self._pending} pieces waited for>"
        )
