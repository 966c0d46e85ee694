"""The chunk table: every decision about the chunks of one namespace.

It and its parts are the only writers of the namespace's directory. The states of a slot::

    FREE -> WRITING     `stores.begin`: a scheduler's step gives a slot on loan to a key
    READY -> WRITING    the same for a slot with a chunk, which is evicted
    FREE -> WRITING     `promotions.begin`: a tier fills the slot
    WRITING -> READY    `stores.share_done` with the last expected rank; `promotions.complete`
    WRITING -> DRAINING a share failed, the store was dropped, the deadline passed, the session
                        ended, reset; `promotions.give_up`
    DRAINING -> FREE    revoked: no lane or tier writes there any more
    READY -> FREE       evicted, reset, or replaced by a store of more blocks. After a reset `sweep`
                        frees the slots; a pinned chunk is doomed: its slot is freed with the last
                        pin

Methods decide first and then act. None blocks, and none raises for what a client may send.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvd.cache.adaptive import POLICIES
from kvd.cache.directory import ChunkRefs, DirectoryWriter
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

PIECE_SLOTS = 512  # of one piece of a sweep or a clear: some milliseconds if each holds a chunk
EMPTY_PIECES = 64  # pieces without a chunk that are skipped at once at most
GHOSTS_PER_SLOT = 2
_LABELS = {int(label): label for label in Label}


class ChunkTable:
    """The chunks of one namespace.

    Args:
        directory: a new directory with the geometry's number of slots.
        geometry: the namespace's grid in the pool.
        pool: gives columns of slots.
        policy: of eviction, a name in `POLICIES`.
        model: whose quota applies; empty: none.
        elsewhere: tells whether another namespace has a key.
        forecasts: keep a miss-ratio curve.

    Attributes:
        stamps: of the last use of each slot; in the ledger, if any, for the next daemon.
        ghosts: of chunks that have left memory.
        lending: lends slots to schedulers.
        descriptions: of the chunks.
        stores, promotions, loads: begin and end these.
        misses: counts missed keys by reason.
        curve: the hit ratio of other pool sizes; None without `forecasts`.
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
        """Take over the previous daemon's chunks into a new table.

        Raises:
            LedgerDamaged: the chunks contradict each other.
            IntegrityError: another namespace owns some of their bytes.
        """
        geometry = self.space.geometry
        ranks_done = (
            np.uint64(1) << (chunks.slots % geometry.world_size).astype(np.uint64)
            if geometry.replicated
            else np.full(len(chunks), geometry.writers(0), np.uint64)
        )
        self.directory.restore(chunks, ranks_done)
        self._pool.restore(self.space, chunks.slots, int(chunks.stamps.max(initial=0)))
        self.slots.policy.restore(chunks.slots, self.stamps[chunks.slots] / 1e6)
        self.counts.restored = len(chunks)

    # ---------------------------------------------------------------- requests

    def finish_request(
        self, keys: Sequence[bytes], num_prompt: int, label: int, now: float
    ) -> None:
        """Process a request that has finished, or a label for one that finished before.

        Args:
            keys: of its chunks, the prompt's head first.
            num_prompt: how many of them are the prompt's.
            label: a byte of `Step.labels`; an unknown label counts as NONE.
            now: seconds.
        """
        request_label = _LABELS.get(label & ~LABEL_ONLY, Label.NONE)
        if label & LABEL_ONLY:
            self.loads.relabel(keys, request_label)
            return
        if self.curve is not None:
            self.curve.record(keys, num_prompt)
        self.loads.refresh(keys, now, request_label)

    def learn(self) -> bool:
        """Do one piece of background work for policy and curve; return whether more is due."""
        return self.slots.policy.learn() or (self.curve is not None and self.curve.tidy())

    # --------------------------------------------------------------- demotions

    def queue_demotions(self, *, ready: bool, asked: bool) -> None:
        """Queue chunks for tiers from now on: those that become READY, or that are asked for."""
        self.uses.demotion_queues = (
            DemotionQueues(self.directory, ready=ready, asked=asked) if ready or asked else None
        )

    @property
    def ready_queue(self) -> DemotionQueue | None:
        """Chunks to demote to tiers with `keep=all`; None if there is no such tier."""
        queues = self.uses.demotion_queues
        return queues.ready_queue if queues is not None else None

    @property
    def asked_queue(self) -> DemotionQueue | None:
        """Chunks to demote to tiers with `keep=asked`; None if there is no such tier."""
        queues = self.uses.demotion_queues
        return queues.asked_queue if queues is not None else None

    # ------------------------------------------- deadlines, owners, resets, removal

    def expire(self, now: float) -> ChunkRefs:
        """End leases and give up stores at their deadlines; return the stores to be revoked."""
        self.uses.set_time(now)
        late = [slot for slot, deadline in self.slots.tickets.items() if deadline <= now]
        self.counts.tickets_expired += sum(slot not in self.slots.filling for slot in late)
        num_expired, unpinned = self.slots.leases.expire(now)
        self.counts.leases_expired += num_expired
        self.slots.free_unpinned(unpinned)
        return self.slots.give_up(late)

    def drop_owner(self, owner: int) -> ChunkRefs:
        """End an owner's leases and loans; return its WRITING chunks, for the caller to revoke."""
        owned_by = self.directory.owner
        self.slots.free_unpinned(self.slots.leases.drop_owner(owner))
        self.lending.end_loans(owner)
        return self.slots.give_up([slot for slot in self.slots.tickets if owned_by(slot) == owner])

    def reset(self, *, by_operator: bool = False) -> tuple[ResetDone, ChunkRefs]:
        """Drop every chunk: no lookup finds it from now on, and neither does the next daemon.

        Entries of the tier table become invalid, too. `sweep` frees the slots; pinned ones are
        freed when their leases end. The reuse filters of schedulers keep their counts.

        Returns:
            The reply, and the WRITING chunks, for the caller to revoke.
        """
        if self.directory.tiers is not None:
            self.directory.tiers.forget()
        writing = self.slots.give_up(list(self.slots.tickets))
        self.lending.end_all_loans()  # the floor will be above the loans' generations
        num_forgotten, num_doomed = self.slots.forget()
        if by_operator:
            self.counts.removed += num_forgotten + num_doomed
        else:
            self.counts.reset += num_forgotten + num_doomed
        return ResetDone(dropped=num_forgotten + len(writing), deferred=num_doomed), writing

    def sweep(self) -> None:
        """Free some slots and tier table entries that a reset dropped: a few milliseconds."""
        if self.directory.tiers is not None:
            self.directory.tiers.sweep()
        for _ in range(EMPTY_PIECES):
            slots = self.slots.take_forgotten(PIECE_SLOTS)
            self._add_reset_ghosts(slots)
            self.slots.free_or_defer(slots)
            if slots:
                break
        if not self.slots.forgotten:
            self.release_empty_columns()

    @property
    def is_swept(self) -> bool:
        """Whether `sweep` has nothing left to do."""
        tiers = self.directory.tiers
        return not self.slots.forgotten and (tiers is None or tiers.is_swept)

    def remove(self, first: int, count: int, unused_for: float) -> int:
        """Drop unpinned chunks in `count` slots from `first` on, unused for so long; how many."""
        pins, policy = self.slots.leases.pins, self.slots.policy
        ready = self.directory.slots_in(SlotState.READY, first, count)
        slots = [slot for slot in ready if slot in policy and slot not in pins]
        slots = np.array(slots, np.int64)[self.uses.ages(slots) >= unused_for].tolist()
        self.slots.end_loans(slots)
        self.counts.removed += len(slots)
        self._add_ghosts(slots, GhostCause.REMOVED)
        return self.slots.drop(slots)[0]

    def _add_reset_ghosts(self, slots: list[int]) -> None:
        """Add ghosts of chunks that a reset has dropped, unless their keys are in memory again."""
        find, key = self.directory.find, self.directory.key
        self._add_ghosts([slot for slot in slots if find(key(slot)) < 0], GhostCause.RESET)

    def _add_ghosts(self, slots: list[int], cause: GhostCause) -> None:
        """Add ghosts of READY chunks that are dropped."""
        now, key = self.uses.now, self.directory.key
        for slot, age in zip(slots, self.uses.ages(slots).tolist(), strict=True):
            self.ghosts.add(key(slot), cause, now, used=now - age)

    @property
    def held_bytes(self) -> int:
        """Bytes of the pool that the namespace owns, with free slots."""
        return self._pool.held_bytes(self.space)

    def release_empty_columns(self) -> None:
        """Release the columns without a used slot."""
        self._pool.release_empty_columns(self.space)

    # ------------------------------------------------------------ for the pool

    def busy_slots(self) -> Iterable[int]:
        """Return the slots that cannot be freed: pinned, being written, draining."""
        return self.slots.busy()

    def surrender_slots(self, slots: list[int]) -> None:
        """Give up these slots, none of them in `busy_slots`, to another namespace.

        Loans end, current chunks are evicted, and chunks that a reset removed from the policy, but
        `sweep` has not freed yet, are dropped.
        """
        self.slots.end_loans(slots)
        ready = [slot for slot in slots if self.directory.state(slot) == SlotState.READY]
        current = [slot for slot in ready if slot in self.slots.policy]  # lookups find their chunks
        forgotten = [slot for slot in ready if slot not in self.slots.policy]  # dropped by a reset
        if current:
            self.counts.eviction_age.observe_all(self.uses.ages(current))
            self.counts.yielded += len(current)
            self.slots.policy.evict(current, self.uses.now)
            self.slots.free_or_defer(current)
        self._add_reset_ghosts(forgotten)
        self.slots.drop(forgotten)

    # -------------------------------------------------------------- inspection

    def check_integrity(self) -> None:
        """Raise IntegrityError if slots or counters contradict each other."""
        self.slots.check_integrity()
        self.counts.check_integrity()
