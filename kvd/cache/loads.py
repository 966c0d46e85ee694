"""Loads: requests pin chunks, give them back, and finish."""

from collections.abc import Sequence

from kvd.cache.slots import Slots
from kvd.cache.uses import Uses
from kvd.metrics.counts import ChunkCounts
from kvd_proto.labels import Label


class Loads:
    """What requests use of one namespace's chunks."""

    def __init__(self, slots: Slots, uses: Uses, counts: ChunkCounts) -> None:
        self._slots = slots
        self._directory = slots.directory
        self._uses = uses
        self._counts = counts

    def pin(  # noqa: PLR0917 a lease has these parts
        self,
        number: int,
        slots: Sequence[int],
        generations: Sequence[int],
        owner: int,
        now: float,
        seconds: float,
    ) -> None:
        """Pin chunks for so many seconds, under the owner's number of the lease: [n] each.

        Those that are not READY any more with their generations come too late.
        """
        self._uses.set_time(now)
        pinned = self._directory.ready(slots, generations)
        if pinned:
            self._slots.unpinned(self._slots.leases.hold(owner, number, pinned, now, now + seconds))
            used = list(dict.fromkeys(pinned))
            self._slots.end_loans(used)
            policy = self._slots.policy  # a chunk that a fuller store has replaced is not in it
            policy.refresh_all([slot for slot in reversed(used) if slot in policy], now)
            self._uses.mark(used)
            if self._slots.demotable is not None:
                self._slots.demotable.pinned(used)
        counts = self._counts
        counts.asked += len(slots)
        counts.hits += len(pinned)
        counts.pins_late += len(slots) - len(pinned)
        counts.leases += bool(pinned)

    def refuse_pin(self, chunks: int) -> None:
        """Count chunks that are not pinned, because their owner has too many leases."""
        self._counts.asked += chunks
        self._counts.pins_refused += chunks

    def unpin(self, lease_id: int, owner: int) -> bool:
        """Give a lease back. False where it has run out or is not this session's."""
        unpinned = self._slots.leases.release(lease_id, owner)
        if unpinned is None:
            return False
        self._slots.unpinned(unpinned)
        return True

    def finished(self, keys: Sequence[bytes], now: float, label: Label = Label.NONE) -> int:
        """A request with these keys has finished, its head first.

        Those that are here are as recent as the request, whether their bytes are here already or
        not, and their loans end.

        Returns:
            How many of them, each counted once, are here.
        """
        slots = self._find(keys)
        self._slots.end_loans(slots)
        # The tail of a prompt is useless without its head, so it has to look colder.
        self._slots.policy.use_all(slots[::-1], now, label)
        self._uses.set_time(now)
        self._uses.mark(slots)
        if self._slots.demotable is not None:
            self._slots.demotable.finished(slots)
        return len(slots)

    def relabel(self, keys: Sequence[bytes], label: Label) -> None:
        """A request that has finished before gets another label, if its last chunk is here.

        Where that is gone, the deepest chunk left may be another request's too. Loans end anyway.
        """
        slots = self._find(keys)
        self._slots.end_loans(slots)
        if slots and self._directory.find(keys[-1]) >= 0:
            self._slots.policy.relabel_all(slots[::-1], label)

    def _find(self, keys: Sequence[bytes]) -> list[int]:
        """The slots of those of these keys that are here, each once."""
        found = dict.fromkeys(map(self._directory.find, keys))
        found.pop(-1, None)
        return list(found)
