"""How slots get chunks: loans to schedulers, stores by engines, promotions from tiers.

1. `Lending.lend` lends slots to a scheduler ahead of need.
2. The scheduler's step gives some of these slots to keys (`Stores.begin`).
3. Lanes write, and report each rank's share (`Stores.share_done`). With the last one the chunk is
   READY.

A promotion needs no loan: the broker takes a slot (`ChunkPromotions.begin`), a tier fills it
(`ChunkPromotions.complete`).
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from kvd.cache.directory import Blocks, ChunkRefs, covers
from kvd.cache.ghosts import GhostCause, Ghosts
from kvd.cache.slots import Ints, Slots
from kvd.cache.uses import ChunkUses
from kvd.metrics.counts import ChunkCounts
from kvd.pool.pool import Pool
from kvd_proto.directory import TIER_OWNER, Entry, SlotState


class DescriptionWriter(Protocol):
    """Stores a description for each slot of a namespace."""

    @property
    def max_bytes(self) -> int:
        """The longest description that can be stored."""

    def write(self, slot: int, generation: int, description: bytes) -> bool:
        """Store the description of the slot's chunk; False if there is no memory for it."""


MakeDescriptions: TypeAlias = Callable[[str, int], DescriptionWriter | None]
"""Makes the writer for a namespace, given its id in hex and the size of a record; None if that
fails for now."""


class Descriptions:
    """Stores descriptions, and counts those that it does not store.

    Attributes:
        writer: None: descriptions are not stored.
    """

    def __init__(self, counts: ChunkCounts) -> None:
        self._counts = counts
        self.writer: DescriptionWriter | None = None

    @property
    def max_bytes(self) -> int:
        """The longest description that can be stored; 0: none can."""
        return 0 if self.writer is None else self.writer.max_bytes

    def write(self, slot: int, generation: int, description: bytes) -> None:
        """Store a description, or count why it is not stored; the chunk's store does not fail."""
        writer, counts = self.writer, self._counts
        if writer is not None and len(description) > writer.max_bytes:
            counts.descriptions_too_long += 1
        elif writer is None or not writer.write(slot, generation, description):
            counts.descriptions_no_room += 1
        else:
            counts.descriptions += 1


MAX_LENT_AT_ONCE = 1024  # slots: one or two milliseconds
MAX_TAKEN = 1 / 4  # of an engine's share: loans for which other namespaces' chunks are evicted
MAX_AHEAD_ALONE, MAX_AHEAD_OF_SEVERAL = 1 / 4, 1 / 32
"""Loans ahead of need, as a part of its share: of an engine alone, and of one of several."""


