"""Which slots a scheduler is lent ahead of need, or a tier fills; which loans are taken back."""

from collections.abc import Callable

from kvd.cache.directory import Refs
from kvd.cache.slots import Slots
from kvd.cache.uses import Uses
from kvd.metrics.counts import ChunkCounts
from kvd.pool.pool import Pool

AT_ONCE = 1024  # slots: a millisecond or two
PARTS = 4  # no engine has more than this part of its share of the chunks on loan by eviction
PARTS_AHEAD = 2  # nor more than this part of its share of all slots, unless it stores in bulk


class Lending:
    """Lends the slots of one namespace; `sweep` frees some whose chunks a reset has dropped."""

    def __init__(
        self,
        slots: Slots,
        pool: Pool,
        uses: Uses,
        counts: ChunkCounts,
        sweep: Callable[[], None],
    ) -> None:
        self._slots = slots
        self._pool = pool
        self._uses = uses
        self._counts = counts
        self._sweep = sweep

    def most_ahead(self, engines: int) -> int:
        """How many slots each of so many engines may have on loan without asking for them."""
        return max(1, self._slots.space.geometry.num_slots // (PARTS_AHEAD * engines))

    def lend(
        self,
        owner: int,
        wanted: int,
        engines: int,
        now: float,
        usable: int | None = None,
        *,
        evict: bool = True,
    ) -> tuple[list[int], list[int]]:
        """Lend slots ahead of need to one of the namespace's `engines`.

        It gets some where it has fewer than half of what is `wanted`: first of what is free in
        this namespace and of what no namespace owns, shared with the other engines. Where it may
        `evict`, others' columns come next, up to a part of its share of all slots, and then
        chunks of this namespace, up to a part of its share of what that holds: one that holds
        little does not lose it all for loans. While only `usable` bytes of the pool can be used,
        as it is filled, nothing is evicted.

        Returns:
            Slots and generations.
        """
        have = len(self._slots.loans.of(owner))
        if 2 * have >= wanted:
            return [], []
        self._uses.set_time(now)
        space = self._slots.space
        need = min(wanted - have, AT_ONCE)
        while space.free_slots < need and self._slots.forgotten:
            self._sweep()
        self._pool.acquire(space, need * engines, usable, evict=False)
        slots = space.take(min(need, space.free_within(usable) // engines), usable)
        if evict and usable is None:
            parts = PARTS * engines
            more = min(need, max(1, space.geometry.num_slots // parts) - have) - len(slots)
            if more > 0:
                self._pool.acquire(space, more)
                slots += space.take(more)
            held = self._pool.held_bytes(space) // sum(space.geometry.slot_bytes)
            more = min(need, max(1, held // parts) - have) - len(slots)
            if more > 0:
                slots += self._evict(more)
        return slots, self._slots.lend(slots, owner, now)

    def room(self, n: int, now: float, usable: int | None = None) -> list[int]:
        """Up to `n` slots for chunks that come up from a tier, taken as loans are.

        First of what is free, then others' columns, then chunks of this namespace that nobody
        loads; nothing is evicted while only `usable` bytes of the pool can be used.
        """
        self._uses.set_time(now)
        space = self._slots.space
        while space.free_slots < n and self._slots.forgotten:
            self._sweep()
        self._pool.acquire(space, n, usable, evict=False)
        slots = space.take(n, usable)
        if len(slots) < n and usable is None:
            self._pool.acquire(space, n - len(slots))
            slots += space.take(n - len(slots))
            slots += self._evict(n - len(slots))
        return slots

    def _evict(self, n: int) -> list[int]:
        """Up to `n` slots of chunks of this namespace, which go for it."""
        victims = self._slots.victims(n)
        if victims:
            self._counts.eviction_age.observe_all(self._uses.ages(victims))
        self._counts.evicted += len(victims)
        self._slots.directory.free(victims)
        return sorted(victims)

    def call_in(self, owner: int) -> Refs:
        """Take back an owner's loans; slots to be revoked."""
        return self._slots.call_in(self._slots.loans.take(owner))

    def call_in_all(self) -> Refs:
        """Take back all loans, and what stores that have lost a race hold; to be revoked."""
        return self._slots.call_in(self._slots.loans.take_all())

    def call_in_spare(self, since: float, but: int | None = None) -> Refs:
        """Take back the loans of owners that have used none since then; slots to be revoked.

        None of `but`, who asks for it. And whoever's loans are in a column that is to leave.
        """
        loans, stays = self._slots.loans, self._slots.space.stays
        refs = [ref for owner in loans.idle_since(since, but) for ref in self.call_in(owner)]
        if self._slots.space.leaving:
            leaving = [(owner, slot) for owner, slot, _ in loans.entries() if not stays(slot)]
            for owner, slot in leaving:
                loans.remove(owner, slot)
            refs += self._slots.call_in([slot for _, slot in leaving])
        return refs
