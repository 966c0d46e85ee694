"""The life of a slot, and who answers for it in each state.

A slot that is not free at hand is in exactly one place besides the directory::

    FREE      loans: its owner may give it to a key
    WRITING   tickets: its owner may write it until a deadline; policy, too, for its place
    READY     policy: it may be evicted, unless a lease pins it; loans, too, where its owner may
              give the slot to another key, and then the policy has it reserved
              doomed: it has left the index, and goes with the last lease that pins it
              forgotten: dropped by a reset, no longer found; a sweep frees it
    DRAINING  draining: the lanes may have something under way there. It is FREE when every
              lane has said that nothing writes there, or the tier that was to fill it;
              loads need no such wait, for lanes check the generation after the copy

Each method takes slots from one state to the next, in all places at once.

Who holds slots: schedulers, with loans to give to keys, and loads, with leases that pin chunks.

A slot on loan is FREE, or READY with a chunk that the policy would evict next; that chunk is found,
pinned and loaded as any other. The loan ends when the broker reads the step that gives the slot to
a key, when the chunk is used, or when the slot is needed elsewhere. To end a loan takes no message
and no time: nothing is written into a slot before it is WRITING. A step that uses a loan which has
ended loses that store.

A lease pins READY chunks until it is given back or its deadline comes.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvd.cache.directory import DirectoryWriter, Refs
from kvd.cache.eviction import EvictionPolicy
from kvd.errors import IntegrityError
from kvd.metrics.counts import ChunkCounts
from kvd.pool.geometry import PoolSpace
from kvd_proto.directory import TIER_OWNER, SlotState, loan_number


class Loans:
    """The slots of one namespace that are on loan."""

    def __init__(self) -> None:
        self._of: dict[int, dict[int, int]] = {}  # owner -> slot -> generation
        self._owners: dict[int, int] = {}  # slot -> owner
        self._used: dict[int, float] = {}  # owner -> when it was last lent a slot, or used one

    def lend(
        self, owner: int, slots: Sequence[int], generations: Sequence[int], now: float
    ) -> None:
        """Lend slots that are not on loan to `owner`."""
        if slots:
            self._of.setdefault(owner, {}).update(zip(slots, generations, strict=True))
            self._owners.update(dict.fromkeys(slots, owner))
            self._used[owner] = now

    def count(self, owner: int) -> int:
        """How many loans an owner has."""
        return len(self._of.get(owner, ()))

    def of(self, owner: int) -> list[int]:
        """The slots that are on loan to an owner, lent first first."""
        return list(self._of.get(owner, ()))

    def use(self, owner: int, slot: int, generation: int, now: float) -> bool:
        """End a loan because its owner gives the slot to a key; False where it is none."""
        if self._of.get(owner, {}).get(slot) != generation:
            return False
        self.end(slot)
        if owner in self._used:
            self._used[owner] = now
        return True

    def end(self, slot: int) -> None:
        """End a slot's loan."""
        owner = self._owners.pop(slot)
        slots = self._of[owner]
        del slots[slot]
        if not slots:
            del self._of[owner], self._used[owner]

    def unused_since(self, when: float, but: int | None = None) -> list[int]:
        """The owners, except `but`, that have used no loan since `when` and were lent none."""
        return [owner for owner, used in self._used.items() if used <= when and owner != but]

    def __iter__(self) -> Iterator[int]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, slot: object) -> bool:
        return slot in self._owners

    def entries(self) -> Iterable[tuple[int, int, int]]:
        """Owner, slot and generation of every loan."""
        for owner, slots in self._of.items():
            for slot, generation in slots.items():
                yield owner, slot, generation

    def check_integrity(self) -> None:
        """Raise IntegrityError where a slot is lent twice, or an owner without loans is kept."""
        owners = {slot: owner for owner, slot, _ in self.entries()}
        if owners != self._owners or sum(map(len, self._of.values())) != len(owners):
            raise IntegrityError(f"loans {self._of}, by slot {self._owners}")
        if self._of.keys() != self._used.keys() or not all(self._of.values()):
            raise IntegrityError(f"owners of loans: {self._of}, with times: {self._used}")


class Lease(msgspec.Struct, frozen=True, gc=False):
    """A pin on slots from `since` on, until given back or `deadline`."""

    slots: tuple[int, ...]
    since: float
    deadline: float


