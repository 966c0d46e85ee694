"""The chunk table: every decision about the chunks of one namespace.

It and its parts are the only writers of its directory. The states of a slot::

    FREE -> WRITING     `stores.begin`: the scheduler's step gives a slot that is on loan to a key
    READY -> WRITING    the same, where the slot holds a chunk: that one is evicted
    FREE -> WRITING     `promotions.begin`: a tier fills it
    WRITING -> READY    `stores.share_done`, with the last rank that was expected; `promotions.done`
    WRITING -> DRAINING a share failed, the store was dropped, the deadline passed, the session is
                        gone, reset; `promotions.give_up`
    DRAINING -> FREE    revoked: the lanes, or the tier, have nothing under way there
    READY -> FREE       evicted, reset, or stored anew with more blocks. A reset chunk is not
                        found any more, and leaves its slot by `sweep`; one that is pinned is
                        doomed, that is, it leaves its slot at the last pin

Methods decide first and then act; none of them waits, and none raises for what a
client may send.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvd.cache.adaptive import POLICIES
from kvd.cache.directory import DirectoryWriter, Refs
from kvd.cache.ghosts import GhostCause, Ghosts, MissReasons
from kvd.cache.ledger import LedgerChunks
from kvd.cache.miss_curve import MissCurve
from kvd.cache.slots import Slots
from kvd.cache.stores import ChunkPromotions, Descriptions, Lending, Stores
from kvd.cache.uses import ChunkUses, DemotionQueue, DemotionQueues, Loads
from kvd.metrics.counts import ChunkCounts
from kvd.pool.geometry import Geometry
from kvd.pool.pool import Pool
from kvd_proto.directory import SlotState
from kvd_proto.messages import LABEL_ONLY, Label, ResetDone

PIECE_SLOTS = 512  # a few milliseconds where every one of them holds a chunk
GHOSTS_PER_SLOT = 2
EMPTY_PIECES = 64  # so many that hold none are looked at in one go
_LABELS = {int(label): label for label in Label}


class ChunkTable:
    """The chunks of one namespace.

    Args:
        directory: a new directory with one slot for each of the geometry's.
        geometry: the namespace's grid in the pool.
        pool: where its room comes from.
        policy: a name in `POLICIES`.
        model: whose quota counts; empty where none does.
        elsewhere: whether another namespace has a key.
        forecasts: whether a miss-ratio curve is kept.

    Attributes:
        stamps: of the last uses, by slot, in the ledger where there is one: the next daemon
            knows them.
        ghosts: keys of chunks that have left memory.
        lending: which of its slots schedulers have ahead of need.
        descriptions: those of its chunks.
        stores, promotions, loads: what begins and ends them.
        misses: why keys were missed.
        curve: what other sizes of the pool would bring; None where none is kept.
    """

    def __init__(
        self,
        directory: DirectoryWriter,
        geometry: Geometry,
        pool: Pool,
        policy: str,
        model: str = "",
        *,
        elsewhere: Callable[[bytes], bool] = lambda _: False,
        forecasts: bool = False,
    ) -> None:
        self.directory = directory
        ledger = directory.ledger
        self.counts = ChunkCounts()
        self.descriptions = Descriptions(self.counts)
        self.stamps = np.zeros(geometry.num_slots, np.uint64) if ledger is None else ledger.stamps
        self.uses = ChunkUses(self.stamps, pool, self.counts)
        self._pool = pool
        self.space = pool.join(geometry, self, model)
        self.ghosts = Ghosts(GHOSTS_PER_SLOT * geometry.num_slots)
        order = POLICIES[policy](geometry.num_slots, directory.key, self.ghosts)
        self.slots = slots = Slots(directory, order, self.space, self.counts)
        self.lending = Lending(slots, pool, self.uses, self.sweep)
        self.stores = Stores(slots, pool, self.uses, self.descriptions, self.ghosts)
        self.promotions = ChunkPromotions(slots, self.lending, self.uses, self.descriptions)
        self.loads = Loads(slots, self.uses)
        self.misses = MissReasons(directory, self.ghosts, self.counts, elsewhere)
        self.curve = MissCurve(geometry.num_slots) if forecasts else None

    def restore(self, chunks: LedgerChunks) -> None:
        """Take over the chunks of the previous daemon, into a table that is new.

        Raises:
            LedgerDamaged: they contradict each other.
            IntegrityError: they lie where another namespace's do.
        """
        geometry = self.space.geometry
        masks = (
            np.uint64(1) << (chunks.slots % geometry.world_size).astype(np.uint64)
            if geometry.replicated
            else np.full(len(chunks), geometry.writers(0), np.uint64)
        )
        self.directory.restore(chunks, masks)
        self._pool.restore(self.space, chunks.slots, int(chunks.stamps.max(initial=0)))
        self.slots.policy.restore(chunks.slots, self.stamps[chunks.slots] / 1e6)
        self.counts.restored = len(chunks)

    # ---------------------------------------------------------------- requests

    def finish_request(self, keys: Sequence[bytes], prompt: int, label: int, now: float) -> None:
        """A request with these keys has finished, or gets its label after that.

        Args:
            keys: of its chunks, its head first.
            prompt: how many of them are its prompt's.
            label: as `Step.labels` has it; one that is not known is none.
            now: seconds.
        """
        known = _LABELS.get(label & ~LABEL_ONLY, Label.NONE)
        if label & LABEL_ONLY:
            self.loads.relabel(keys, known)
            return
        if self.curve is not None:
            self.curve.record(keys, prompt)
        self.loads.refresh(keys, now, known)

    def learn(self) -> bool:
        """Do a piece of what the policy and the miss-ratio curve learn; whether more is due."""
        return self.slots.policy.learn() or (self.curve is not None and self.curve.tidy())

    # --------------------------------------------------------------- demotions

    def queue_demotions(self, *, ready: bool, asked: bool) -> None:
        """From now on note what is to go down: what becomes READY, or what is asked for."""
        self.uses.demotion_queues = (
            DemotionQueues(self.directory, ready=ready, asked=asked) if ready or asked else None
        )

    @property
    def on_ready(self) -> DemotionQueue | None:
        """Chunks that have become READY, to go down; None where no tier wants them."""
        demotion_queues = self.uses.demotion_queues
        return demotion_queues.on_ready if demotion_queues is not None else None

    @property
    def on_asked(self) -> DemotionQueue | None:
        """Chunks that have been asked for, to go down; None where no tier wants them."""
        demotion_queues = self.uses.demotion_queues
        return demotion_queues.on_asked if demotion_queues is not None else None

    # ------------------------------------------------------------- ends of things

    def expire(self, now: float) -> Refs:
        """End the leases and give up the stores whose deadline has come; slots to be revoked."""
        self.uses.set_time(now)
        late = [slot for slot, deadline in self.slots.tickets.items() if deadline <= now]
        self.counts.tickets_expired += sum(slot not in self.slots.filling for slot in late)
        leases, unpinned = self.slots.leases.expire(now)
        self.counts.leases_expired += leases
        self.slots.unpinned(unpinned)
        return self.slots.give_up(late)

    def drop_owner(self, owner: int) -> Refs:
        """An owner is gone: its leases and loans end, what it was writing is given up.

        Returns:
            What it was writing, to be revoked.
        """
        owned_by = self.directory.owner
        self.slots.unpinned(self.slots.leases.drop_owner(owner))
        self.lending.end_loans(owner)
        return self.slots.give_up([slot for slot in self.slots.tickets if owned_by(slot) == owner])

    def reset(self, *, by_operator: bool = False) -> tuple[ResetDone, Refs]:
        """Drop every chunk: from now on no lookup finds it, nor does the next daemon.

        What tiers keep is not known any more either. Slots are freed by `sweep`; those that are
        pinned go when their leases end. What was offered and not stored yet keeps its count.

        Returns:
            How many go now and how many when their leases end, and the slots to be revoked.
        """
        if self.directory.tiers is not None:
            self.directory.tiers.forget()
        writing = self.slots.give_up(list(self.slots.tickets))
        self.lending.end_all_loans()  # with their generations no chunk would be found any more
        gone, kept = self.slots.forget()
        if by_operator:
            self.counts.removed += gone + kept
        else:
            self.counts.reset += gone + kept
        return ResetDone(dropped=gone + len(writing), deferred=kept), writing

    def sweep(self) -> None:
        """Free some of the slots whose chunks a reset has dropped: a few milliseconds at most.

        And some of the tier table's places.
        """
        if self.directory.tiers is not None:
            self.directory.tiers.sweep()
        for _ in range(EMPTY_PIECES):
            slots = self.slots.take_forgotten(PIECE_SLOTS)
            self._remember_reset(slots)
            self.slots.leave(slots)
            if slots:
                break
        if not self.slots.forgotten:
            self.release_empty_columns()

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
        self.slots.end_loans(slots)
        self.counts.removed += len(slots)
        self._remember(slots, GhostCause.REMOVED)
        return self.slots.drop(slots)[0]

    def _remember_reset(self, slots: list[int]) -> None:
        """Keep the keys of chunks that a reset has dropped, unless they are here anew."""
        find, key = self.directory.find, self.directory.key
        self._remember([slot for slot in slots if find(key(slot)) < 0], GhostCause.RESET)

    def _remember(self, slots: list[int], cause: GhostCause) -> None:
        """Keep the keys of READY chunks that leave, and why."""
        now, key = self.uses.now, self.directory.key
        for slot, age in zip(slots, self.uses.ages(slots).tolist(), strict=True):
            self.ghosts.add(key(slot), cause, now, used=now - age)

    @property
    def held_bytes(self) -> int:
        """Bytes of the pool that the namespace owns, used or not."""
        return self._pool.held_bytes(self.space)

    def release_empty_columns(self) -> None:
        """Release the room that holds no chunk to other namespaces."""
        self._pool.release_empty_columns(self.space)

    # ------------------------------------------------------------ for the pool

    def busy_slots(self) -> Iterable[int]:
        """Slots that must stay: pinned, being written, draining."""
        return self.slots.busy()

    def yield_slots(self, slots: list[int]) -> None:
        """Evict these unpinned chunks and end these loans: another namespace needs the room."""
        self.slots.end_loans(slots)
        ready = [slot for slot in slots if self.directory.state(slot) == SlotState.READY]
        current = [slot for slot in ready if slot in self.slots.policy]
        forgotten = [slot for slot in ready if slot not in self.slots.policy]
        if current:
            self.counts.eviction_age.observe_all(self.uses.ages(current))
            self.counts.yielded += len(current)
            self.slots.policy.evict(current, self.uses.now)
            self.slots.leave(current)
        self._remember_reset(forgotten)
        self.slots.drop(forgotten)

    # -------------------------------------------------------------- inspection

    def check_integrity(self) -> None:
        """Raise IntegrityError where slots or counters contradict each other."""
        self.slots.check_integrity()
        self.counts.check_integrity()

    def __repr__(self) -> str:
        return f"<ChunkTable {self.directory.header.namespace.hex()[:8]} {self.slots!r}>"
