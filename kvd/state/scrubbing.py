"""What must be zeroed before anybody may have it again, where the setting `scrub` says so.

A slot that its chunk has left is soil, and so is what a daemon finds in a kept pool
beside the chunks that it goes on with (the rest). Soil is cut into pieces; a lane wipes
them and says so::

    SOILED -> WIPING  send: a lane was told
    WIPING -> CLEAN   wiped: it has answered
    WIPING -> SOILED  lost: its process has ended; another one does it again

A slot of a piece is nobody's until the piece is CLEAN: `kvd.state.space` neither gives
it out nor lets its column go. Slots are wiped in the order in which they became soil.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kvd.errors import IntegrityError
from kvd_proto.states import Machine

if TYPE_CHECKING:
    from kvd.state.space import Space

PIECE_BYTES = 64 * 2**20
MAX_RUNS = 2048  # of 16 bytes each, well inside one datagram of the link
IN_FLIGHT = 2  # a lane wipes one and has the next at hand

Run = tuple[int, int]
"""First byte and end in the pool."""


class PieceState(StrEnum):
    """Where one piece stands."""

    SOILED = "soiled"
    WIPING = "wiping"
    CLEAN = "clean"


class PieceEvent(StrEnum):
    """What moves a piece."""

    SEND = "send"
    WIPED = "wiped"
    LOST = "lost"


PIECE: Mapping[PieceState, Mapping[PieceEvent, PieceState]] = {
    PieceState.SOILED: {PieceEvent.SEND: PieceState.WIPING},
    PieceState.WIPING: {
        PieceEvent.WIPED: PieceState.CLEAN,
        PieceEvent.LOST: PieceState.SOILED,
    },
    PieceState.CLEAN: {},
}


@dataclass(slots=True, eq=False)
class Piece:
    """What a lane wipes at a time: slots of a space, or some of the rest (no space).

    device: of the lane that was told last.
    """

    number: int
    space: "Space | None"
    slots: list[int]
    runs: list[Run]
    device: str = ""
    machine: Machine[PieceState, PieceEvent] = field(
        default_factory=lambda: Machine(PIECE, PieceState.SOILED)
    )

    @property
    def nbytes(self) -> int:
        """How much it is."""
        return sum(end - begin for begin, end in self.runs)


class Scrubber:
    """Soil, and the pieces that lanes are wiping."""

    def __init__(self) -> None:
        self._soil: deque[tuple[Space, list[int]]] = deque()
        self._queue: deque[Piece] = deque()  # the rest, and pieces whose lane was lost
        self._wiping: dict[int, Piece] = {}
        self._numbers = 0
        self._left_bytes = 0
        self.soiled_slots = 0  # ever
        self.clean_slots = 0  # how many of those are clean again, the first ones
        self.wiped_bytes = 0

    @property
    def left_bytes(self) -> int:
        """Soil that is known and not wiped yet."""
        return self._left_bytes

    @property
    def rest_pieces(self) -> int:
        """Pieces of the rest that are not wiped yet."""
        return sum(piece.space is None for piece in (*self._queue, *self._wiping.values()))

    def soil(self, space: "Space", slots: list[int]) -> None:
        """Chunks have left these slots."""
        self._soil.append((space, slots))
        self.soiled_slots += len(slots)
        self._left_bytes += len(slots) * space.geometry.bytes_per_chunk

    def add_rest(self, runs: Iterable[Run]) -> int:
        """These bytes are no slot's and of nobody who may keep them; how many pieces that makes."""
        pieces: list[list[Run]] = [[]]
        size = 0
        for run in _cut(runs):
            if size + run[1] - run[0] > PIECE_BYTES or len(pieces[-1]) >= MAX_RUNS:
                pieces.append([])
                size = 0
            pieces[-1].append(run)
            size += run[1] - run[0]
        made = [self._piece(None, [], piece) for piece in pieces if piece]
        self._queue += made
        self._left_bytes += sum(piece.nbytes for piece in made)
        return len(made)

    def next(self, device: str) -> Piece | None:
        """A piece that the lane of `device` is to wipe now; None: enough, or there is none."""
        if len(self._wiping) >= IN_FLIGHT:
            return None
        if self._queue:
            piece = self._queue.popleft()
        elif self._soil:
            piece = self._next_slots()
        else:
            return None
        piece.machine.fire(PieceEvent.SEND)
        piece.device = device
        self._wiping[piece.number] = piece
        return piece

    def wiped(self, number: int) -> Piece | None:
        """A lane has wiped the piece of this number; None where it is not being wiped."""
        piece = self._wiping.pop(number, None)
        if piece is None:
            return None
        piece.machine.fire(PieceEvent.WIPED)
        self.clean_slots += len(piece.slots)
        self.wiped_bytes += piece.nbytes
        self._left_bytes -= piece.nbytes
        return piece

    def lane_lost(self, device: str) -> None:
        """The process that wiped for `device` has ended: what it had begun begins anew."""
        lost = [piece for piece in self._wiping.values() if piece.device == device]
        for piece in reversed(lost):
            del self._wiping[piece.number]
            piece.machine.fire(PieceEvent.LOST)
            self._queue.appendleft(piece)

    def __iter__(self) -> Iterator[tuple["Space", list[int]]]:
        """Every slot that is not clean, by space; a space may come several times."""
        yield from self._soil
        for piece in (*self._queue, *self._wiping.values()):
            if piece.space is not None:
                yield piece.space, piece.slots

    def _next_slots(self) -> Piece:
        space = self._soil[0][0]
        geometry = space.geometry
        arenas = len(geometry.slot_bytes)
        most = max(1, min(PIECE_BYTES // geometry.bytes_per_chunk, MAX_RUNS // arenas))
        slots: list[int] = []
        while self._soil and self._soil[0][0] is space and len(slots) < most:
            _, waiting = self._soil.popleft()
            room = most - len(slots)
            slots += waiting[:room]
            if len(waiting) > room:
                self._soil.appendleft((space, waiting[room:]))
        slots.sort()
        return self._piece(space, slots, space.geometry.runs(slots))

    def _piece(self, space: "Space | None", slots: list[int], runs: list[Run]) -> Piece:
        self._numbers += 1
        return Piece(self._numbers, space, slots, runs)

    def check_integrity(self) -> None:
        """Every piece is where its state says, and bytes and slots are counted.

        Raises:
            IntegrityError: otherwise.
        """
        if any(piece.machine.state is not PieceState.SOILED for piece in self._queue):
            raise IntegrityError(f"a piece that waits is not soiled: {self!r}")
        for number, piece in self._wiping.items():
            if piece.number != number or piece.machine.state is not PieceState.WIPING:
                raise IntegrityError(f"{piece!r} is not being wiped")
        slots = sum(len(slots) for _, slots in self)
        if slots != self.soiled_slots - self.clean_slots:
            raise IntegrityError(f"{slots} soiled slots: {self!r}")
        nbytes = sum(len(slots) * space.geometry.bytes_per_chunk for space, slots in self._soil)
        nbytes += sum(piece.nbytes for piece in (*self._queue, *self._wiping.values()))
        if nbytes != self._left_bytes:
            raise IntegrityError(f"{nbytes} bytes of soil: {self!r}")

    def __repr__(self) -> str:
        return (
            f"<Scrubber {self._left_bytes} bytes left, {len(self._wiping)} pieces being wiped,"
            f" {self.clean_slots} of {self.soiled_slots} slots clean>"
        )


def _cut(runs: Iterable[Run]) -> Iterator[Run]:
    """The same in runs of a piece's size at most."""
    for begin, end in runs:
        for start in range(begin, end, PIECE_BYTES):
            yield start, min(start + PIECE_BYTES, end)