class Leases:
    """Every lease of one namespace, by owner and number, and how many pins each slot has by them.

    What ends a lease returns the slots that no lease pins any more.
    """

    def __init__(self) -> None:
        self.pins: dict[int, int] = {}
        self._leases: dict[int, dict[int, Lease]] = {}  # owner -> number -> lease

    def held_by(self, owner: int) -> int:
        """How many leases an owner has."""
        return len(self._leases.get(owner, ()))

    def __len__(self) -> int:
        return sum(map(len, self._leases.values()))

    def hold(
        self, owner: int, number: int, slots: Sequence[int], now: float, deadline: float
    ) -> list[int]:
        """Pin the slots under this number; a lease that the owner has by that number ends."""
        pins = self.pins
        for slot in slots:
            pins[slot] = pins.get(slot, 0) + 1
        unpinned = self.release(number, owner) or []
        self._leases.setdefault(owner, {})[number] = Lease(tuple(slots), now, deadline)
        return unpinned

    def count_until(self, when: float) -> int:
        """How many of them were granted at `when` or before."""
        return sum(lease.since <= when for of in self._leases.values() for lease in of.values())

    def release(self, number: int, owner: int) -> list[int] | None:
        """Give a lease back. None where it has run out or is somebody else's."""
        if number not in self._leases.get(owner, ()):
            return None
        return self._end(owner, [number])

    def expire(self, now: float) -> tuple[int, list[int]]:
        """End the leases whose deadline has come: how many, and the slots."""
        count, unpinned = 0, list[int]()
        for owner, of in list(self._leases.items()):
            ended = [number for number, lease in of.items() if lease.deadline <= now]
            count += len(ended)
            unpinned += self._end(owner, ended)
        return count, unpinned

    def drop_owner(self, owner: int) -> list[int]:
        """End the leases of one owner."""
        return self._end(owner, list(self._leases.get(owner, ())))

    def _end(self, owner: int, numbers: Iterable[int]) -> list[int]:
        pins, unpinned = self.pins, []
        of = self._leases.get(owner, {})
        for number in numbers:
            for slot in of.pop(number).slots:
                left = pins[slot] - 1
                if left:
                    pins[slot] = left
                else:
                    del pins[slot]
                    unpinned.append(slot)
        if not of:
            self._leases.pop(owner, None)
        return unpinned

    def check_integrity(self) -> None:
        """Raise IntegrityError where pins are not what the leases add up to."""
        slots = (lease.slots for of in self._leases.values() for lease in of.values())
        pins = Counter(slot for each in slots for slot in each)
        if pins != self.pins:
            raise IntegrityError(f"pins {self.pins}, by the leases {dict(pins)}")
        if not all(self._leases.values()):
            raise IntegrityError("an owner without leases is kept")


_READY = int(SlotState.READY)

Ints = Sequence[int] | npt.NDArray[np.integer]


