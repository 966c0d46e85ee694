"""Demotion: puts of chunks to tiers before the pool evicts them.

A tier keeps the chunks that were asked for, or all (`keep`). A put needs no pin: the tier checks
before and after the copy that the slot still holds the chunk, so demotion holds no memory. A chunk
that is evicted before its turn is not kept, even with `keep=all`: a store never waits for a tier.
Such chunks are counted for each tier that should have kept them (`unkept`).

Chunks are gathered for a moment: a batch costs as much processor time as dozens of chunks.
"""

import math
from collections.abc import Iterator

from kvd.broker.effects import Effect, ToTier
from kvd.broker.state import BrokerState
from kvd.broker.tiers.tier import BATCH_BYTES, TierBatch, TierProcess
from kvd.cache.directory import covers
from kvd.cache.namespaces import Namespace
from kvd.cache.uses import DemotionQueue
from kvd.outcomes import Outcome
from kvd.wire.tiering import BatchResult, Drop, Put
from kvd_proto.jobs import IntArray

CHUNKS_PER_TURN = 64  # of all namespaces: 0.2 ms, and 0.4 ms for the answer
PUT_SECONDS = 10.0
GATHER_SECONDS = 0.1
"""How long a batch that is not full waits for more chunks."""
FULL_BATCH_PART = 16
"""A batch of 1/16 of the chunks in memory is full: waiting would risk their eviction."""

_Chunk = tuple[bytes, int, int, int, int, int]
"""Key, slot, generation, first block, count, group."""


