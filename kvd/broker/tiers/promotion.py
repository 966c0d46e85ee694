"""Promotion: gets of chunks from tiers into memory, requested by engines.

A promotion takes a slot first, so the bytes under way are bounded: by what keeps the tier busy
(`TierProcess.get_room`), and by a quarter of what the namespace holds plus what is free. Requests
without room wait for up to two seconds; engines take turns (`PromotionRequests`), and so do
namespaces. A shared tier is first asked whether it has a chunk; its chunks are promoted at once.

A slot that a tier was told to fill is reused only after the batch has ended, or the tier's process
has: until then the medium may still write to the slot.
"""

import os
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from kvd.broker.effects import ChunksReady, Effect, LogEvent
from kvd.broker.state import BrokerState
from kvd.broker.tiers.tier import BATCH_BYTES, BATCH_CHUNKS, TierBatch, TierProcess, first_of
from kvd.cache.namespaces import Namespace
from kvd.cache.tier_table import TierTable
from kvd.outcomes import Outcome
from kvd.wire.tiering import Ask, Done, Get
from kvd_proto.arrays import IntArray

KEYS_A_TURN = 512  # keys examined in a turn: one or two milliseconds
SOUGHT_SECONDS = 2.0  # a request older than this is dropped
DESCRIBED_BYTES = 128 * 1024
ASK_KEYS = 1024
UNUSED_SECONDS = 0.25  # if slots lack, loans unused for so long are taken back
SLOT_SECONDS = 30.0  # a slot that is not filled by then is given up, whatever the tier does
REACH_PART = 4  # promotions may fill a quarter of the namespace's reach, see `_reach`
MAX_REQUESTS = 65536
"""Most keys of an engine that waits alone. With n engines waiting, each may add up to an n-th."""


class PromotionRequest(NamedTuple):
    """A key that engines want in memory.

    Attributes:
        key: of the chunk.
        engines: numbers of the engines that want it.
        since: when it was requested, in monotonic seconds.
        tier: the shared tier that has confirmed that it has the chunk; None if none has.
    """

    key: bytes
    engines: frozenset[int]
    since: float
    tier: TierProcess | None = None

    def joined(self, other: "PromotionRequest | None") -> "PromotionRequest":
        """Return this request, also for the engines of another request for the same key."""
        return self._replace(engines=self.engines | other.engines) if other else self