class Slots:
    """The slots of one namespace. `space` is where they come from and go back to."""

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
        self.tickets: dict[int, float] = {}  # WRITING slot -> deadline
        self.filling: dict[int, str] = {}  # those of them that a tier fills -> its name
        self._draining: dict[int, set[str]] = {}  # slot -> lanes or tier that may still write there
        self._doomed: set[int] = set()
        self.forgotten = 0
        self._swept = 0  # where `sweep` goes on

    def lend(self, slots: Sequence[int], owner: int, now: float) -> list[int]:
        """Lend FREE slots that were taken from the space, and reserved READY ones.

        Returns:
            The generation that each has once it is given to a key.
        """
        generations = self.directory.lend(slots)
        self.loans.lend(owner, slots, generations, now)
        return generations

    def end_loans(self, slots: Iterable[int]) -> None:
        """End the loans of those that are on loan."""
        ended = [slot for slot in slots if slot in self.loans]
        for slot in ended:
            self.loans.end(slot)
        self.return_slots(ended)

    def return_slots(self, slots: Sequence[int]) -> None:
        """These were on loan until now: FREE ones are free at hand, READY ones candidates again."""
        if not slots:
            return
        self.directory.end_loans(slots)
        state = self.directory.state
        free = [slot for slot in slots if state(slot) == SlotState.FREE]
        self.space.give(free)
        self.policy.release(slots if not free else [s for s in slots if state(s) == _READY])

    def started(self, slots: list[int], deadline: float, now: float) -> None:
        """These are WRITING now, a prompt's head first, which must be the last to be evicted."""
        self.tickets.update(dict.fromkeys(slots, deadline))
        self.policy.insert_all(slots[::-1], now)

    def fill(self, slots: list[int], tier: str, deadline: float, now: float) -> None:
        """These are WRITING now: a tier fills them. A prompt's head comes first."""
        self.filling.update(dict.fromkeys(slots, tier))
        self.started(slots, deadline, now)

    def reserve(self, n: int, now: float) -> list[int]:
        """Up to `n` READY slots whose chunks are evicted next: none that is pinned or on loan."""
        pins, policy, tickets = self.leases.pins, self.policy, self.tickets
        if n <= 0:
            return []

        def may_go(slot: int) -> bool:
            """What the policy knows is READY where it is not WRITING."""
            return slot not in pins and slot not in tickets

        # Where fewer may go than are needed, nobody looks through all that stay.
        kept = len(tickets) + len(pins) - len(self._doomed) + policy.num_reserved
        return policy.reserve(min(n, len(policy) - kept), may_go, now)

    def evict(self, slots: Sequence[int], now: float) -> None:
        """READY -> FREE for chunks that make room; the slots are the caller's."""
        self.policy.evict(slots, now)
        self.directory.free(slots)

    def finish(self, slot: int) -> None:
        """WRITING -> READY."""
        del self.tickets[slot]
        self.filling.pop(slot, None)
        self.directory.make_ready(slot)

    def give_up(self, slots: Sequence[int]) -> Refs:
        """WRITING -> DRAINING; what is to be revoked by lanes: nothing that a tier fills."""
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

    def wait_for(self, lanes: Collection[str], slots: Refs) -> None:
        """Only when each of these lanes has answered are these DRAINING slots FREE."""
        for slot, _ in slots:
            self._draining[slot] = set(lanes)
        if not lanes:
            self._answered("", [slot for slot, _ in slots])

    def revoked(self, lane: str, slots: Ints, generations: Ints) -> int:
        """A lane has nothing under way in these slots; how many are FREE now, from DRAINING.

        Or a tier, by the name that `fill` was given.
        """
        pairs = zip(map(int, slots), map(int, generations), strict=True)
        generation = self.directory.generation
        return self._answered(
            lane, [slot for slot, g in pairs if slot in self._draining and generation(slot) == g]
        )

    def lane_lost(self, lane: str) -> None:
        """A lane, or a tier, is gone, and writes nowhere any more."""
        self._answered(lane, list(self._draining))

    def _answered(self, lane: str, slots: Sequence[int]) -> int:
        freed = []
        for slot in slots:
            waiting = self._draining[slot]
            waiting.discard(lane)
            if not waiting:
                del self._draining[slot]
                self.directory.write_state(slot, SlotState.FREE)
                freed.append(slot)
        self.space.give(freed)
        return len(freed)

    def drop(self, slots: list[int]) -> tuple[int, int]:
        """READY -> FREE, or doomed where pinned: how many of each. None is on loan."""
        for slot in slots:
            if slot in self.policy:
                self.policy.remove(slot)
            else:
                self.forgotten -= 1
        return self.leave(slots)

    def forget(self) -> tuple[int, int]:
        """Every READY slot is forgotten, or doomed where pinned: how many of each.

        The time does not depend on how many are not pinned. None may be on loan or WRITING.
        """
        if self.tickets or self.loans:
            raise IntegrityError(f"slots are being written or on loan: {self!r}")
        _, kept = self.drop([slot for slot in self.leases.pins if slot in self.policy])
        gone = len(self.policy)
        self.policy.clear()
        self.directory.forget()
        self.forgotten += gone
        return gone, kept

    def take_forgotten(self, count: int) -> list[int]:
        """Those of the next `count` slots that are forgotten; the caller has them `leave`."""
        first = self._swept
        slots = self._forgotten_among(first, count)
        self._swept = first + count if first + count < self.directory.num_slots else 0
        self.forgotten -= len(slots)
        return slots

    def _forgotten_among(self, first: int, count: int) -> list[int]:
        old = self.directory.forgotten_slots(first, count)
        return [slot for slot in old if slot not in self._doomed]

    def leave(self, slots: list[int]) -> tuple[int, int]:
        """READY -> FREE, or doomed where pinned: how many of each."""
        pins = self.leases.pins
        kept = [slot for slot in slots if slot in pins]
        gone = [slot for slot in slots if slot not in pins] if kept else slots
        self.directory.free(gone)
        for slot in kept:
            self.directory.unindex(slot)
        self.space.give(gone)
        self._doomed.update(kept)
        return len(gone), len(kept)

    def unpinned(self, slots: Iterable[int]) -> None:
        """No lease pins these any more: the doomed ones among them are FREE."""
        freed = self._doomed.intersection(slots)
        if freed:
            self._doomed -= freed
            for slot in freed:
                self.directory.write_state(slot, SlotState.FREE)
            self.space.give(freed)

    def busy(self) -> Iterable[int]:
        """Slots that must stay: pinned, being written, draining."""
        yield from self.leases.pins
        yield from self.tickets
        yield from self._draining

    @property
    def is_idle(self) -> bool:
        """Nothing is on loan, being written, draining or pinned."""
        return not (self.loans or self.tickets or self._draining or self.leases.pins)

    def refs(self, slots: Sequence[int]) -> Refs:
        """These slots with the generations that they have now."""
        return [(slot, self.directory.generation(slot)) for slot in slots]

    def stats(self) -> dict[str, int]:
        """Chunks by state. Pinned and doomed ones are READY; doomed ones go at the last pin."""
        return {
            "ready": len(self.policy) - len(self.tickets) + len(self._doomed),
            "lent": len(self.loans),
            "writing": len(self.tickets),
            "draining": len(self._draining),
            "pinned": len(self.leases.pins),
            "doomed": len(self._doomed),
        }

    def check_integrity(self) -> None:
        """Raise IntegrityError where directory, policy, leases, tickets and space disagree."""
        for part in (self.directory, self.policy, self.leases, self.loans, self.space):
            part.check_integrity()
        num_slots = self.directory.num_slots
        self.check_slots(0, num_slots)
        order, forgotten = self.policy.order(), self._forgotten_among(0, num_slots)
        if len(forgotten) != self.forgotten:
            raise IntegrityError(f"{len(forgotten)} slots are forgotten: {self!r}")
        if not self._doomed <= self.leases.pins.keys():
            raise IntegrityError(f"doomed slots without a pin: {self!r}")
        if sorted((*order, *forgotten)) != sorted(self.directory.indexed_slots()):
            raise IntegrityError("the index has a slot that has no place in the order of eviction")
        tiers = [slot for slot in self.tickets if self.directory.owner(slot) == TIER_OWNER]
        if sorted(tiers) != sorted(self.filling):
            raise IntegrityError(f"tiers fill the slots {self.filling}, they own {tiers}")
        for _, slot, generation in self.loans.entries():
            if self.directory.loan(slot) != loan_number(generation):
                raise IntegrityError(f"slot {slot} is lent for {generation}, its record differs")
        for slot in self.tickets:
            writers = self.space.geometry.writers(slot)
            if self.directory.ranks_done(slot) & writers == writers:
                raise IntegrityError(f"slot {slot} has all shares and is waited for")

    def check_slots(self, first: int, count: int) -> int:
        """How many of `count` slots hold a chunk; IntegrityError where parts disagree about one."""
        slots = range(first, min(first + count, self.directory.num_slots))
        tickets, loans, chunks = self.tickets, self.loans, 0
        free = self.space.free_among(slots.start, slots.stop)
        forgotten = set(self._forgotten_among(first, count))
        for slot in slots:
            state = self.directory.state(slot)
            ordered, doomed = slot in self.policy, slot in self._doomed
            kinds = (ordered and slot not in tickets, doomed, slot in forgotten)
            claims = {
                SlotState.WRITING: slot in tickets,
                SlotState.READY: sum(kinds) == 1,
                SlotState.DRAINING: slot in self._draining,
            }
            if [claimed for claimed, yes in claims.items() if yes] != [state] * (state != 0):
                raise IntegrityError(f"slot {slot} is {SlotState(state).name}, claimed: {claims}")
            lent, reserved = slot in loans, self.policy.is_reserved(slot)
            if bool(self.directory.loan(slot)) != lent:
                raise IntegrityError(f"slot {slot} is marked wrongly as on loan or not")
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
            chunks += state != SlotState.FREE
        return chunks

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {what}" for what, count in self.stats().items())
        return f"<Slots {self.policy!r}: {counts}, {self.space.free_slots} free at hand>"