class Demotion:
    """Decides which chunks are put to which tiers, and when."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._flush_at: float | None = None  # when all queues are sent; None: they are empty
        self.blocked = False  # the queues wait for the end of a put

    def watch(self, namespace: Namespace) -> None:
        """Have a namespace's table queue the chunks that tiers are to keep."""
        keeps = {tier.setting.keep for tier in self._state.tiers}
        namespace.table.queue_demotions(ready="all" in keeps, asked="asked" in keeps)

    def due(self, now: float) -> float:
        """Return the seconds until `work` has something to do, unless events come; may be inf.

        Call it after each turn: it starts the gathering time when chunks begin to wait.
        """
        soonest, has_chunks = math.inf, False
        if self.blocked:
            return soonest
        for namespace, queue, keep in self._queues():
            has_chunks = True
            if self._flush_at is None:
                self._flush_at = now + GATHER_SECONDS
            if now < self._flush_at and len(queue) < _full_batch(namespace):
                soonest = self._flush_at - now
            elif self._takers(namespace, keep, now):
                return 0.0
        if not has_chunks:
            self._flush_at = None
        return soonest

    def work(self, now: float) -> list[Effect]:
        """Send full batches, and after the gathering time the rest; `CHUNKS_PER_TURN` at most."""
        self.blocked = False
        flush = self._flush_at is not None and now >= self._flush_at
        budget, has_rest, effects = CHUNKS_PER_TURN, False, list[Effect]()
        for namespace, queue, keep in self._queues():
            full = _full_batch(namespace)
            num_due = len(queue) if flush else len(queue) // full * full
            takers = self._takers(namespace, keep, now) if num_due else []
            if not takers:
                continue
            # The slowest tier in use sets the pace, so that each tier gets all chunks.
            nbytes = namespace.geometry.bytes_per_chunk
            room = min(tier.put_room(now) // nbytes for tier in takers)
            if not any(tier.put_bytes for tier in takers):
                room = max(room, 1)  # a chunk may be larger than the queue
            self.blocked |= room < 1
            chunks = _take(queue, max(0, min(num_due, room, budget)), takers)
            budget -= len(chunks)
            for tier in takers:
                effects += self._put(tier, namespace, chunks, now)
            has_rest |= bool(queue)
        if flush and not has_rest:
            self._flush_at = None
        return effects

    def _queues(self) -> Iterator[tuple[Namespace, DemotionQueue, str]]:
        """Non-empty queues, each with the `keep` setting of the tiers that take its chunks."""
        for namespace in self._state.open_namespaces:
            table = namespace.table
            for queue, keep in ((table.asked_queue, "asked"), (table.ready_queue, "all")):
                if queue:
                    yield namespace, queue, keep

    def _takers(self, namespace: Namespace, keep: str, now: float) -> list[TierProcess]:
        return [
            tier
            for tier in self._state.tiers
            if tier.setting.keep == keep and tier.serves(namespace) and now >= tier.full_until
        ]

    def probe(self, tier: TierProcess, now: float) -> list[Effect]:
        """Send the tier one chunk that waits to be demoted, as the half-open breaker's probe.

        The chunk is taken off its queue, whatever the tier's `keep`, so the other tiers do not get
        it. Empty if none waits or the tier has the chunk: the caller then closes the breaker.
        """
        for namespace in self._state.open_namespaces:
            tier_namespace = tier.namespaces.get(namespace)
            if tier_namespace is None or tier_namespace.salt is None:
                continue
            for queue in (namespace.table.asked_queue, namespace.table.ready_queue):
                if queue and (chunks := _take(queue, 1, [tier])):
                    return self._put(tier, namespace, chunks, now)
        return []

    def _put(
        self, tier: TierProcess, namespace: Namespace, chunks: list[_Chunk], now: float
    ) -> list[Effect]:
        """Send the chunks that the tier does not have yet, in batches."""
        new = [chunk for chunk in chunks if not _has_chunk(tier, namespace, chunk)]
        nbytes = namespace.geometry.bytes_per_chunk
        batch_size = _max_batch(namespace)
        effects = []
        for begin in range(0, len(new), batch_size):
            batch_chunks = new[begin : begin + batch_size]
            keys, slots, generations, first, count, groups = zip(*batch_chunks, strict=True)
            order = Put(
                number=tier.next_number(),
                namespace=namespace.id,
                keys=keys,
                slots=IntArray.of(slots, "u4"),
                generations=IntArray.of(generations, "u8"),
                first=IntArray.of(first, "u2"),
                count=IntArray.of(count, "u2"),
                groups=IntArray.of(groups, "u2"),
                deadline_ms=int(PUT_SECONDS * 1000),
            )
            batch = TierBatch(order, namespace, now, nbytes * len(batch_chunks), namespace.salt)
            effects.append(tier.send(batch))
        return effects

    def put_ended(
        self, tier: TierProcess, batch: TierBatch, order: Put, result: BatchResult, now: float
    ) -> list[Effect]:
        """Process the answer to a put.

        A kept chunk enters the table of tiers; the others may be put again. If the table has no
        room for a chunk, the tier is told to drop it: it would never be found.
        """
        namespace, counts, unlisted = batch.namespace, tier.counts.puts, list[bytes]()
        tiers = namespace.directory.tiers if batch.salt == namespace.salt else None
        nbytes = namespace.geometry.bytes_per_chunk
        queues = namespace.table.uses.demotion_queues
        columns = (order.first.tolist(), order.count.tolist(), order.groups.tolist())
        rows = zip(order.keys, result.outcomes.tolist(), batch.refs, *columns, strict=True)
        for key, code, ref, first, count, group in rows:
            outcome = Outcome(code)
            counts[outcome.name.lower()] += 1
            if outcome is Outcome.OK:
                tier.counts.put_bytes += nbytes
                tier.on_put_ok()
                if tiers is not None and not tiers.hold(key, tier.index, first, count, group):
                    unlisted.append(key)
            elif outcome is Outcome.FULL:
                tier.on_full(now)
            elif outcome in {Outcome.GONE, Outcome.LATE}:
                tier.counts.unkept += 1
            if outcome is not Outcome.OK and queues is not None:
                queues.note_put_failed(*ref)
        if unlisted and not tier.info.shared:
            return [ToTier(tier.index, Drop(namespace=namespace.id, keys=tuple(unlisted)))]
        return []


def _take(queue: DemotionQueue, n: int, takers: list[TierProcess]) -> list[_Chunk]:
    """Take `n` chunks of a queue; count those evicted meanwhile as `unkept` of each taker."""
    chunks, unkept = queue.take(n), queue.take_missed()
    for tier in takers:
        tier.counts.unkept += unkept
    return chunks


def _max_batch(namespace: Namespace) -> int:
    """The largest number of chunks in a batch."""
    return max(1, min(CHUNKS_PER_TURN, BATCH_BYTES // namespace.geometry.bytes_per_chunk))


def _full_batch(namespace: Namespace) -> int:
    """The number of chunks from which a batch does not wait for more."""
    return max(1, min(_max_batch(namespace), len(namespace.table.slots.policy) // FULL_BATCH_PART))


def _has_chunk(tier: TierProcess, namespace: Namespace, chunk: _Chunk) -> bool:
    """Whether the tier already has all blocks of the chunk."""
    key, _, _, first, count, group = chunk
    tiers = namespace.directory.tiers
    entry = tiers.find(key) if tiers is not None else None
    if entry is None or not entry.tiers >> tier.index & 1:
        return False
    return covers((entry.first, entry.count), (first, count)) and entry.group == group
