"""Which slots a scheduler is lent ahead of need, or a tier fills."""

from collections.abc import Callable

from kvd.cache.slots import Slots
from kvd.cache.uses import Uses
from kvd.metrics.counts import ChunkCounts
from kvd.pool.pool import Pool

AT_ONCE = 1024  # slots: a millisecond or two
PARTS = 4  # no engine evicts other namespaces' chunks for more than this part of its share
PARTS_ALONE, PARTS_OF_SEVERAL = 4, 32
"""What part of its share an engine has on loan ahead of need: alone, or beside others."""


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

    def share(self, engines: int) -> int:
        """How many slots each of so many engines may have on loan at most."""
        return max(1, self._slots.space.geometry.num_slots // engines)

    def most_ahead(self, engines: int) -> int:
        """How many slots each of so many engines may have on loan without asking for them.

        One that is alone gives its loans away in the order of eviction. What is on loan to one of
        several is not evicted for the others, so it has few.
        """
        parts = PARTS_ALONE if engines == 1 else PARTS_OF_SEVERAL
        return max(1, self.share(engines) // parts)

    def lend(
        self,
        owner: int,
        need: int,
        engines: int,
        now: float,
        usable: int | None = None,
        *,
        evict: bool = True,
    ) -> tuple[list[int], list[int]]:
        """Lend up to `need` slots to one of the namespace's `engines`, in this order.

        1. of what is free in this namespace and of what no namespace owns;
        2. of other namespaces' columns, where it may `evict`, up to a part of its share;
        3. of this namespace's chunks those that are evicted next. They stay until it gives their
           slots to keys.

        While only `usable` bytes of the pool can be used, as it is filled, there is 1 alone.

        Returns:
            Slots, and the generation that each has once it is given to a key.
        """
        self._uses.set_time(now)
        space = self._slots.space
        need = min(need, AT_ONCE)
        self._sweep_for(need)
        self._pool.acquire(space, need, usable, evict=False)
        slots = space.take(need, usable)
        if usable is None:
            if evict:
                part = max(1, self.share(engines) // PARTS)
                more = min(need, part - self._slots.loans.count(owner)) - len(slots)
                if more > 0:
                    self._pool.acquire(space, more)
                    slots += space.take(more)
            slots += self._slots.reserve(need - len(slots), now)
        return slots, self._slots.lend(slots, owner, now)

    def room(self, n: int, now: float, usable: int | None = None) -> list[int]:
        """Up to `n` FREE slots for chunks that come up from a tier.

        First of what is free, then of others' columns, then of chunks of this namespace that no
        load pins, which are evicted; nothing is evicted while only `usable` bytes of the pool can
        be used.
        """
        self._uses.set_time(now)
        space = self._slots.space
        self._sweep_for(n)
        self._pool.acquire(space, n, usable, evict=False)
        slots = space.take(n, usable)
        if len(slots) < n and usable is None:
            self._pool.acquire(space, n - len(slots))
            slots += space.take(n - len(slots))
            victims = self._slots.reserve(n - len(slots), now)
            self._slots.evict(victims, now)
            self._uses.count_evicted(victims, self._counts)
            slots += victims
        return slots

    def _sweep_for(self, n: int) -> None:
        while self._slots.space.free_slots < n and self._slots.forgotten:
            self._sweep()

    def end_loans(self, owner: int) -> None:
        """End an owner's loans."""
        self._slots.end_loans(self._slots.loans.of(owner))

    def end_all_loans(self) -> None:
        """End every loan."""
        self._slots.end_loans(list(self._slots.loans))

    def end_unused_loans(self, since: float, but: int | None = None) -> None:
        """End the loans of owners, except `but`, that have used none since then.

        All of them: those that were lent last would be given away first, and are evicted too early.
        """
        for owner in self._slots.loans.unused_since(since, but):
            self.end_loans(owner)
