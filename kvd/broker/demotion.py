"""What goes down to tiers: chunks that were asked for, or all, ahead of their eviction.

A put needs no pin: the tier looks before and after whether the slot still holds the chunk. So
nothing here holds memory, and what is evicted before its turn is only not kept.
"""

from kvd.broker.effects import Effect, ToTier
from kvd.broker.state import BrokerState
from kvd.broker.tiers import BATCH_BYTES, BATCH_CHUNKS, Batch, Tier
from kvd.cache.directory import covers
from kvd.cache.namespaces import Namespace
from kvd.wire.tiering import Done, Drop, Outcome, Put
from kvd_proto.arrays import IntArray

CHUNKS_A_TURN = 256  # of all namespaces: a millisecond or two
PUT_SECONDS = 10.0
PAUSE_SECONDS = 0.005  # in which a batch comes together

_Chunk = tuple[bytes, int, int, int, int, int]
"""Key, slot, generation, first block, count, group."""


class Demotion:
    """Decisions about puts."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._next = 0.0
        self.blocked = False  # what waits cannot go on before a put has ended

    def watch(self, namespace: Namespace) -> None:
        """Have a namespace's table note what is to go down."""
        keeps = {tier.setting.keep for tier in self._state.tiers}
        namespace.table.watch(ready="all" in keeps, asked="asked" in keeps)

    def waiting(self, now: float) -> bool:
        """Whether a chunk waits that some tier would take."""
        return any(
            (table.on_asked and self._takers(namespace, "asked", now))
            or (table.on_ready and self._takers(namespace, "all", now))
            for namespace in self._state.open_namespaces
            for table in (namespace.table,)
        )

    def pause(self, now: float) -> float:
        """Seconds until `work` does something."""
        return max(0.0, self._next - now)

    def work(self, now: float) -> list[Effect]:
        """Send some of what waits."""
        if now < self._next:
            return []
        self._next = now + PAUSE_SECONDS
        self.blocked = False
        left, effects = CHUNKS_A_TURN, list[Effect]()
        for namespace in self._state.open_namespaces:
            nbytes = namespace.geometry.bytes_per_chunk
            table = namespace.table
            for queue, keep in ((table.on_asked, "asked"), (table.on_ready, "all")):
                if not queue or left <= 0:
                    continue
                # The slowest that is in use sets the pace, so that each gets all chunks.
                takers = self._takers(namespace, keep, now)
                room = min((tier.put_room(now) // nbytes for tier in takers), default=0)
                if takers and not any(tier.put_bytes for tier in takers):
                    room = max(room, 1)  # a chunk may be larger than the queue
                if room < 1:
                    self.blocked |= bool(takers)
                    continue
                chunks = queue.take(min(room, left))
                left -= len(chunks)
                for tier in takers:
                    effects += self._put(tier, namespace, chunks, now)
        return effects

    def _takers(self, namespace: Namespace, keep: str, now: float) -> list[Tier]:
        return [
            tier
            for tier in self._state.tiers
            if tier.setting.keep == keep and tier.serves(namespace) and now >= tier.full_until
        ]

    def probe(self, tier: Tier, now: float) -> list[Effect]:
        """Try a tier with one chunk, of those that wait."""
        for namespace in self._state.open_namespaces:
            opening = tier.spaces.get(namespace)
            if opening is None or not opening.used:
                continue
            for queue in (namespace.table.on_asked, namespace.table.on_ready):
                if queue and (chunks := queue.take(1)):
                    return self._put(tier, namespace, chunks, now)
        return []

    def _put(
        self, tier: Tier, namespace: Namespace, chunks: list[_Chunk], now: float
    ) -> list[Effect]:
        new = [chunk for chunk in chunks if not _is_held(tier, namespace, chunk)]
        nbytes = namespace.geometry.bytes_per_chunk
        piece = max(1, min(BATCH_CHUNKS, BATCH_BYTES // nbytes))
        effects = []
        for begin in range(0, len(new), piece):
            part = new[begin : begin + piece]
            keys, slots, generations, first, count, groups = zip(*part, strict=True)
            order = Put(
                number=tier.number(),
                namespace=namespace.id,
                keys=keys,
                slots=IntArray.of(slots, "u4"),
                generations=IntArray.of(generations, "u8"),
                first=IntArray.of(first, "u2"),
                count=IntArray.of(count, "u2"),
                groups=IntArray.of(groups, "u2"),
                deadline_ms=int(PUT_SECONDS * 1000),
            )
            size = nbytes * len(part)
            alone = not tier.put_bytes
            batch = Batch(order, namespace, namespace.epoch, size, now, alone)
            effects.append(tier.send(batch))
        return effects

    def done(self, tier: Tier, batch: Batch, order: Put, done: Done, now: float) -> list[Effect]:
        """A put has ended: what is kept is found from now on."""
        namespace, counts, unknown = batch.namespace, tier.counts.puts, list[bytes]()
        tiers = namespace.directory.tiers if batch.epoch == namespace.epoch else None
        nbytes = namespace.geometry.bytes_per_chunk
        columns = (order.first.tolist(), order.count.tolist(), order.groups.tolist())
        rows = zip(order.keys, done.outcomes.tolist(), *columns, strict=True)
        for key, code, first, count, group in rows:
            outcome = Outcome(code)
            counts[outcome.name.lower()] += 1
            if outcome is Outcome.OK:
                tier.counts.put_bytes += nbytes
                tier.has_room()
                found = tiers is None or tiers.hold(key, tier.index, first, count, group)
                if not found:
                    unknown.append(key)
            elif outcome is Outcome.FULL:
                tier.full(now)
        if unknown and not tier.info.shared:  # the table is full: nobody would find them
            return [ToTier(tier.index, Drop(namespace=namespace.id, keys=tuple(unknown)))]
        return []

    def __repr__(self) -> str:
        return f"<Demotion to {len(self._state.tiers)} tiers>"


def _is_held(tier: Tier, namespace: Namespace, chunk: _Chunk) -> bool:
    """Whether the tier has all blocks of the chunk already."""
    tiers = namespace.directory.tiers
    place = tiers.find(chunk[0]) if tiers is not None else None
    if place is None or not place.tiers >> tier.index & 1:
        return False
    return covers((place.first, place.count), (chunk[3], chunk[4])) and place.group == chunk[5]
