"""What engines use of a namespace's slots: loans ahead of need, and the chunks that they load.

Every use of a chunk (its store begun, pinned for a load, named by a request that has finished)
has a stamp, microseconds that always grow: a time and an order. A chunk's age at eviction says
whether the pool is large enough: those evicted within minutes would have been found by the
next turn of a conversation.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvd.cache.slots import Slots
from kvd.metrics.counts import ChunkCounts
from kvd.pool.pool import Pool
from kvd_proto.jobs import FEW
from kvd_proto.messages import Label


class UseStamps:
    """The last uses of one namespace's chunks.

    Args:
        stamps: one for each slot.
        pool: whose stamps grow over all namespaces.
        counts: of evicted chunks.
    """

    def __init__(self, stamps: npt.NDArray[np.uint64], pool: Pool, counts: ChunkCounts) -> None:
        self._counts = counts
        self._stamps = stamps
        self._marks = stamps.data  # for few of them
        self._pool = pool
        self._now = 0  # microseconds

    def set_time(self, now: float) -> None:
        """Set the time, `now`, in seconds of a clock that never goes back, also over restarts."""
        self._now = max(self._now, int(now * 1e6))

    @property
    def now(self) -> float:
        """The time that was set last, in seconds."""
        return self._now / 1e6

    def mark(self, slots: list[int]) -> None:
        """Note that these were of use now, the hottest first."""
        if slots:
            last = self._pool.tick(len(slots), self._now)
            if len(slots) <= FEW:
                for slot in slots:
                    self._marks[slot] = last
                    last -= 1
                return
            self._stamps[slots[::-1]] = np.arange(last - len(slots) + 1, last + 1, dtype=np.uint64)

    def count_evicted(self, slots: Sequence[int]) -> None:
        """Count chunks that were evicted from these slots, and how long they were of no use."""
        if slots:
            self._counts.eviction_age.observe_all(self.ages(slots))
            self._counts.evicted += len(slots)

    def ages(self, slots: Sequence[int]) -> npt.NDArray[np.float64]:
        """Seconds, to the millisecond, since each of these chunks was of use."""
        # Stamps of uses at the same moment are a microsecond apart.
        ages = np.maximum(self._now - self._stamps[slots].astype(np.float64), 0.0)
        rounded: npt.NDArray[np.float64] = np.round(ages / 1e6, 3)
        return rounded


AT_ONCE = 1024  # slots: a millisecond or two
PARTS = 4  # no engine evicts other namespaces' chunks for more than this part of its share
PARTS_ALONE, PARTS_OF_SEVERAL = 4, 32
"""What part of its share an engine has on loan ahead of need: alone, or beside others."""


class Lending:
    """Lends the slots of one namespace; `sweep` frees some whose chunks a reset has dropped."""

    def __init__(
        self, slots: Slots, pool: Pool, uses: UseStamps, sweep: Callable[[], None]
    ) -> None:
        self._slots = slots
        self._pool = pool
        self._uses = uses
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

    def take_free(self, n: int, now: float, usable: int | None = None) -> list[int]:
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
            self._uses.count_evicted(victims)
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


class Loads:
    """What requests use of one namespace's chunks."""

    def __init__(self, slots: Slots, uses: UseStamps) -> None:
        self._slots = slots
        self._directory = slots.directory
        self._uses = uses
        self._counts = slots.counts

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
            if self._slots.demotion_queues is not None:
                self._slots.demotion_queues.pinned(used)
        counts = self._counts
        counts.asked += len(slots)
        counts.hits += len(pinned)
        counts.pins_late += len(slots) - len(pinned)
        counts.leases += bool(pinned)

    def count_refused_pin(self, chunks: int) -> None:
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

    def refresh(self, keys: Sequence[bytes], now: float, label: Label = Label.NONE) -> int:
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
        if self._slots.demotion_queues is not None:
            self._slots.demotion_queues.finished(slots)
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
