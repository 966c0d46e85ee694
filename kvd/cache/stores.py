"""How chunks come into slots: stores, from engines; promotions, from tiers.

A store's slot is one that a scheduler has on loan. Its step says which key has which of its slots
(`Stores.begin`). Lanes write from then on, and report whose shares are there
(`Stores.share_done`). A tier fills slots with chunks that it keeps.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from kvd.cache.directory import Blocks, Refs, covers
from kvd.cache.ghosts import GhostCause, Ghosts
from kvd.cache.slots import Ints, Slots
from kvd.cache.uses import ChunkUses
from kvd.metrics.counts import ChunkCounts
from kvd.pool.pool import Pool
from kvd_proto.directory import TIER_OWNER, Entry, SlotState


class DescriptionWriter(Protocol):
    """Keeps a description for each slot of a namespace."""

    @property
    def max_bytes(self) -> int:
        """How many bytes a description may have."""

    def write(self, slot: int, generation: int, description: bytes) -> bool:
        """Keep the description of the slot's chunk; False where there is no room."""


MakeDescriptions: TypeAlias = Callable[[str, int], DescriptionWriter | None]
"""Makes the writer for a namespace, by its id in hex, with records of so many bytes; None where
that cannot be now."""


class Descriptions:
    """Keeps descriptions, and counts those that are not kept.

    Attributes:
        writer: None where none are kept.
    """

    def __init__(self, counts: ChunkCounts) -> None:
        self._counts = counts
        self.writer: DescriptionWriter | None = None

    @property
    def max_bytes(self) -> int:
        """How many bytes a description may have; 0 where none are kept."""
        return 0 if self.writer is None else self.writer.max_bytes

    def keep(self, slot: int, generation: int, description: bytes) -> None:
        """Keep a description, or count why it is not kept: the store goes on without it."""
        writer, counts = self.writer, self._counts
        if writer is not None and len(description) > writer.max_bytes:
            counts.descriptions_too_long += 1
        elif writer is None or not writer.write(slot, generation, description):
            counts.descriptions_no_room += 1
        else:
            counts.descriptions += 1


AT_ONCE = 1024  # slots: a millisecond or two
PARTS = 4  # no engine evicts other namespaces' chunks for more than this part of its share
PARTS_ALONE, PARTS_OF_SEVERAL = 4, 32
"""What part of its share an engine has on loan ahead of need: alone, or beside others."""


