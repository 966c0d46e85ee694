"""The states of a namespace's slots.

Besides its record in the directory, a slot is listed in one of these tables by its state (two where
it says "too")::

    FREE      space: free for use
              loans: its owner may give it to a key
    WRITING   tickets: its owner may write it until a deadline; policy, too, for its order
    READY     policy: it may be evicted, unless a lease pins it
              loans, too: its owner may give the slot to another key; policy has it reserved
              doomed: it has left the index; freed with the last lease that pins it
              forgotten: dropped by a reset, not found any more; a sweep frees it
    DRAINING  draining: lanes, or the tier that was to fill it, may still write there. FREE when
              each has answered that it does not. Loads need no such wait, for lanes check the
              generation after the copy

Each method of `Slots` moves slots from one state to the next, in all these tables at once.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvd.cache.directory import ChunkRefs, DirectoryWriter
from kvd.cache.eviction import EvictionPolicy
from kvd.cache.leases import Leases, Loans
from kvd.errors import IntegrityError
from kvd.metrics.counts import ChunkCounts
from kvd.pool.geometry import PoolSpace
from kvd_proto.directory import TIER_OWNER, SlotState, loan_number

_READY = int(SlotState.READY)

Ints = Sequence[int] | npt.NDArray[np.integer]


class Slots:
    """The slots of one namespace.

    Attributes:
        tickets: WRITING slot -> deadline.
        filling: WRITING slot that a tier fills -> name of the tier's process.
        forgotten: number of READY slots whose chunks a reset has dropped.
    """

    def __init__(
        self,
        directory: DirectoryWriter,
        policy: EvictionPolicy,
        space: PoolSpace,
        counts: ChunkCounts,
    ) -> None:
        self.directory = directory
        self.policy = policy
        self.space = space
        self.counts = counts
        self.leases = Leases()
        self.loans = Loans()
        self.tickets: dict[int, float] = {}
        self.filling: dict[int, str] = {}
        self._draining: dict[int, set[str]] = {}  # slot -> lanes or tier that may still write there
        self._doomed: set[int] = set()
        self.forgotten = 0
        self._sweep_at = 0  # the slot from which `take_forgotten` continues

    def lend(self, slots: Sequence[int], owner: int, now: float) -> list[int]:
        """Lend FREE slots of the space and reserved READY slots; return their generations."""
        generations = self.directory.lend(slots)
        self.loans.lend(owner, slots, generations, now)
        return generations

    def end_loans(self, slots: Iterable[int]) -> None:
        """End the loans of those of these slots that are on loan."""
        lent = [slot for slot in slots if slot in self.loans]
        for slot in lent:
            self.loans.end(slot)
        self.return_slots(lent)

    def return_slots(self, slots: Sequence[int]) -> None:
        """Return slots whose loans ended: FREE ones to the space, READY ones to the policy."""
        if not slots:
            return
        self.directory.end_loans(slots)
        state = self.directory.state
        free = [slot for slot in slots if state(slot) == SlotState.FREE]
        self.space.give(free)
        self.policy.release(slots if not free else [s for s in slots if state(s) == _READY])

    def begin_writing(self, slots: list[int], deadline: float, now: float) -> None:
        """Note that slots are WRITING; a prompt's head comes first, and is evicted last."""
        self.tickets.update(dict.fromkeys(slots, deadline))
        self.policy.insert_all(slots[::-1], now)

    def begin_filling(self, slots: list[int], tier: str, deadline: float, now: float) -> None:
        """`begin_writing` for slots that a tier fills."""
        self.filling.update(dict.fromkeys(slots, tier))
        self.begin_writing(slots, deadline, now)

    def reserve(self, n: int, now: float) -> list[int]:
        """Reserve up to `n` READY slots that are evicted next, none of them pinned or on loan."""
        pins, policy, tickets = self.leases.pins, self.policy, self.tickets
        if n <= 0:
            return []

        def may_evict(slot: int) -> bool:
            # A slot of the policy is READY if it is not WRITING.
            return slot not in pins and slot not in tickets

        # Bound n by the slots that may go: the policy would search all others for more.
        num_staying = len(tickets) + len(pins) - len(self._doomed) + policy.num_reserved
        return policy.reserve(min(n, len(policy) - num_staying), may_evict, now)

    def evict(self, slots: Sequence[int], now: float) -> None:
        """READY -> FREE; the slots do not go back to the space."""
        self.policy.evict(slots, now)
        self.directory.free(slots)

    def make_ready(self, slot: int) -> None:
        """WRITING -> READY."""
        del self.tickets[slot]
        self.filling.pop(slot, None)
        self.directory.make_ready(slot)

    def give_up(self, slots: Sequence[int]) -> ChunkRefs:
        """WRITING -> DRAINING.

        Returns:
            The chunks that lanes have to revoke: those that no tier fills.
        """
        for slot in slots:
            self.directory.write_state(slot, SlotState.DRAINING)
            self.directory.unindex(slot)
            self.policy.remove(slot)
            del self.tickets[slot]
        self._draining.update((slot, set()) for slot in slots)
        filled = [slot for slot in slots if slot in self.filling]
        for slot in filled:
            self._draining[slot].add(self.filling.pop(slot))
        self.counts.not_promoted += len(filled)
        self.counts.dropped += len(slots) - len(filled)
        return self.refs([slot for slot in slots if not self._draining[slot]])

    def wait_for(self, lanes: Collection[str], slots: ChunkRefs) -> None:
        """Free these DRAINING slots once these lanes have ended their writes; at once if none."""
        for slot, _ in slots:
            self._draining[slot] = set(lanes)
        if not lanes:
            self._free_drained("", [slot for slot, _ in slots])

    def writes_ended(self, writer: str, slots: Ints, generations: Ints) -> int:
        """Note that `writer` no longer writes these slots; DRAINING -> FREE after the last writer.

        `writer` is a lane's device, or the name given to `begin_filling`. Slots of another
        generation are ignored.

        Returns:
            How many slots became FREE.
        """
        pairs = zip(map(int, slots), map(int, generations), strict=True)
        generation = self.directory.generation
        return self._free_drained(
            writer, [slot for slot, g in pairs if slot in self._draining and generation(slot) == g]
        )

    def writer_lost(self, writer: str) -> None:
        """Note that a writer (a lane or a tier's process) has ended: it writes no slot any more."""
        self._free_drained(writer, list(self._draining))

    def _free_drained(self, writer: str, slots: Sequence[int]) -> int:
        freed = []
        for slot in slots:
            writers = self._draining[slot]
            writers.discard(writer)
            if not writers:
                del self._draining[slot]
                self.directory.write_state(slot, SlotState.FREE)
                freed.append(slot)
        self.space.give(freed)
        return len(freed)

    def drop(self, slots: list[int]) -> tuple[int, int]:
        """READY -> FREE for unpinned slots; pinned ones are freed with their last lease.

        None may be on loan.

        Returns:
            The number of freed slots, and of deferred ones.
        """
        for slot in slots:
            if slot in self.policy:
                self.policy.remove(slot)
            else:
                self.forgotten -= 1
        return self.free_or_defer(slots)

    def forget(self) -> tuple[int, int]:
        """Drop every READY chunk: forgotten, or doomed if pinned; return the number of each.

        Takes the same time however many are forgotten. None may be on loan or WRITING.
        """
        if self.tickets or self.loans:
            raise IntegrityError(
                f"{len(self.tickets)} slots are being written, {len(self.loans)} on loan"
            )
        _, num_doomed = self.drop([slot for slot in self.leases.pins if slot in self.policy])
        num_forgotten = len(self.policy)
        self.policy.clear()
        self.directory.forget()
        self.forgotten += num_forgotten
        return num_forgotten, num_doomed

    def take_forgotten(self, count: int) -> list[int]:
        """Return the forgotten ones of the next `count` slots; the caller calls `free_or_defer`."""
        first = self._sweep_at
        slots = self._forgotten_among(first, count)
        self._sweep_at = first + count if first + count < self.directory.num_slots else 0
        self.forgotten -= len(slots)
        return slots

    def _forgotten_among(self, first: int, count: int) -> list[int]:
        below_floor = self.directory.forgotten_slots(first, count)
        return [slot for slot in below_floor if slot not in self._doomed]

    def free_or_defer(self, slots: list[int]) -> tuple[int, int]:
        """Free unpinned slots; pinned ones are freed with their last lease.

        The policy lists none of them. Returns as `drop`.
        """
        pins = self.leases.pins
        pinned = [slot for slot in slots if slot in pins]
        unpinned = [slot for slot in slots if slot not in pins] if pinned else slots
        self.directory.free(unpinned)
        for slot in pinned:
            self.directory.unindex(slot)
        self.space.give(unpinned)
        self._doomed.update(pinned)
        return len(unpinned), len(pinned)

    def free_unpinned(self, slots: Iterable[int]) -> None:
        """Free the doomed ones of these slots, which no lease pins any more."""
        freed = self._doomed.intersection(slots)
        if freed:
            self._doomed -= freed
            for slot in freed:
                self.directory.write_state(slot, SlotState.FREE)
            self.space.give(freed)

    def busy(self) -> Iterable[int]:
        """Yield the slots that cannot be freed: pinned, being written, draining."""
        yield from self.leases.pins
        yield from self.tickets
        yield from self._draining

    @property
    def is_idle(self) -> bool:
        """No slot is on loan, being written, draining or pinned."""
        return not (self.loans or self.tickets or self._draining or self.leases.pins)

    def refs(self, slots: Sequence[int]) -> ChunkRefs:
        """Return slots with their present generations."""
        return [(slot, self.directory.generation(slot)) for slot in slots]

    def stats(self) -> dict[str, int]:
        """Return the number of slots by state; "ready" includes pinned and doomed ones."""
        return {
            "ready": len(self.policy) - len(self.tickets) + len(self._doomed),
            "lent": len(self.loans),
            "writing": len(self.tickets),
            "draining": len(self._draining),
            "pinned": len(self.leases.pins),
            "doomed": len(self._doomed),
        }

    def check_integrity(self) -> None:
        """Raise IntegrityError if directory, policy, leases, loans, tickets or space disagree."""
        for table in (self.directory, self.policy, self.leases, self.loans, self.space):
            table.check_integrity()
        num_slots = self.directory.num_slots
        self.check_slots(0, num_slots)
        order, forgotten = self.policy.order(), self._forgotten_among(0, num_slots)
        if len(forgotten) != self.forgotten:
            raise IntegrityError(f"{len(forgotten)} slots are forgotten, counted {self.forgotten}")
        if not self._doomed <= self.leases.pins.keys():
            raise IntegrityError(f"doomed slots {self._doomed}, pins {self.leases.pins}")
        if sorted((*order, *forgotten)) != sorted(self.directory.indexed_slots()):
            raise IntegrityError("index and eviction policy have different slots")
        owned = [slot for slot in self.tickets if self.directory.owner(slot) == TIER_OWNER]
        if sorted(owned) != sorted(self.filling):
            raise IntegrityError(f"tiers fill the slots {self.filling}, they own {owned}")
        for _, slot, generation in self.loans.entries():
            if self.directory.loan_of(slot) != loan_number(generation):
                raise IntegrityError(f"slot {slot} is lent for {generation}, its record differs")
        for slot in self.tickets:
            writers = self.space.geometry.writers(slot)
            if self.directory.ranks_done(slot) & writers == writers:
                raise IntegrityError(f"slot {slot} has all shares and is WRITING")

    def check_slots(self, first: int, count: int) -> int:
        """Check `count` slots from `first` on; return how many hold a chunk.

        Raises:
            IntegrityError: the tables disagree about a slot.
        """
        slots = range(first, min(first + count, self.directory.num_slots))
        tickets, loans, num_chunks = self.tickets, self.loans, 0
        free = self.space.free_among(slots.start, slots.stop)
        forgotten = set(self._forgotten_among(first, count))
        for slot in slots:
            state = self.directory.state(slot)
            ordered, doomed = slot in self.policy, slot in self._doomed
            ready_tables = (ordered and slot not in tickets, doomed, slot in forgotten)
            listed = {
                SlotState.WRITING: slot in tickets,
                SlotState.READY: sum(ready_tables) == 1,
                SlotState.DRAINING: slot in self._draining,
            }
            if [name for name, is_listed in listed.items() if is_listed] != [state] * (state != 0):
                raise IntegrityError(f"slot {slot} is {SlotState(state).name}, listed: {listed}")
            lent, reserved = slot in loans, self.policy.is_reserved(slot)
            if bool(self.directory.loan_of(slot)) != lent:
                raise IntegrityError(f"slot {slot}: its record contradicts {lent=}")
            if reserved != (lent and state == SlotState.READY) or (reserved and not ordered):
                raise IntegrityError(f"slot {slot} is on loan: {lent}, reserved: {reserved}")
            if lent and state not in {SlotState.FREE, SlotState.READY}:
                raise IntegrityError(f"slot {slot} is {SlotState(state).name} and on loan")
            if (slot in free) != (state == SlotState.FREE and not lent):
                raise IntegrityError(
                    f"slot {slot} is {SlotState(state).name}, but not so in {free}"
                )
            if (doomed or slot in self.leases.pins) and (state != SlotState.READY or lent):
                raise IntegrityError(f"slot {slot} is pinned and {SlotState(state).name}: {lent=}")
            if slot in tickets and not ordered:
                raise IntegrityError(f"slot {slot} is WRITING and not in the order of eviction")
            if ordered and self.directory.find(self.directory.key(slot)) != slot:
                raise IntegrityError(f"the chunk in slot {slot} cannot be found by its key")
            num_chunks += state != SlotState.FREE
        return num_chunks