class Lending:
    """Lends the slots of one namespace.

    `sweep` frees some slots whose chunks a reset has dropped.
    """

    def __init__(
        self, slots: Slots, pool: Pool, uses: ChunkUses, sweep: Callable[[], None]
    ) -> None:
        self._slots = slots
        self._pool = pool
        self._uses = uses
        self._sweep = sweep

    def share(self, engines: int) -> int:
        """Return how many slots each of `engines` engines may have on loan."""
        return max(1, self._slots.space.geometry.num_slots // engines)

    def max_ahead(self, engines: int) -> int:
        """Return how many slots each of `engines` engines may have on loan ahead of need.

        A single engine uses its loans in the order of eviction. Chunks on loan to one of several
        engines are not evicted for the others, so each gets few.
        """
        part = MAX_AHEAD_ALONE if engines == 1 else MAX_AHEAD_OF_SEVERAL
        return max(1, int(self.share(engines) * part))

    def lend(
        self,
        owner: int,
        need: int,
        engines: int,
        now: float,
        filled_bytes: int | None = None,
        *,
        evict: bool = True,
    ) -> tuple[list[int], list[int]]:
        """Lend up to `need` slots to `owner`, one of `engines` engines of the namespace.

        Slots come, in this order, from:

        1. free slots of this namespace and unowned columns;
        2. with `evict`: columns of other namespaces, up to a part of the engine's share;
        3. slots of this namespace's chunks that are evicted next. Such a chunk stays until `owner`
           gives its slot to a key.

        While the pool is being filled, only its `filled_bytes` bytes are used, and only step 1.

        Returns:
            The slots, and the generation of each once it is given to a key.
        """
        self._uses.set_time(now)
        pool_space = self._slots.space
        need = min(need, MAX_LENT_AT_ONCE)
        self._sweep_for(need)
        self._pool.acquire(pool_space, need, filled_bytes, evict=False)
        slots = pool_space.take(need, filled_bytes)
        if filled_bytes is None:
            if evict:
                max_taken = max(1, int(self.share(engines) * MAX_TAKEN))
                num_more = min(need, max_taken - self._slots.loans.count(owner)) - len(slots)
                if num_more > 0:
                    self._pool.acquire(pool_space, num_more)
                    slots += pool_space.take(num_more)
            slots += self._slots.reserve(need - len(slots), now)
        return slots, self._slots.lend(slots, owner, now)

    def take_for_promotions(self, n: int, now: float, filled_bytes: int | None = None) -> list[int]:
        """Take up to `n` FREE slots for promotions; evicts chunks as needed.

        From free slots, then columns of other namespaces, then chunks of this namespace that are
        evicted next.

        Args:
            n: number of slots.
            now: monotonic seconds.
            filled_bytes: of the pool; then only free slots are taken. None: all are.
        """
        self._uses.set_time(now)
        pool_space = self._slots.space
        self._sweep_for(n)
        self._pool.acquire(pool_space, n, filled_bytes, evict=False)
        slots = pool_space.take(n, filled_bytes)
        if len(slots) < n and filled_bytes is None:
            self._pool.acquire(pool_space, n - len(slots))
            slots += pool_space.take(n - len(slots))
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
        """End all loans of owners, except `but`, that have used none since `since`.

        All rather than some: an owner uses its newest loans first, and the chunks that it keeps on
        loan then are evicted too early.
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

    def begin(  # noqa: PLR0917  # the fields of a Step
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
        """Begin stores: give slots on loan to keys, [n] each, a prompt's head first.

        Lanes write from then on; a slot's chunk before is evicted. A store is not begun, and
        counted, if:

        - it is lost: the slot is no longer on loan to `owner` under this generation;
        - it lost a race: the key already has a chunk, and not with fewer blocks than this store's.
          The loan ends, and the slot keeps its chunk;
        - the index has no place for the key: the same.

        `blocks` are written of each chunk; no items: all of all chunks. Stores that are not READY
        within `seconds` are given up. `descriptions`: empty for none; or no items.
        """
        self._uses.set_time(now)
        directory, counts, loans = self._directory, self._counts, self._slots.loans
        begun: list[int] = []
        evicted: list[int] = []
        unused: dict[int, None] = {}  # slots of stores that are not begun
        num_lost = num_raced = 0
        for i, (key, slot, generation) in enumerate(zip(keys, slots, generations, strict=True)):
            if not loans.use(owner, slot, generation, now):
                num_lost += 1
                continue
            chunk = directory.entry(key)
            if chunk is not None and not self._has_fewer(chunk, blocks[i] if blocks else None):
                unused[slot] = None
                num_raced += 1
                continue
            if chunk is not None and chunk[0] != slot:
                unused.pop(chunk[0], None)
                self._drop_replaced(chunk[0])
                counts.replaced += 1
            if directory.state(slot) == _READY:
                self._slots.evict((slot,), now)
                evicted.append(slot)
            if not directory.place(key, slot, owner, generation):
                unused[slot] = None
                counts.index_full += 1
                num_raced += 1
                continue
            begun.append(slot)
            if descriptions and descriptions[i]:
                self._descriptions.write(slot, generation, descriptions[i])
        self._slots.return_slots(list(unused))
        self._uses.count_evicted(evicted)
        self._slots.begin_writing(begun, now + seconds, now)
        self._uses.stamp(begun)
        if self._uses.demotion_queues is not None:
            self._uses.demotion_queues.note_begun(begun)
        counts.offered += len(keys)
        counts.accepted += len(keys)
        counts.stores_lost += num_lost
        counts.stores_raced += num_raced

    def _has_fewer(self, chunk: Entry, offered: Blocks | None) -> bool:
        """Whether a chunk is READY with only some of the offered blocks (None: all blocks)."""
        _, _, state, first, count = chunk
        if offered is None:
            offered = 0, self._directory.blocks_per_chunk
        return state == _READY and (first, count) != offered and covers(offered, (first, count))

    def _drop_replaced(self, slot: int) -> None:
        """Drop a chunk that a store of more blocks replaces; its loan ends."""
        if slot in self._slots.loans:
            self._slots.loans.end(slot)
        self._directory.end_loans((slot,))
        self._slots.drop([slot])

    def count_offered(
        self, present: int, pending: int, not_yet: int, refused: int, *, draining: bool
    ) -> None:
        """Count keys that were offered to a scheduler and that it did not store."""
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
        """Leave ghosts for keys that got no slot and are not offered again."""
        capped = self._pool.is_capped(self._slots.space)
        cause = GhostCause.QUOTA if capped else GhostCause.REFUSED
        self._counts.unstored += len(keys)
        for key in keys:
            if self._directory.find(key) < 0:
                self._ghosts.add(key, cause, now, used=now)

    def share_done(  # noqa: PLR0917  # the fields of a lane's report
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
    ) -> tuple[ChunkRefs, ChunkRefs]:
        """Process a lane's report about one rank's shares of these slots, [n] each.

        With the last expected share a chunk becomes READY. A chunk is given up if its share failed,
        or if no block is in the shares of all ranks. Repeated reports, and reports about slots that
        have another chunk now, are ignored and counted.

        Returns:
            The chunks that became READY, and those that were given up, to be revoked at lanes.
        """
        directory, ready, num_stale = self._directory, list[int](), 0
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
                num_stale += 1
                continue
            ranks_done = common_blocks = 0
            if ok and blocks > 0:
                ranks_done, common_blocks = directory.add_share(slot, rank, block, blocks, group)
            if not common_blocks:
                failed[slot] = None
            elif ranks_done == expected:
                ready.append(slot)
        for slot in ready:
            self._slots.make_ready(slot)
        if ready and self._uses.demotion_queues is not None:
            self._uses.demotion_queues.note_ready(ready)
        self._counts.stored += len(ready)
        self._counts.stale_reports += num_stale
        return self._slots.refs(ready), self._slots.give_up(list(failed))

    def drop(self, keys: Sequence[bytes], owner: int) -> ChunkRefs:
        """Give up the stores of `owner` with these keys; return the chunks to be revoked."""
        directory = self._directory
        dropped: dict[int, None] = {}
        for key in keys:
            slot = directory.find(key)
            if slot >= 0 and directory.state(slot) == _WRITING and directory.owner(slot) == owner:
                dropped[slot] = None
        return self._slots.give_up(list(dropped))


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

    def begin(  # noqa: PLR0917  # a promotion's parts
        self,
        keys: Sequence[bytes],
        tier: str,
        now: float,
        seconds: float,
        limit: int,
        filled_bytes: int | None = None,
    ) -> list[tuple[bytes, int, int]]:
        """Give slots, for a tier to fill, to up to `limit` of these keys, a prompt's head first.

        Keys that are in memory or being written are left out. There may be fewer free slots.
        Promotions that are not `done` within `seconds` are given up by `expire`, all of them by
        `reset`. A slot given up is DRAINING until `slots.writes_ended` or `slots.writer_lost` is
        called with `tier`, the name of the tier's process, which no lane has. With
        `filled_bytes` nothing is evicted.

        Returns:
            Key, slot and generation of each promotion.
        """
        directory = self._directory
        missing = [key for key in dict.fromkeys(keys) if directory.find(key) < 0][:limit]
        if not missing:
            return []
        slots = self._lending.take_for_promotions(len(missing), now, filled_bytes)
        promotions: list[tuple[bytes, int, int]] = []
        unused: list[int] = []
        for key, slot in zip(missing, slots, strict=False):
            if directory.place(key, slot, TIER_OWNER):
                promotions.append((key, slot, directory.generation(slot)))
            else:
                self._counts.index_full += 1
                unused.append(slot)
        self._slots.space.give(unused)
        begun = [slot for _, slot, _ in promotions]
        self._slots.begin_filling(begun, tier, now + seconds, now)
        self._uses.stamp(begun)
        return promotions

    def complete(  # noqa: PLR0917  # a chunk's parts
        self,
        slot: int,
        generation: int,
        first: int,
        count: int,
        group: int,
        description: bytes = b"",
    ) -> bool:
        """Make a chunk READY that a tier has filled with these blocks in the shares of all ranks.

        False: the promotion was given up before, or is now because the blocks are out of range.
        """
        directory = self._directory
        if slot not in self._slots.filling or directory.generation(slot) != generation:
            return False
        if not (first >= 0 and count > 0 and first + count <= directory.blocks_per_chunk):
            self._slots.give_up([slot])
            return False
        directory.fill(slot, self._slots.space.geometry.writers(slot), first, count, group)
        if description:
            self._descriptions.write(slot, generation, description)
        self._slots.make_ready(slot)
        self._counts.promoted += 1
        if self._uses.demotion_queues is not None:
            self._uses.demotion_queues.note_promoted(slot)
        return True

    def give_up(self, refs: ChunkRefs) -> ChunkRefs:
        """Give up those of these promotions that are under way, and return them; see `begin`."""
        filling, generation = self._slots.filling, self._directory.generation
        under_way = [ref for ref in refs if ref[0] in filling and generation(ref[0]) == ref[1]]
        self._slots.give_up([slot for slot, _ in under_way])
        return under_way