class Lending:
    """Lends the slots of one namespace; `sweep` frees some whose chunks a reset has dropped."""

    def __init__(
        self, slots: Slots, pool: Pool, uses: ChunkUses, sweep: Callable[[], None]
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


_READY, _WRITING = int(SlotState.READY), int(SlotState.WRITING)


class Stores:
    """Begins and ends the stores of one namespace."""

    def __init__(
        self, slots: Slots, pool: Pool, uses: ChunkUses, descriptions: Descriptions, ghosts: Ghosts
    ) -> None:
        self._slots = slots
        self._directory = slots.directory
        self._pool = pool
        self._uses = uses
        self._counts = slots.counts
        self._descriptions = descriptions
        self._ghosts = ghosts

    def begin(  # noqa: PLR0917 stores have these parts
        self,
        keys: Sequence[bytes],
        slots: Sequence[int],
        generations: Sequence[int],
        owner: int,
        now: float,
        blocks: Sequence[Blocks] = (),
        *,
        seconds: float = 60.0,
        descriptions: Sequence[bytes] = (),
    ) -> None:
        """Give keys the loans that their owner has chosen, [n] each, a prompt's head first.

        Lanes write from then on. What a slot has held until now is evicted. `blocks` says what of
        each chunk is stored; all of it where it is left out. What is not READY within `seconds` is
        given up. `descriptions` are kept where they fit; one that is empty is none.

        A store is lost where the slot is no loan of this owner any more. It has lost a race where
        its key is here, and not with fewer blocks only: the slot is not on loan any more, and what
        it holds stays.
        """
        self._uses.set_time(now)
        directory, counts, loans = self._directory, self._counts, self._slots.loans
        begun: list[int] = []
        evicted: list[int] = []
        unused: dict[int, None] = {}  # slots whose keys get none
        lost = raced = 0
        for i, (key, slot, generation) in enumerate(zip(keys, slots, generations, strict=True)):
            if not loans.use(owner, slot, generation, now):
                lost += 1
                continue
            chunk = directory.entry(key)
            if chunk is not None and not self._is_lesser(chunk, blocks[i] if blocks else None):
                unused[slot] = None
                raced += 1
                continue
            if chunk is not None and chunk[0] != slot:
                unused.pop(chunk[0], None)
                self._drop_lesser(chunk[0])
                counts.replaced += 1
            if directory.state(slot) == _READY:
                self._slots.evict((slot,), now)
                evicted.append(slot)
            if not directory.place(key, slot, owner, generation):
                unused[slot] = None
                counts.index_full += 1
                raced += 1
                continue
            begun.append(slot)
            if descriptions and descriptions[i]:
                self._descriptions.keep(slot, generation, descriptions[i])
        self._slots.return_slots(list(unused))
        self._uses.count_evicted(evicted)
        self._slots.started(begun, now + seconds, now)
        self._uses.mark(begun)
        if self._uses.demotion_queues is not None:
            self._uses.demotion_queues.begun(begun)
        counts.offered += len(keys)
        counts.accepted += len(keys)
        counts.stores_lost += lost
        counts.stores_raced += raced

    def _is_lesser(self, chunk: Entry, offered: Blocks | None) -> bool:
        """Whether a chunk is READY with some of the blocks that are offered, and no others."""
        _, _, state, first, count = chunk
        if offered is None:
            offered = 0, self._directory.blocks_per_chunk
        return state == _READY and (first, count) != offered and covers(offered, (first, count))

    def _drop_lesser(self, slot: int) -> None:
        """READY -> FREE, or doomed where pinned; its loan ends."""
        if slot in self._slots.loans:
            self._slots.loans.end(slot)
        self._directory.end_loans((slot,))
        self._slots.drop([slot])

    def count_offered(
        self, present: int, pending: int, not_yet: int, refused: int, *, draining: bool
    ) -> None:
        """Count keys that a scheduler has offered and answered by itself."""
        counts = self._counts
        counts.offered += present + pending + not_yet + refused
        counts.present += present
        counts.pending += pending
        counts.not_yet += not_yet
        if draining:
            counts.draining += refused
        elif refused and self._pool.is_capped(self._slots.space):
            counts.quota += refused
        else:
            counts.full += refused

    def remember_unstored(self, keys: Sequence[bytes], now: float) -> None:
        """Remember keys that got no slot and are not offered again."""
        capped = self._pool.is_capped(self._slots.space)
        cause = GhostCause.QUOTA if capped else GhostCause.REFUSED
        self._counts.unstored += len(keys)
        for key in keys:
            if self._directory.find(key) < 0:
                self._ghosts.add(key, cause, now, used=now)

    def share_done(  # noqa: PLR0917 a report has these parts
        self,
        owner: int,
        rank: int,
        slots: Ints,
        generations: Ints,
        first: Ints,
        count: Ints,
        groups: Ints,
        *,
        ok: bool,
    ) -> tuple[Refs, Refs]:
        """A lane reports one rank's share of these slots, [n] each.

        A chunk becomes READY with the last expected rank. One whose share failed, or
        of which no block is there on every rank, can never be READY and is given up.
        Reports about slots that have moved on, and second reports, are ignored.

        Returns:
            The slots that are READY now, and those that were given up, to be revoked.
        """
        directory, ready, stale = self._directory, list[int](), 0
        writers = self._slots.space.geometry.writers
        failed: dict[int, None] = {}
        columns = (map(int, column) for column in (slots, generations, first, count, groups))
        for slot, generation, block, blocks, group in zip(*columns, strict=True):
            if (
                not 0 <= slot < directory.num_slots
                or slot in failed
                or directory.generation(slot) != generation
                or directory.state(slot) != _WRITING
                or directory.owner(slot) != owner
                or not (expected := writers(slot)) & ~directory.ranks_done(slot) & 1 << rank
            ):
                stale += 1
                continue
            done = covered = 0
            if ok and blocks > 0:
                done, covered = directory.add_share(slot, rank, block, blocks, group)
            if not covered:
                failed[slot] = None
            elif done == expected:
                ready.append(slot)
        for slot in ready:
            self._slots.finish(slot)
        if ready and self._uses.demotion_queues is not None:
            self._uses.demotion_queues.ready(ready)
        self._counts.stored += len(ready)
        self._counts.stale_reports += stale
        return self._slots.refs(ready), self._slots.give_up(list(failed))

    def drop(self, keys: Sequence[bytes], owner: int) -> Refs:
        """Give up what `owner` writes under these keys; slots to be revoked."""
        directory, gone = self._directory, dict[int, None]()
        for key in keys:
            slot = directory.find(key)
            if slot >= 0 and directory.state(slot) == _WRITING and directory.owner(slot) == owner:
                gone[slot] = None
        return self._slots.give_up(list(gone))


class ChunkPromotions:
    """Begins and ends the promotions of one namespace."""

    def __init__(
        self, slots: Slots, lending: Lending, uses: ChunkUses, descriptions: Descriptions
    ) -> None:
        self._slots = slots
        self._directory = slots.directory
        self._lending = lending
        self._uses = uses
        self._counts = slots.counts
        self._descriptions = descriptions

    def begin(  # noqa: PLR0917 a promotion has these parts
        self,
        keys: Sequence[bytes],
        tier: str,
        now: float,
        seconds: float,
        most: int,
        usable: int | None = None,
    ) -> list[tuple[bytes, int, int]]:
        """Give up to `most` of these keys slots that a tier is to fill, a prompt's head first.

        Left out are keys that are here, or are being written, and those for which there is no
        room. What is not `done` within `seconds` is given up, by `expire`; `reset` gives all
        of them up. Such slots wait until `slots.revoked` or `slots.lane_lost` is called with the
        name of the tier's process, `tier`, which no lane has; nobody else is asked. While the pool
        is filled `usable` bytes of it can be used, and nothing is evicted.

        Returns:
            Key, slot and generation of each.
        """
        directory = self._directory
        missing = [key for key in dict.fromkeys(keys) if directory.find(key) < 0][:most]
        if not missing:
            return []
        slots = self._lending.take_free(len(missing), now, usable)
        found: list[tuple[bytes, int, int]] = []
        unused: list[int] = []
        for key, slot in zip(missing, slots, strict=False):
            if directory.place(key, slot, TIER_OWNER):
                found.append((key, slot, directory.generation(slot)))
            else:
                self._counts.index_full += 1
                unused.append(slot)
        self._slots.space.give(unused)
        begun = [slot for _, slot, _ in found]
        self._slots.fill(begun, tier, now + seconds, now)
        self._uses.mark(begun)
        return found

    def done(  # noqa: PLR0917 a chunk has these parts
        self,
        slot: int,
        generation: int,
        first: int,
        count: int,
        group: int,
        description: bytes = b"",
    ) -> bool:
        """A tier has filled a slot with these blocks, in the shares of all ranks: it is READY.

        False where it was given up meanwhile, or is now, because no chunk has such blocks.
        """
        directory = self._directory
        if slot not in self._slots.filling or directory.generation(slot) != generation:
            return False
        if not (first >= 0 and count > 0 and first + count <= directory.blocks_per_chunk):
            self._slots.give_up([slot])
            return False
        directory.fill(slot, self._slots.space.geometry.writers(slot), first, count, group)
        if description:
            self._descriptions.keep(slot, generation, description)
        self._slots.finish(slot)
        self._counts.promoted += 1
        if self._uses.demotion_queues is not None:
            self._uses.demotion_queues.promoted(slot)
        return True

    def give_up(self, refs: Refs) -> Refs:
        """Give up what a tier was to fill: those of these slots that it fills still.

        They are DRAINING until the tier has answered or is gone, see `begin`.
        """
        filling, generation = self._slots.filling, self._directory.generation
        there = [ref for ref in refs if ref[0] in filling and generation(ref[0]) == ref[1]]
        self._slots.give_up([slot for slot, _ in there])
        return there