class PromotionRequests:
    """Requests of one namespace: a FIFO queue for each engine, served round-robin.

    So ten keys of one engine wait for ten keys of another, not for all of them.
    """

    def __init__(self) -> None:
        # In the order of turns: the next engine comes first.
        self._queues: OrderedDict[int, deque[PromotionRequest]] = OrderedDict()
        self._count = 0

    def extend(self, engine: int, keys: Sequence[bytes], now: float) -> int:
        """Append an engine's keys, as far as there is room.

        Returns:
            The number of keys for which there was no room.
        """
        queue = self._queues.get(engine, deque())
        engines = len(self._queues.keys() | {engine})
        accepted = keys[: max(0, MAX_REQUESTS // engines - len(queue))]
        if accepted:
            wanted_by = frozenset({engine})
            self._queues[engine] = queue
            queue.extend(PromotionRequest(key, wanted_by, now) for key in accepted)
            self._count += len(accepted)
        return len(keys) - len(accepted)

    def pop(self) -> PromotionRequest:
        """Take the next request of the engine whose turn it is; the next engine's turn follows.

        Raises:
            KeyError: there is no request.
        """
        engine, queue = self._queues.popitem(last=False)
        request = queue.popleft()
        if queue:
            self._queues[engine] = queue
        self._count -= 1
        return request

    def put_back(self, requests: Iterable[PromotionRequest]) -> None:
        """Put requests at the head, in this order, even beyond `MAX_REQUESTS`."""
        for request in reversed(list(requests)):
            engine = min(request.engines, default=-1)  # none if the tier was set aside meanwhile
            self._queues.setdefault(engine, deque()).appendleft(request)
            self._queues.move_to_end(engine, last=False)
            self._count += 1

    def clear(self) -> int:
        """Remove all requests.

        Returns:
            How many there were.
        """
        count, self._count = self._count, 0
        self._queues.clear()
        return count

    def __len__(self) -> int:
        return self._count


class _Waiting:
    """Requests, unanswered Asks and bytes under way of one namespace."""

    def __init__(self) -> None:
        self.keys = PromotionRequests()
        self.asked: dict[bytes, TierBatch] = {}
        self.under_way = 0  # bytes of gets


class Promotion:
    """Decides which chunks to get from which tiers, and what to ask shared tiers."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._waiting: OrderedDict[Namespace, _Waiting] = OrderedDict()
        self._filling: dict[tuple[Namespace, int], TierBatch] = {}  # by slot
        self.blocked = False  # requests cannot go on before a get has ended or slots are free

    @property
    def waiting(self) -> bool:
        """Whether requests wait."""
        return any(waiting.keys for waiting in self._waiting.values())

    def waiting_bytes(self, namespace: Namespace) -> int:
        """Bytes of the chunks requested and not yet ordered, at most."""
        waiting = self._waiting.get(namespace)
        return len(waiting.keys) * namespace.geometry.bytes_per_chunk if waiting else 0

    def request(
        self, namespace: Namespace, engine: int, keys: Sequence[bytes], now: float
    ) -> list[Effect]:
        """Queue an engine's request for these keys, a prompt's head first, and start on it."""
        if namespace.directory.tiers is None:
            return []
        waiting = self._waiting.setdefault(namespace, _Waiting())
        namespace.table.counts.sought_dropped += waiting.keys.extend(engine, keys, now)
        return self._work(namespace, waiting, now)

    def prune(self) -> None:
        """Drop the requests of closed namespaces."""
        for namespace in [each for each in self._waiting if not self._state.is_open(each)]:
            del self._waiting[namespace]

    def work(self, now: float) -> list[Effect]:
        """Order what is requested, as far as there is room."""
        self.blocked = False
        effects: list[Effect] = []
        for namespace, waiting in list(self._waiting.items()):
            if waiting.keys and self._state.is_open(namespace):
                self._waiting.move_to_end(namespace)  # other namespaces come first next time
                effects += self._work(namespace, waiting, now)
        return effects

    # -------------------------------------------------------------------- down

    def _work(self, namespace: Namespace, waiting: _Waiting, now: float) -> list[Effect]:
        tiers = namespace.directory.tiers
        if tiers is None or not self._state.pool_ready or self._state.draining:
            _drop(namespace, waiting)
            return []
        shared = self._shared(namespace)
        wanted, unknown = self._sorted(namespace, waiting, tiers, now, ask=shared is not None)
        effects: list[Effect] = []
        for tier, these in wanted.items():
            effects += self._get_all(tier, namespace, waiting, these, now)
        if shared is not None and unknown:
            effects += self._ask(shared, namespace, waiting, unknown, now)
        return effects

    def _sorted(
        self,
        namespace: Namespace,
        waiting: _Waiting,
        tiers: TierTable,
        now: float,
        *,
        ask: bool,
    ) -> tuple[dict[TierProcess, dict[bytes, PromotionRequest]], dict[bytes, PromotionRequest]]:
        """Take requests from the queues and sort them by tier, as far as there is room.

        Requests that have expired, are in memory or no usable tier can serve are consumed.

        Returns:
            Requests to get, by tier; and, with `ask`, requests of which no tier is known.
        """
        keys, find = waiting.keys, namespace.directory.find
        nbytes, coming = namespace.geometry.bytes_per_chunk, waiting.under_way
        most = max(nbytes, self._reach(namespace) // REACH_PART)
        wanted: dict[TierProcess, dict[bytes, PromotionRequest]] = {}
        unknown: dict[bytes, PromotionRequest] = {}
        set_aside: list[PromotionRequest] = []  # their tier is busy; other tiers may have room
        for _ in range(min(KEYS_A_TURN, len(keys))):
            sought = keys.pop()
            key = sought.key
            if now - sought.since > SOUGHT_SECONDS:
                namespace.table.counts.sought_dropped += 1
                continue
            if (slot := find(key)) >= 0:
                if (batch := self._filling.get((namespace, slot))) is not None:
                    batch.engines |= sought.engines
                continue
            tier, place = sought.tier, None
            if tier is None or not tier.serves(namespace):
                place = tiers.find(key)
                tier = first_of(self._state.tiers, place.tiers, namespace) if place else None
            if tier is None:
                if (asked := waiting.asked.get(key)) is not None:
                    asked.engines |= sought.engines
                elif place is None and ask:
                    unknown[key] = sought.joined(unknown.get(key))
                continue
            mine = wanted.setdefault(tier, {})
            if key in mine:
                mine[key] = sought.joined(mine[key])
            elif coming + nbytes <= most and tier.get_room(nbytes * len(mine), nbytes):
                mine[key] = sought
                coming += nbytes
            else:
                set_aside.append(sought)
                if coming + nbytes > most or len(self._state.tiers) == 1:
                    break
        self.blocked |= bool(set_aside)
        keys.put_back(set_aside)
        return wanted, unknown

    def _reach(self, namespace: Namespace) -> int:
        """Bytes of the pool that the namespace holds, plus those that are free."""
        namespaces = self._state.namespaces
        free = namespaces.pool.free_bytes if namespaces is not None else 0
        return namespace.table.held_bytes + free

    def _shared(self, namespace: Namespace, after: int = -1) -> TierProcess | None:
        """The first shared tier after index `after` that serves the namespace."""
        for tier in self._state.tiers:
            if tier.index > after and tier.info.shared and tier.serves(namespace):
                return tier
        return None

    def _get_all(
        self,
        tier: TierProcess,
        namespace: Namespace,
        waiting: _Waiting,
        wanted: dict[bytes, PromotionRequest],
        now: float,
    ) -> list[Effect]:
        piece, table = BATCH_BYTES // namespace.geometry.bytes_per_chunk, namespace.table
        if room := table.descriptions.room:  # so that all descriptions fit the answer
            piece = min(piece, DESCRIBED_BYTES // (room + 64))
        piece = max(1, min(BATCH_CHUNKS, piece))
        keys, effects = list(wanted), list[Effect]()
        for begin in range(0, len(keys), piece):
            part = keys[begin : begin + piece]
            engines = set[int]().union(*(wanted[key].engines for key in part))
            effects += self.get(tier, namespace, part, engines, now)
            find = namespace.directory.find
            if find(part[-1]) < 0:  # slots ran out: the rest waits
                again = [key for key in keys[begin:] if find(key) < 0]
                waiting.keys.put_back(wanted[key] for key in again)
                self.blocked = True
                if again:
                    for each in self._state.open_namespaces:
                        each.table.lending.end_unused_loans(now - UNUSED_SECONDS)
                break
        return effects

    def get(
        self,
        tier: TierProcess,
        namespace: Namespace,
        keys: Sequence[bytes],
        engines: Collection[int],
        now: float,
    ) -> list[Effect]:
        """Order a tier to fill slots with these chunks, as far as there are slots."""
        usable = None if self._state.pool_usable else self._state.pinned_bytes
        taken = namespace.table.promotions.begin(
            keys, tier.process, now, SLOT_SECONDS, len(keys), usable=usable
        )
        if not taken:
            return []
        found, slots, generations = zip(*taken, strict=True)
        size = len(taken) * namespace.geometry.bytes_per_chunk
        order = Get(
            number=tier.number(),
            namespace=namespace.id,
            keys=found,
            slots=IntArray.of(slots, "u4"),
            generations=IntArray.of(generations, "u8"),
            deadline_ms=max(1, int(tier.deadline(size) * 1000)),
        )
        alone = not tier.get_bytes
        batch = TierBatch(order, namespace, now, size, alone=alone, engines=set(engines))
        self._filling.update(((namespace, slot), batch) for slot in slots)
        self._waiting.setdefault(namespace, _Waiting()).under_way += size
        return [tier.send(batch)]

    def _ask(
        self,
        tier: TierProcess,
        namespace: Namespace,
        waiting: _Waiting,
        unknown: dict[bytes, PromotionRequest],
        now: float,
    ) -> list[Effect]:
        effects, keys = list[Effect](), list(unknown)
        for begin in range(0, len(keys), ASK_KEYS):
            part = keys[begin : begin + ASK_KEYS]
            seconds = max(4 * tier.speed.seconds(0), tier.setting.late_seconds)
            order = Ask(
                number=tier.number(),
                namespace=namespace.id,
                keys=tuple(part),
                deadline_ms=max(1, int(seconds * 1000)),
            )
            engines = set[int]().union(*(unknown[key].engines for key in part))
            batch = TierBatch(order, namespace, now, engines=engines)
            waiting.asked.update(dict.fromkeys(part, batch))
            effects.append(tier.send(batch))
        return effects

    def probe(self, tier: TierProcess, namespace: Namespace, now: float) -> list[Effect]:
        """Probe a shared tier: ask it for a random key."""
        order = Ask(
            number=tier.number(),
            namespace=namespace.id,
            keys=(os.urandom(16),),
            deadline_ms=int(tier.setting.late_seconds * 1000),
        )
        return [tier.send(TierBatch(order, namespace, now))]

    # ---------------------------------------------------------------------- up

    def done(
        self, tier: TierProcess, batch: TierBatch, order: Get, done: Done, now: float
    ) -> list[Effect]:
        """Process the answer to a get: chunks that are OK become READY, other slots are freed."""
        self._settle(batch)
        namespace, counts = batch.namespace, tier.counts
        table, tiers = namespace.table, namespace.directory.tiers
        nbytes, effects = namespace.geometry.bytes_per_chunk, list[Effect]()
        outcomes, refs, ready = done.outcomes.tolist(), batch.refs, 0
        columns = (done.first.tolist(), done.count.tolist(), done.groups.tolist())
        failed = []
        for i, (key, ref, code) in enumerate(zip(order.keys, refs, outcomes, strict=True)):
            outcome = Outcome(code)
            counts.gets[outcome.name.lower()] += 1
            if outcome is Outcome.OK:
                blocks = columns[0][i], columns[1][i], columns[2][i]
                counts.get_bytes += nbytes
                if table.promotions.done(*ref, *blocks, done.descriptions[i]):
                    ready += 1
                    if tiers is not None:
                        tiers.hold(key, tier.index, *blocks)
                continue
            failed.append(ref)
            if outcome in {Outcome.ABSENT, Outcome.CORRUPT} and tiers is not None:
                tiers.release(key, tier.index)
                if tier.info.shared:
                    tiers.absent(key, now)
            if outcome is Outcome.CORRUPT:
                text = (
                    f"tier {tier.name}: what came up for slot {ref[0]} of namespace"
                    f" {namespace.id.hex()[:8]} is not what was put there; it is dropped and"
                    " computed again"
                )
                effects.append(LogEvent(text, "error", {"tier": tier.name}))
                tier.breaker.corrupt(now)
        table.promotions.give_up(failed)
        _free(tier, batch)
        if ready:
            tier.speed.observe(ready * nbytes, now, batch.sent if batch.alone else None)
        else:
            tier.speed.begin(now)
        return [*effects, *map(ChunksReady, sorted(batch.engines))]

    def answered(
        self, tier: TierProcess, batch: TierBatch, order: Ask, done: Done, now: float
    ) -> list[Effect]:
        """Process the answer to an Ask: get what the tier has, ask the next one for the rest."""
        namespace = batch.namespace
        waiting = self._waiting.setdefault(namespace, _Waiting())
        for key in order.keys:
            waiting.asked.pop(key, None)
        engines, absent = frozenset(batch.engines), list[bytes]()
        there: list[PromotionRequest] = []
        for key, code in zip(order.keys, done.outcomes.tolist(), strict=True):
            outcome = Outcome(code)
            tier.counts.asks[_ASKED.get(outcome, "failed")] += 1
            if outcome is Outcome.OK:
                there.append(PromotionRequest(key, engines, now, tier))
            elif outcome is Outcome.ABSENT:
                absent.append(key)
        waiting.keys.put_back(there)
        effects = self._work(namespace, waiting, now)
        following = self._shared(namespace, tier.index)
        if following is not None and absent:
            unknown = {key: PromotionRequest(key, engines, now) for key in absent}
            effects += self._ask(following, namespace, waiting, unknown, now)
        elif (tiers := namespace.directory.tiers) is not None:
            for key in absent:
                tiers.absent(key, now)
        return [*effects, *map(ChunksReady, sorted(batch.engines))]

    def give_up(self, tier: TierProcess) -> list[Effect]:
        """End all waiting for a tier that is set aside; its gets keep slots until they end."""
        engines: set[int] = set()
        for batch in tier.batches.values():
            if isinstance(batch.order, Ask):
                if (waiting := self._waiting.get(batch.namespace)) is not None:
                    for key in batch.order.keys:
                        waiting.asked.pop(key, None)
            elif isinstance(batch.order, Get) and not batch.given_up:
                batch.given_up = True
                self._settle(batch)
                batch.namespace.table.promotions.give_up(batch.refs)
            engines |= batch.engines
            batch.engines = set()
        return [*map(ChunksReady, sorted(engines))]

    def late(self, tier: TierProcess, batch: TierBatch) -> None:
        """Free the slots of a get that was given up and has ended now."""
        _free(tier, batch)

    def _settle(self, batch: TierBatch) -> None:
        """Remove a get from the slots being filled and from the bytes under way."""
        for slot, _ in batch.refs:
            if self._filling.get((batch.namespace, slot)) is batch:
                del self._filling[batch.namespace, slot]
        if (waiting := self._waiting.get(batch.namespace)) is not None:
            waiting.under_way -= batch.nbytes


_ASKED = {
    Outcome.OK: "ok",
    Outcome.ABSENT: "absent",
    Outcome.LATE: "late",
}


def _drop(namespace: Namespace, waiting: _Waiting) -> None:
    namespace.table.counts.sought_dropped += waiting.keys.clear()


def _free(tier: TierProcess, batch: TierBatch) -> None:
    """Free the draining slots of a get that has ended."""
    slots, generations = zip(*batch.refs, strict=True)
    batch.namespace.table.slots.revoked(tier.process, slots, generations)
