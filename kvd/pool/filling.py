"""In which order the pool's memory comes into being.

Memory of many gigabytes takes its time to be allocated and pinned, and a chunk needs
a share in every rank's arena, spread over the whole pool. So the pool is filled piece
by piece, not from its start onwards: with the first two pieces a chunk of two ranks
has its bytes, with the first eight one of eight. Whoever fills (the broker allocates,
lanes touch and pin) goes in this one order, so a single number, the bytes filled so
far, says of every byte whether it may be used.
"""

from dataclasses import dataclass
from functools import cached_property

from kvd.errors import PoolError

# Pieces are so many bytes long, or pages of more: whole huge pages of tmpfs, which does not always
# say that it uses them, and whole short pieces of a lane's copies.
UNIT_BYTES = 8 * 2**20
# To pin a piece keeps the driver of the whole machine from others, about 0.04 s a GiB; and Linux
# 6.11 to 6.13 pins no more than 2 GB at a time.
MAX_PIECE_BYTES = 256 * 2**20
MIN_PIECE_BYTES = 64 * 2**20
_PIECES = 256
_SECTIONS = 64


def piece_bytes_for(nbytes: int, page_bytes: int = UNIT_BYTES) -> int:
    """Bytes of one piece of a pool of `nbytes`, whole units and whole pages (powers of two).

    About 256 pieces in all; a large pool has more, of MAX_PIECE_BYTES or of one page.
    """
    unit = max(page_bytes, UNIT_BYTES)
    wanted = min(max(-(-nbytes // _PIECES), MIN_PIECE_BYTES), MAX_PIECE_BYTES)
    return -(-wanted // unit) * unit


@dataclass(frozen=True)
class FillOrder:
    """The order of the pieces of a pool of `nbytes`; the last piece may be short.

    Raises:
        PoolError: sizes that make no pieces.
    """

    nbytes: int
    piece_bytes: int

    def __post_init__(self) -> None:
        if self.nbytes < 1 or self.piece_bytes < 1:
            raise PoolError(f"{self.nbytes} bytes in pieces of {self.piece_bytes}")

    @classmethod
    def of(cls, nbytes: int, page_bytes: int = UNIT_BYTES) -> "FillOrder":
        """The order that the whole daemon uses for a pool in pages of `page_bytes`."""
        return cls(nbytes, piece_bytes_for(nbytes, page_bytes))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The pieces' numbers, first to be filled first.

        The pool is cut into sections; one piece of each in turn, and the sections in the order
        that halves the largest gap: those of 2, 4, 8 … equal arenas grow from the first pieces on.
        """
        count = -(-self.nbytes // self.piece_bytes)
        bits = min(count, _SECTIONS).bit_length() - 1
        sections = 1 << bits
        starts = [section * count // sections for section in range(sections + 1)]
        turns = sorted(range(sections), key=lambda section: _reversed_bits(section, bits))
        longest = -(-count // sections)
        return tuple(
            starts[section] + step
            for step in range(longest)
            for section in turns
            if starts[section] + step < starts[section + 1]
        )

    @cached_property
    def filled_with(self) -> tuple[int, ...]:
        """By piece: how many bytes are filled once this piece is."""
        filled, done = [0] * len(self.order), 0
        for piece in self.order:
            begin, end = self.span(piece)
            done += end - begin
            filled[piece] = done
        return tuple(filled)

    def span(self, piece: int) -> tuple[int, int]:
        """First byte and end of a piece in the pool."""
        begin = piece * self.piece_bytes
        return begin, min(begin + self.piece_bytes, self.nbytes)

    def needed(self, begin: int, end: int) -> int:
        """How many bytes must be filled for pool bytes begin..end - 1 to be there."""
        pieces = range(begin // self.piece_bytes, (end - 1) // self.piece_bytes + 1)
        return max(self.filled_with[piece] for piece in pieces)


def _reversed_bits(number: int, bits: int) -> int:
    return int(f"{number:0{bits}b}"[::-1], 2) if bits else 0
