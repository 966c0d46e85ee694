"""The chunk table: every decision about the chunks of one namespace.

It is the only writer of its directory. The states of a slot::

    FREE -> LENT        `lending`: the scheduler may give the slot to a key by itself
    LENT -> WRITING     begin: it has done so, and no other chunk has the key
    FREE -> WRITING     promote: a tier fills it
    LENT -> DRAINING    taken back, a share failed, the session is gone, reset; and where begin
                        came too late: when all shares are there, or the deadline has passed
    WRITING -> READY    share_done, with the last rank that was expected; begin, where that
                        came before; promoted
    WRITING -> DRAINING a share failed, the store was dropped, the ticket's deadline passed,
                        the session is gone, reset; not_promoted
    DRAINING -> FREE    revoked: the lanes, or the tier, have nothing under way there
    READY -> FREE       evicted, reset, or stored anew with more blocks. A reset chunk is not
                        found any more, and leaves its slot by `sweep`; one that is pinned is
                        doomed, that is, it leaves its slot at the last pin

Methods decide first and then act; none of them waits, and none raises for what a
client may send.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from kvd.cache.candidates import Candidates, Demotable
from kvd.cache.descriptions import DescriptionWriter
from kvd.cache.directory import Blocks, DirectoryWriter, Refs, covers
from kvd.cache.ledger import KeptChunks
from kvd.cache.lending import Lending
from kvd.cache.policies import POLICIES
from kvd.cache.slots import Ints, Slots
from kvd.cache.uses import Uses
from kvd.metrics.counts import ChunkCounts
from kvd.pool.geometry import Geometry
from kvd.pool.pool import Pool
from kvd.wire.tiering import new_epoch
from kvd_proto.directory import TIER_OWNER, Entry, SlotState
from kvd_proto.messages import ResetDone

PIECE_SLOTS = 2048  # a few milliseconds where every one of them holds a chunk
EMPTY_PIECES = 16  # so many that hold none are looked at in one go

_READY, _WRITING, _LENT = int(SlotState.READY), int(SlotState.WRITING), int(SlotState.LENT)


class ChunkTable:
    """The chunks of one namespace.

    Args:
        directory: a new directory with one slot for each of the geometry's.
        geometry: the namespace's grid in the pool.
        pool: where its room comes from.
        policy: a name in `POLICIES`.
        model: whose quota counts; empty where none does.

    Attributes:
        stamps: of the last uses, by slot, in the ledger where there is one: the next daemon
            knows them.
        lending: which of its slots schedulers have ahead of need.
        descriptions: where those of chunks are kept; None: nowhere.
        demotable: which chunks are to go down to tiers; None where no tier wants any.
    """

    def __init__(
        self,
        directory: DirectoryWriter,
        geometry: Geometry,
        pool: Pool,
        policy: str,
        model: str = "",
    ) -> None:
        self.directory = directory
        ledger = directory.ledger
        self.counts = ChunkCounts()
        self.descriptions: DescriptionWriter | None = None
        self.demotable: Demotable | None = None
        self.stamps = np.zeros(geometry.num_slots, np.uint64) if ledger is None else ledger.stamps
        self.uses = Uses(self.stamps, pool)
        self._pool = pool
        self.space = pool.join(geometry, self, model)
        order = POLICIES[policy](geometry.num_slots, directory.key)
        self.slots = Slots(directory, order, self.space)
        self.lending = Lending(self.slots, pool, self.uses, self.counts, self.sweep)

    def restore(self, chunks: KeptChunks) -> None:
        """Take over the chunks of the previous daemon, into a table that is new.

        Raises:
            LedgerDamaged: they contradict each other.
            IntegrityError: they lie where another namespace's do.
        """
        if not len(chunks):  # after a reset its epoch is all that a ledger has to say
            return
        geometry = self.space.geometry
        masks = (
            np.uint64(1) << (chunks.slots % geometry.world_size).astype(np.uint64)
            if geometry.replicated
            else np.full(len(chunks), geometry.writers(0), np.uint64)
        )
        self.directory.restore(chunks, masks)
        self._pool.restore(self.space, chunks.slots, int(chunks.stamps.max(initial=0)))
        self.slots.policy.restore(chunks.slots)
        self.counts.restored = len(chunks)

    # -------------------------------------------------------------------- loans

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
        self.uses.set_time(now)
        life, directory, counts = self.slots, self.directory, self.counts
        mine = life.loans.of(owner)
        place, writers = directory.place, self.space.geometry.writers
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
                life.drop([done[0]])
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
                self._describe(slot, generation, descriptions[i])
            if done and done == writers(slot):
                complete.append(slot)
        if begun or raced:
            life.loans.used(owner, now)
        self._started(begun, now + seconds)
        self._finish(complete)
        for slot in raced:
            if directory.ranks_done(slot) == writers(slot):
                over.append(slot)
            else:
                life.loans.raced[slot] = now + seconds
        counts.offered += len(keys)
        counts.accepted += len(keys)
        counts.stores_lost += lost
        counts.stores_raced += len(raced)
        counts.stored += len(complete)
        return len(complete), life.call_in(over)

    def _started(self, slots: list[int], deadline: float) -> None:
        self.slots.started(slots, deadline)
        self.uses.mark(slots)
        if self.demotable is not None:
            self.demotable.begun(slots)

    def _finish(self, slots: list[int]) -> None:
        for slot in slots:
            self.slots.finish(slot)
        if slots and self.demotable is not None:
            self.demotable.ready(slots)

    def _describe(self, slot: int, generation: int, description: bytes) -> None:
        """Keep a description, or count why it is not kept: the store goes on without it."""
        writer, counts = self.descriptions, self.counts
        if writer is not None and len(description) > writer.room:
            counts.descriptions_too_long += 1
        elif writer is None or not writer.write(slot, generation, description):
            counts.descriptions_no_room += 1
        else:
            counts.descriptions += 1

    def _is_lesser(self, held: Entry, offered: Blocks | None) -> bool:
        """Whether a chunk is READY with some of the blocks that are offered, and no others."""
        _, _, state, first, count = held
        if offered is None:
            offered = 0, self.directory.blocks_per_chunk
        return state == _READY and (first, count) != offered and covers(offered, (first, count))

    def note_offers(
        self, present: int, pending: int, not_yet: int, refused: int, *, draining: bool
    ) -> None:
        """Count keys that a scheduler has offered and answered by itself."""
        counts = self.counts
        counts.offered += present + pending + not_yet + refused
        counts.present += present
        counts.pending += pending
        counts.not_yet += not_yet
        if draining:
            counts.draining += refused
        elif refused and self._pool.is_capped(self.space):
            counts.quota += refused
        else:
            counts.full += refused

    # ------------------------------------------------------------------- shares

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
        directory, life, ready, stale = self.directory, self.slots, [], 0
        writers = self.space.geometry.writers
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
                if not covered or (done == expected and slot in life.loans.raced):
                    life.loans.remove(owner, slot)
                    over += life.call_in([slot])
            elif not covered:
                failed[slot] = None
            elif done == expected:
                ready.append(slot)
        self._finish(ready)
        self.counts.stored += len(ready)
        self.counts.stale_reports += stale
        return life.refs(ready), over + self._give_up(list(failed))

    def drop(self, keys: Sequence[bytes], owner: int) -> Refs:
        """Give up what `owner` writes under these keys; slots to be revoked."""
        directory, gone = self.directory, dict[int, None]()
        for key in keys:
            slot = directory.find(key)
            if slot >= 0 and directory.state(slot) == _WRITING and directory.owner(slot) == owner:
                gone[slot] = None
        return self._give_up(list(gone))

    def _give_up(self, slots: Sequence[int]) -> Refs:
        filling = self.slots.filling
        promotions = sum(slot in filling for slot in slots) if filling else 0
        self.counts.not_promoted += promotions
        self.counts.dropped += len(slots) - promotions
        return self.slots.give_up(slots)

    # ------------------------------------------------------------------- tiers

    def watch(self, *, ready: bool, asked: bool) -> None:
        """From now on note what is to go down: what becomes READY, or what is asked for."""
        self.demotable = (
            Demotable(self.directory, self.counts, ready=ready, asked=asked)
            if ready or asked
            else None
        )

    @property
    def on_ready(self) -> Candidates | None:
        """Chunks that have become READY, to go down; None where no tier wants them."""
        return self.demotable.on_ready if self.demotable is not None else None

    @property
    def on_asked(self) -> Candidates | None:
        """Chunks that have been asked for, to go down; None where no tier wants them."""
        return self.demotable.on_asked if self.demotable is not None else None

    def promote(  # noqa: PLR0917 a promotion has these parts
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
        room. What is not `promoted` within `seconds` is given up, by `expire`; `reset` gives all
        of them up. Such slots wait until `slots.revoked` or `slots.lane_lost` is called with the
        name of the tier's process, `tier`, which no lane has; nobody else is asked. While the pool
        is filled `usable` bytes of it can be used, and nothing is evicted.

        Returns:
            Key, slot and generation of each.
        """
        directory, life = self.directory, self.slots
        missing = [key for key in dict.fromkeys(keys) if directory.find(key) < 0][:most]
        if not missing:
            return []
        slots = self.lending.room(len(missing), now, usable)
        generations = directory.lend(slots, TIER_OWNER)
        found: list[tuple[bytes, int, int]] = []
        unused: list[int] = []
        for key, slot, generation in zip(missing, slots, generations, strict=False):
            if directory.place(key, slot) == 0:
                found.append((key, slot, generation))
            else:
                self.counts.index_full += 1
                unused.append(slot)
        life.unlend(unused)
        begun = [slot for _, slot, _ in found]
        life.fill(begun, tier, now + seconds)
        self.uses.mark(begun)
        return found

    def promoted(  # noqa: PLR0917 a chunk has these parts
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
        life, directory = self.slots, self.directory
        if slot not in life.filling or directory.generation(slot) != generation:
            return False
        if not (first >= 0 and count > 0 and first + count <= directory.blocks_per_chunk):
            self._give_up([slot])
            return False
        directory.fill(slot, self.space.geometry.writers(slot), first, count, group)
        if description:
            self._describe(slot, generation, description)
        life.finish(slot)
        self.counts.promoted += 1
        if self.demotable is not None:
            self.demotable.promoted(slot)
        return True

    def not_promoted(self, refs: Refs) -> Refs:
        """Give up what a tier was to fill: those of these slots that it fills still.

        They are DRAINING until the tier has answered or is gone, see `promote`.
        """
        filling, generation = self.slots.filling, self.directory.generation
        there = [ref for ref in refs if ref[0] in filling and generation(ref[0]) == ref[1]]
        self._give_up([slot for slot, _ in there])
        return there

    # -------------------------------------------------------------------- loads

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
        self.uses.set_time(now)
        life = self.slots
        pinned = self.directory.ready(slots, generations)
        if pinned:
            life.unpinned(life.leases.hold(owner, number, pinned, now, now + seconds))
            policy = life.policy  # which a chunk has left that a fuller store has replaced
            policy.refresh_all([slot for slot in reversed(pinned) if slot in policy])
            self.uses.mark(pinned)
            if self.demotable is not None:
                self.demotable.pinned(pinned)
        counts = self.counts
        counts.asked += len(slots)
        counts.hits += len(pinned)
        counts.pins_late += len(slots) - len(pinned)
        counts.leases += bool(pinned)

    def refuse_pin(self, chunks: int) -> None:
        """Count chunks that are not pinned, because their owner has too many leases."""
        self.counts.asked += chunks
        self.counts.pins_refused += chunks

    def unpin(self, lease_id: int, owner: int) -> bool:
        """Give a lease back. False where it has run out or is not this session's."""
        unpinned = self.slots.leases.release(lease_id, owner)
        if unpinned is None:
            return False
        self.slots.unpinned(unpinned)
        return True

    def finished(self, keys: Sequence[bytes]) -> int:
        """A request that loaded, stored or offered these has finished; its head first.

        They are as recent as the request, whether their bytes are here already or not.

        Returns:
            How many of them, each counted once, are here.
        """
        found = dict.fromkeys(map(self.directory.find, keys))
        found.pop(-1, None)
        slots = list(found)
        # The tail of a prompt is useless without its head, so it has to look colder.
        self.slots.policy.use_all(slots[::-1])
        self.uses.mark(slots)
        if self.demotable is not None:
            self.demotable.finished(slots)
        return len(slots)

    # ------------------------------------------------------------- ends of things

    def expire(self, now: float) -> Refs:
        """End the leases and give up the stores whose deadline has come; slots to be revoked."""
        self.uses.set_time(now)
        late = [slot for slot, deadline in self.slots.tickets.items() if deadline <= now]
        over = self.slots.call_in(self.slots.loans.expire(now))
        self.counts.tickets_expired += sum(slot not in self.slots.filling for slot in late)
        leases, unpinned = self.slots.leases.expire(now)
        self.counts.leases_expired += leases
        self.slots.unpinned(unpinned)
        return over + self._give_up(late)

    def drop_owner(self, owner: int) -> tuple[Refs, Refs]:
        """An owner is gone: its leases end, what it was writing is given up, its loans too.

        Returns:
            What it was writing, and its other slots; all to be revoked.
        """
        life, owned_by = self.slots, self.directory.owner
        life.unpinned(life.leases.drop_owner(owner))
        raced = [slot for slot in life.loans.raced if owned_by(slot) == owner]
        for slot in raced:
            del life.loans.raced[slot]
        writing = [slot for slot in life.tickets if owned_by(slot) == owner]
        return self._give_up(writing), life.call_in(raced) + self.lending.call_in(owner)

    def reset(self, *, by_operator: bool = False) -> tuple[ResetDone, Refs]:
        """Drop every chunk: from now on no lookup finds it, nor does the next daemon.

        What tiers keep does not count any more either: the namespace has another epoch, which
        they are to be told. Slots are freed by `sweep`; those that are pinned go when their leases
        end. What was offered and not stored yet keeps its count.

        Returns:
            How many go now and how many when their leases end, and the slots to be revoked.
        """
        # First of all: what is not here any more must not come up again, whenever a kill comes.
        self.directory.take_epoch(new_epoch())
        if self.directory.tiers is not None:
            self.directory.tiers.forget()
        writing = self._give_up(list(self.slots.tickets))
        lent = self.lending.call_in_all()  # with their generations no chunk would be found any more
        gone, kept = self.slots.forget()
        if by_operator:
            self.counts.removed += gone + kept
        else:
            self.counts.reset += gone + kept
        return ResetDone(dropped=gone + len(writing), deferred=kept), writing + lent

    def sweep(self) -> None:
        """Free some of the slots whose chunks a reset has dropped: a few milliseconds at most.

        And some of the tier table's places.
        """
        if self.directory.tiers is not None:
            self.directory.tiers.sweep()
        for _ in range(EMPTY_PIECES):
            if self.slots.sweep(PIECE_SLOTS):
                break
        if not self.slots.forgotten:
            self.give_back()

    @property
    def is_swept(self) -> bool:
        """Nothing is left to do for `sweep`."""
        tiers = self.directory.tiers
        return not self.slots.forgotten and (tiers is None or tiers.is_swept)

    def remove(self, first: int, count: int, unused_for: float) -> int:
        """Drop the chunks in `count` slots from `first` on that were of no use for so many seconds.

        None that is pinned. How many went.
        """
        pins, policy = self.slots.leases.pins, self.slots.policy
        ready = self.directory.slots_in(SlotState.READY, first, count)
        slots = [slot for slot in ready if slot in policy and slot not in pins]
        slots = np.array(slots, np.int64)[self.uses.ages(slots) >= unused_for].tolist()
        self.counts.removed += len(slots)
        return self.slots.drop(slots)[0]

    @property
    def held_bytes(self) -> int:
        """Bytes of the pool that the namespace owns, used or not."""
        return self._pool.held_bytes(self.space)

    def give_back(self) -> None:
        """Release the room that holds no chunk to other namespaces."""
        self._pool.give_back(self.space)

    # ------------------------------------------------------------ for the pool

    def busy_slots(self) -> Iterable[int]:
        """Slots that must stay: pinned, being written, draining."""
        return self.slots.busy()

    def lent_slots(self) -> Iterable[int]:
        """Slots that are on loan: `call_in_spare` takes back those that others need."""
        return self.slots.loans.slots()

    def yield_slots(self, slots: list[int]) -> None:
        """Evict these READY, unpinned chunks: another namespace needs the room."""
        current = [slot for slot in slots if slot in self.slots.policy]
        if current:
            self.counts.eviction_age.observe_all(self.uses.ages(current))
        self.counts.yielded += len(current)
        self.slots.drop(slots)

    # -------------------------------------------------------------- inspection

    def check_integrity(self) -> None:
        """Raise IntegrityError where slots or counters contradict each other."""
        self.slots.check_integrity()
        self.counts.check_integrity()

    def __repr__(self) -> str:
        return f"<ChunkTable {self.directory.header.namespace.hex()[:8]} {self.slots!r}>"
