"""Stores: how chunks come into slots that a scheduler has on loan.

A store has two ends, which come in any order: the scheduler says which key has which of its slots
(`begin`), and the lanes say whose shares are there (`share_done`).
"""

from collections.abc import Sequence

from kvd.cache.descriptions import Descriptions
from kvd.cache.directory import Blocks, Refs, covers
from kvd.cache.slots import Ints, Slots
from kvd.cache.uses import Uses
from kvd.metrics.counts import ChunkCounts
from kvd.pool.pool import Pool
from kvd_proto.directory import Entry, SlotState

_READY, _WRITING, _LENT = int(SlotState.READY), int(SlotState.WRITING), int(SlotState.LENT)


class Stores:
    """Begins and ends the stores of one namespace."""

    def __init__(
        self,
        slots: Slots,
        pool: Pool,
        uses: Uses,
        counts: ChunkCounts,
        descriptions: Descriptions,
    ) -> None:
        self._slots = slots
        self._directory = slots.directory
        self._pool = pool
        self._uses = uses
        self._counts = counts
        self._descriptions = descriptions

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
    ) -> tuple[int, Refs]:
        """Give keys the loans that their owner has chosen, [n] each, a prompt's head first.

        `blocks` says what of each chunk is stored; all of it where it is left out. What is not
        READY within `seconds` is given up. `descriptions` are kept, before their chunks are READY,
        where they fit; one that is empty is none.

        A slot that is no loan of this owner any more is lost. A key that is here, and not with
        fewer blocks only, has been stored by somebody else: this store has lost the race.

        Returns:
            How many are READY now, because their shares came first; and slots to be revoked.
        """
        self._uses.set_time(now)
        directory, counts = self._directory, self._counts
        mine = self._slots.loans.of(owner)
        place, writers = directory.place, self._slots.space.geometry.writers
        begun: list[int] = []
        complete: list[int] = []
        raced: list[int] = []
        over: list[int] = []
        lost = 0
        for i, (key, slot, generation) in enumerate(zip(keys, slots, generations, strict=True)):
            if mine.get(slot) != generation:
                lost += 1
                continue
            del mine[slot]
            done = place(key, slot)
            if isinstance(done, tuple) and self._is_lesser(done, blocks[i] if blocks else None):
                self._slots.drop([done[0]])
                counts.replaced += 1
                done = place(key, slot)
            if isinstance(done, tuple):
                raced.append(slot)
                continue
            if done < 0:
                counts.index_full += 1
                raced.append(slot)
                continue
            begun.append(slot)
            if descriptions and descriptions[i]:
                self._descriptions.keep(slot, generation, descriptions[i])
            if done and done == writers(slot):
                complete.append(slot)
        if begun or raced:
            self._slots.loans.used(owner, now)
        self._slots.started(begun, now + seconds)
        self._uses.mark(begun)
        if self._slots.demotable is not None:
            self._slots.demotable.begun(begun)
        self._finish(complete)
        for slot in raced:
            if directory.ranks_done(slot) == writers(slot):
                over.append(slot)
            else:
                self._slots.loans.raced[slot] = now + seconds
        counts.offered += len(keys)
        counts.accepted += len(keys)
        counts.stores_lost += lost
        counts.stores_raced += len(raced)
        counts.stored += len(complete)
        return len(complete), self._slots.call_in(over)

    def _finish(self, slots: list[int]) -> None:
        for slot in slots:
            self._slots.finish(slot)
        if slots and self._slots.demotable is not None:
            self._slots.demotable.ready(slots)

    def _is_lesser(self, held: Entry, offered: Blocks | None) -> bool:
        """Whether a chunk is READY with some of the blocks that are offered, and no others."""
        _, _, state, first, count = held
        if offered is None:
            offered = 0, self._directory.blocks_per_chunk
        return state == _READY and (first, count) != offered and covers(offered, (first, count))

    def note_offered(
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
        A share in a slot that is on loan waits for the key; where the store has lost a race,
        the last share ends it.
        Reports about slots that have moved on, and second reports, are ignored.

        Returns:
            The slots that are READY now, and those that were given up, to be revoked.
        """
        directory, ready, stale = self._directory, list[int](), 0
        writers = self._slots.space.geometry.writers
        failed: dict[int, None] = {}
        over: Refs = []  # of loans and lost races
        columns = (map(int, column) for column in (slots, generations, first, count, groups))
        for slot, generation, block, blocks, group in zip(*columns, strict=True):
            if (
                not 0 <= slot < directory.num_slots
                or slot in failed
                or directory.generation(slot) != generation
                or (state := directory.state(slot)) not in {_WRITING, _LENT}
                or directory.owner(slot) != owner
                or not (expected := writers(slot)) & ~directory.ranks_done(slot) & 1 << rank
            ):
                stale += 1
                continue
            done = covered = 0
            if ok and blocks > 0:
                done, covered = directory.add_share(slot, rank, block, blocks, group)
            if state == _LENT:
                if not covered or (done == expected and slot in self._slots.loans.raced):
                    self._slots.loans.remove(owner, slot)
                    over += self._slots.call_in([slot])
            elif not covered:
                failed[slot] = None
            elif done == expected:
                ready.append(slot)
        self._finish(ready)
        self._counts.stored += len(ready)
        self._counts.stale_reports += stale
        return self._slots.refs(ready), over + self._slots.give_up(list(failed))

    def drop(self, keys: Sequence[bytes], owner: int) -> Refs:
        """Give up what `owner` writes under these keys; slots to be revoked."""
        directory, gone = self._directory, dict[int, None]()
        for key in keys:
            slot = directory.find(key)
            if slot >= 0 and directory.state(slot) == _WRITING and directory.owner(slot) == owner:
                gone[slot] = None
        return self._slots.give_up(list(gone))
