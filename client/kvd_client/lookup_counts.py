"""What one session has looked up: integers that the daemon is told now and then."""

from kvd_proto.messages import Lookups, Ping


class LookupCounts:
    """Totals of one session; a new one begins at zero, so that nothing is told twice.

    With several threads a few lookups may stay uncounted: adding takes no lock.

    Args:
        tokens: whether the engine counts tokens itself.
    """

    __slots__ = ("_told", "_with_tokens", "chunks", "hit_chunks", "hit_tokens", "tokens")

    def __init__(self, *, tokens: bool) -> None:
        self.chunks = 0
        self.hit_chunks = 0
        self.tokens = 0
        self.hit_tokens = 0
        self._with_tokens = tokens
        self._told = (0, 0, 0, 0)

    def news(self) -> Ping | None:
        """The totals, to be told; None where they have been."""
        now = (self.chunks, self.hit_chunks, self.tokens, self.hit_tokens)
        if now == self._told:
            return None
        self._told = now
        chunks, hit_chunks, tokens, hit_tokens = now
        counted = self._with_tokens
        return Ping(
            lookups=Lookups(
                chunks=chunks,
                hit_chunks=hit_chunks,
                tokens=tokens if counted else None,
                hit_tokens=hit_tokens if counted else None,
            )
        )

    def __repr__(self) -> str:
        return f"<LookupCounts {self.hit_chunks} of {self.chunks} chunks found>"
