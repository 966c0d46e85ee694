"""What a scheduler counts of its lookups, for the daemon's figures."""

from dataclasses import dataclass

from kvd_proto.messages import Lookups


@dataclass(slots=True)
class LookupCounts:
    """Totals of one session. Adding takes no lock: with several threads a few may be lost."""

    chunks: int = 0
    hit_chunks: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    aborted_requests: int = 0
    detached_tokens: int = 0
    hints: int = 0
    hints_ignored: int = 0
    hints_cut: int = 0

    def report(self, *, with_tokens: bool) -> Lookups:
        """Return them as the daemon is told; the tokens only where the engine counts them."""
        return Lookups(
            chunks=self.chunks,
            hit_chunks=self.hit_chunks,
            tokens=self.tokens if with_tokens else None,
            hit_tokens=self.hit_tokens if with_tokens else None,
            aborted_requests=self.aborted_requests,
            detached_tokens=self.detached_tokens,
            hints=self.hints,
            hints_ignored=self.hints_ignored,
            hints_cut=self.hints_cut,
        )

    def __bool__(self) -> bool:
        return self != LookupCounts()
