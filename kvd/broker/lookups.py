"""How much was looked up and found: clients count, for they read the directory themselves.

A scheduler's session says now and then how much it has looked up since it began.
The broker adds what is new, so nothing counts twice however often it is said, and
a new session begins at zero.
"""

from dataclasses import asdict, dataclass

from kvd_proto.messages import Lookups

_MOST = 2**63 - 1  # what a message can carry


@dataclass(slots=True)
class LookupTotals:
    """Chunks looked up and found, and tokens asked for and found."""

    chunks: int = 0
    hit_chunks: int = 0
    tokens: int = 0
    hit_tokens: int = 0

    def add(self, more: "LookupTotals") -> None:
        """Add up, within the range of a message."""
        for name, value in asdict(more).items():
            setattr(self, name, min(getattr(self, name) + value, _MOST))

    def news(self, said: Lookups, tokens_per_chunk: int | None) -> "LookupTotals":
        """What a session says beyond these, its totals until now, which become those it says.

        Figures that have fallen are no news. Where it counts no tokens, they follow from the
        size of a chunk.
        """
        new = LookupTotals()
        for name in self.__slots__:
            grown = max(0, (getattr(said, name) or 0) - getattr(self, name))
            setattr(new, name, grown)
        self.add(new)
        if said.tokens is None or said.hit_tokens is None:
            size = tokens_per_chunk or 0
            new.tokens, new.hit_tokens = new.chunks * size, new.hit_chunks * size
        return new
