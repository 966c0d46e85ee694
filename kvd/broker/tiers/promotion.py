"""Promotion: gets of chunks from tiers into memory, requested by engines.

A promotion takes a slot first, so the bytes under way are bounded: by what keeps the tier busy
(`TierProcess.has_get_room`), and by a quarter of what the namespace holds plus what is free.
Requests without room wait for up to two seconds; engines take turns (`PromotionRequests`), and so
do namespaces. A shared tier is first asked whether it has a chunk; its chunks are promoted at once.

A slot that a tier was told to fill is reused only after the batch or the tier's process has ended:
until then the medium may still write to the slot.
"""

import os
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from kvd.broker.effects import ChunksReady, Effect, LogEvent
from kvd.broker.state import BrokerState
from kvd.broker.tiers.tier import (
    BATCH_BYTES,
    BATCH_CHUNKS,
    TierBatch,
    TierProcess,
    first_serving,
)
from kvd.cache.namespaces import Namespace
from kvd.cache.tier_table import TierTable
from kvd.outcomes import Outcome
from kvd.wire.tiering import BatchResult, Get, Lookup
from kvd_proto.jobs import IntArray

KEYS_PER_TURN = 512  # keys examined in a turn: one or two milliseconds
REQUEST_SECONDS = 2.0  # a request older than this is dropped
DESCRIPTION_BYTES = 128 * 1024  # of the descriptions in one answer
LOOKUP_KEYS = 1024
UNUSED_SECONDS = 0.25  # if slots lack, loans unused for this long are taken back
SLOT_SECONDS = 30.0  # a slot that is not filled by then is given up
REACH_PART = 4  # promotions may fill a quarter of the namespace's reach, see `_reach`
MAX_REQUESTS = 65536
"""The most keys that wait for one engine. With n engines waiting, each may add up to an n-th."""


class PromotionRequest(NamedTuple):
    """A key that engines want in memory.

    Attributes:
        key: of the chunk.
        engines: numbers of the engines that want it.
        requested_at: in monotonic seconds.
        tier: the shared tier that has confirmed that it has the chunk; None if none has.
    """

    key: bytes
    engines: frozenset[int]
    requested_at: float
    tier: TierProcess | None = None

    def joined(self, other: "PromotionRequest | None") -> "PromotionRequest":
        """Return this request, also for the engines of another request for the same key."""
        return self._replace(engines=self.engines | other.engines) if other else self


class PromotionRequests:
    """Requests of one namespace: a FIFO queue for each engine, served round-robin."""

    def __init__(self) -> None:
        # In the order of turns: the next engine comes first.
        self._queues: OrderedDict[int, deque[PromotionRequest]] = OrderedDict()
        self._count = 0

    def extend(self, engine: int, keys: Sequence[bytes], now: float) -> int:
        """Append an engine's keys as far as there is room; return the number of the others."""
        queue = self._queues.get(engine, deque())
        num_engines = len(self._queues.keys() | {engine})
        accepted = keys[: max(0, MAX_REQUESTS // num_engines - len(queue))]
        if accepted:
            requesters = frozenset({engine})
            self._queues[engine] = queue
            queue.extend(PromotionRequest(key, requesters, now) for key in accepted)
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
        """Remove all requests; return their number."""
        count, self._count = self._count, 0
        self._queues.clear()
        return count

    def __len__(self) -> int:
        return self._count


class _NamespaceState:
    """Requests, unanswered Lookups and bytes under way of one namespace."""

    def __init__(self) -> None:
        self.requests = PromotionRequests()
        self.lookups: dict[bytes, TierBatch] = {}  # unanswered, by key
        self.get_bytes = 0  # under way


class Promotion:
    """Decides which chunks to get from which tiers, and what to ask shared tiers."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._states: OrderedDict[Namespace, _NamespaceState] = OrderedDict()
        self._filling: dict[tuple[Namespace, int], TierBatch] = {}  # gets by slot
        self.blocked = False  # requests wait for the end of a get or for free slots

    @property
    def has_requests(self) -> bool:
        """Whether requests wait."""
        return any(state.requests for state in self._states.values())

    def waiting_bytes(self, namespace: Namespace) -> int:
        """Bytes of the chunks requested and not yet ordered, at most."""
        state = self._states.get(namespace)
        return len(state.requests) * namespace.geometry.bytes_per_chunk if state else 0

    def request(
        self, namespace: Namespace, engine: int, keys: Sequence[bytes], now: float
    ) -> list[Effect]:
        """Queue an engine's request for these keys, a prompt's head first, and order what fits."""
        if namespace.directory.tiers is None:
            return []
        state = self._states.setdefault(namespace, _NamespaceState())
        namespace.table.counts.sought_dropped += state.requests.extend(engine, keys, now)
        return self._order_requested(namespace, state, now)

    def prune(self) -> None:
        """Drop the requests of closed namespaces."""
        for namespace in [known for known in self._states if not self._state.is_open(known)]:
            del self._states[namespace]

    def work(self, now: float) -> list[Effect]:
        """Order what is requested, as far as there is room."""
        self.blocked = False
        effects: list[Effect] = []
        for namespace, state in list(self._states.items()):
            if state.requests and self._state.is_open(namespace):
                self._states.move_to_end(namespace)  # other namespaces come first next time
                effects += self._order_requested(namespace, state, now)
        return effects

    # ------------------------------------------------------------------ orders

    def _order_requested(
        self, namespace: Namespace, state: _NamespaceState, now: float
    ) -> list[Effect]:
        """Order gets of what tiers have; ask the first shared tier for the rest.

        Both as far as there is room. A request whose tier is busy stays in the queue.
        """
        tiers = namespace.directory.tiers
        if tiers is None or not self._state.pool_ready or self._state.draining:
            namespace.table.counts.sought_dropped += state.requests.clear()
            return []
        shared = self._shared(namespace)
        by_tier, unknown = self._take_by_tier(
            namespace, state, tiers, now, has_shared=shared is not None
        )
        effects: list[Effect] = []
        for tier, requests in by_tier.items():
            effects += self._get_all(tier, namespace, state, requests, now)
        if shared is not None and unknown:
            effects += self._look_up(shared, namespace, state, unknown, now)
        return effects

    def _take_by_tier(
        self,
        namespace: Namespace,
        state: _NamespaceState,
        tiers: TierTable,
        now: float,
        *,
        has_shared: bool,
    ) -> tuple[dict[TierProcess, dict[bytes, PromotionRequest]], dict[bytes, PromotionRequest]]:
        """Take requests from the queues and sort them by tier, as far as there is room.

        A request is consumed if it has expired, its chunk is in memory, or no usable tier has it.
        It stays in the queue if its tier is busy.

        Returns:
            Requests to get, by tier; and, with `has_shared`, requests of which no tier is known.
        """
        requests, find = state.requests, namespace.directory.find
        nbytes, get_bytes = namespace.geometry.bytes_per_chunk, state.get_bytes
        max_bytes = max(nbytes, self._reach(namespace) // REACH_PART)
        by_tier: dict[TierProcess, dict[bytes, PromotionRequest]] = {}
        unknown: dict[bytes, PromotionRequest] = {}
        postponed: list[PromotionRequest] = []  # their tier is busy; other tiers may have room
        for _ in range(min(KEYS_PER_TURN, len(requests))):
            request = requests.pop()
            key = request.key
            if now - request.requested_at > REQUEST_SECONDS:
                namespace.table.counts.sought_dropped += 1
                continue
            if (slot := find(key)) >= 0:
                if (batch := self._filling.get((namespace, slot))) is not None:
                    batch.engines |= request.engines
                continue
            tier, entry = request.tier, None
            if tier is None or not tier.serves(namespace):
                entry = tiers.find(key)
                tier = first_serving(self._state.tiers, entry.tiers, namespace) if entry else None
            if tier is None:
                if (pending_lookup := state.lookups.get(key)) is not None:
                    pending_lookup.engines |= request.engines
                elif entry is None and has_shared:
                    unknown[key] = request.joined(unknown.get(key))
                continue
            to_get = by_tier.setdefault(tier, {})
            if key in to_get:
                to_get[key] = request.joined(to_get[key])
            elif get_bytes + nbytes <= max_bytes and tier.has_get_room(
                nbytes * len(to_get), nbytes
            ):
                to_get[key] = request
                get_bytes += nbytes
            else:
                postponed.append(request)
                if get_bytes + nbytes > max_bytes or len(self._state.tiers) == 1:
                    break
        self.blocked |= bool(postponed)
        requests.put_back(postponed)
        return by_tier, unknown

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
        state: _NamespaceState,
        requests: dict[bytes, PromotionRequest],
        now: float,
    ) -> list[Effect]:
        """Order these chunks in batches; those without a slot are put back and wait."""
        batch_size, table = BATCH_BYTES // namespace.geometry.bytes_per_chunk, namespace.table
        if room := table.descriptions.max_bytes:
            batch_size = min(batch_size, DESCRIPTION_BYTES // (room + 64))
        batch_size = max(1, min(BATCH_CHUNKS, batch_size))
        keys = list(requests)
        effects: list[Effect] = []
        find = namespace.directory.find
        for begin in range(0, len(keys), batch_size):
            batch_keys = keys[begin : begin + batch_size]
            engines = set[int]().union(*(requests[key].engines for key in batch_keys))
            effects += self.get(tier, namespace, batch_keys, engines, now)
            if find(batch_keys[-1]) < 0:  # slots ran out
                without_slot = [key for key in keys[begin:] if find(key) < 0]
                state.requests.put_back(requests[key] for key in without_slot)
                self.blocked = True
                if without_slot:
                    for other in self._state.open_namespaces:
                        other.table.lending.end_unused_loans(now - UNUSED_SECONDS)
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
        filled_bytes = None if self._state.pool_usable else self._state.pinned_bytes
        taken = namespace.table.promotions.begin(
            keys, tier.writer_name, now, SLOT_SECONDS, len(keys), filled_bytes=filled_bytes
        )
        if not taken:
            return []
        taken_keys, slots, generations = zip(*taken, strict=True)
        nbytes = len(taken) * namespace.geometry.bytes_per_chunk
        order = Get(
            number=tier.next_number(),
            namespace=namespace.id,
            keys=taken_keys,
            slots=IntArray.of(slots, "u4"),
            generations=IntArray.of(generations, "u8"),
            deadline_ms=max(1, int(tier.deadline(nbytes) * 1000)),
        )
        alone = not tier.get_bytes
        batch = TierBatch(order, namespace, now, nbytes, alone=alone, engines=set(engines))
        self._filling.update(((namespace, slot), batch) for slot in slots)
        self._states.setdefault(namespace, _NamespaceState()).get_bytes += nbytes
        return [tier.send(batch)]

    def _look_up(
        self,
        tier: TierProcess,
        namespace: Namespace,
        state: _NamespaceState,
        requests: dict[bytes, PromotionRequest],
        now: float,
    ) -> list[Effect]:
        """Ask a shared tier which of these chunks it has."""
        effects, keys = list[Effect](), list(requests)
        for begin in range(0, len(keys), LOOKUP_KEYS):
            batch_keys = keys[begin : begin + LOOKUP_KEYS]
            seconds = max(4 * tier.speed.seconds(0), tier.setting.late_seconds)
            order = Lookup(
                number=tier.next_number(),
                namespace=namespace.id,
                keys=tuple(batch_keys),
                deadline_ms=max(1, int(seconds * 1000)),
            )
            engines = set[int]().union(*(requests[key].engines for key in batch_keys))
            batch = TierBatch(order, namespace, now, engines=engines)
            state.lookups.update(dict.fromkeys(batch_keys, batch))
            effects.append(tier.send(batch))
        return effects

    def probe(self, tier: TierProcess, namespace: Namespace, now: float) -> list[Effect]:
        """Probe a shared tier: ask it for a random key."""
        order = Lookup(
            number=tier.next_number(),
            namespace=namespace.id,
            keys=(os.urandom(16),),
            deadline_ms=int(tier.setting.late_seconds * 1000),
        )
        return [tier.send(TierBatch(order, namespace, now))]

    # ----------------------------------------------------------------- answers

    def get_ended(
        self, tier: TierProcess, batch: TierBatch, order: Get, result: BatchResult, now: float
    ) -> list[Effect]:
        """Process the answer to a get.

        1. Chunks that are OK become READY and enter the table of tiers.
        2. Absent and corrupt chunks leave the table; the slots of all failed chunks are freed.
        3. Measure the speed of gets, and wake the engines that wait.
        """
        self._settle(batch)
        namespace, counts = batch.namespace, tier.counts
        table, tiers = namespace.table, namespace.directory.tiers
        nbytes = namespace.geometry.bytes_per_chunk
        effects: list[Effect] = []
        outcomes, refs, num_ready = result.outcomes.tolist(), batch.refs, 0
        columns = (result.first.tolist(), result.count.tolist(), result.groups.tolist())
        failed_refs = []
        for i, (key, ref, code) in enumerate(zip(order.keys, refs, outcomes, strict=True)):
            outcome = Outcome(code)
            counts.gets[outcome.name.lower()] += 1
            if outcome is Outcome.OK:
                blocks = columns[0][i], columns[1][i], columns[2][i]
                counts.get_bytes += nbytes
                if table.promotions.complete(*ref, *blocks, result.descriptions[i]):
                    num_ready += 1
                    if tiers is not None:
                        tiers.hold(key, tier.index, *blocks)
                continue
            failed_refs.append(ref)
            if outcome in {Outcome.ABSENT, Outcome.CORRUPT} and tiers is not None:
                tiers.release(key, tier.index)
                if tier.info.shared:
                    tiers.mark_absent(key, now)
            if outcome is Outcome.CORRUPT:
                effects.append(_corrupt_event(tier, namespace, ref[0]))
                tier.breaker.chunk_corrupt(now)
        table.promotions.give_up(failed_refs)
        self.free_slots(tier, batch)
        if num_ready:
            tier.speed.observe(num_ready * nbytes, now, batch.sent if batch.alone else None)
        else:
            tier.speed.begin(now)
        return [*effects, *map(ChunksReady, sorted(batch.engines))]

    def lookup_ended(
        self, tier: TierProcess, batch: TierBatch, order: Lookup, result: BatchResult, now: float
    ) -> list[Effect]:
        """Process the answer to a Lookup: get what the tier has, ask the next one for the rest."""
        namespace = batch.namespace
        state = self._states.setdefault(namespace, _NamespaceState())
        for key in order.keys:
            state.lookups.pop(key, None)
        engines = frozenset(batch.engines)
        absent: list[bytes] = []
        present: list[PromotionRequest] = []
        for key, code in zip(order.keys, result.outcomes.tolist(), strict=True):
            outcome = Outcome(code)
            tier.counts.asks[_LOOKUP_LABELS.get(outcome, "failed")] += 1
            if outcome is Outcome.OK:
                present.append(PromotionRequest(key, engines, now, tier))
            elif outcome is Outcome.ABSENT:
                absent.append(key)
        state.requests.put_back(present)
        effects = self._order_requested(namespace, state, now)
        next_shared = self._shared(namespace, tier.index)
        if next_shared is not None and absent:
            requests = {key: PromotionRequest(key, engines, now) for key in absent}
            effects += self._look_up(next_shared, namespace, state, requests, now)
        elif (tiers := namespace.directory.tiers) is not None:
            for key in absent:
                tiers.mark_absent(key, now)
        return [*effects, *map(ChunksReady, sorted(batch.engines))]

    def give_up(self, tier: TierProcess) -> list[Effect]:
        """End all waiting for a tier that is set aside, and wake the engines that waited.

        The slots of its gets stay unused until the gets have ended.
        """
        engines: set[int] = set()
        for batch in tier.batches.values():
            if isinstance(batch.order, Lookup):
                if (state := self._states.get(batch.namespace)) is not None:
                    for key in batch.order.keys:
                        state.lookups.pop(key, None)
            elif isinstance(batch.order, Get) and not batch.given_up:
                batch.given_up = True
                self._settle(batch)
                batch.namespace.table.promotions.give_up(batch.refs)
            engines |= batch.engines
            batch.engines = set()
        return [*map(ChunksReady, sorted(engines))]

    @staticmethod
    def free_slots(tier: TierProcess, batch: TierBatch) -> None:
        """Free the draining slots of a get that has ended."""
        slots, generations = zip(*batch.refs, strict=True)
        batch.namespace.table.slots.writes_ended(tier.writer_name, slots, generations)

    def _settle(self, batch: TierBatch) -> None:
        """Remove a get from the slots being filled and from the bytes under way."""
        for slot, _ in batch.refs:
            if self._filling.get((batch.namespace, slot)) is batch:
                del self._filling[batch.namespace, slot]
        if (state := self._states.get(batch.namespace)) is not None:
            state.get_bytes -= batch.nbytes


_LOOKUP_LABELS = {Outcome.OK: "ok", Outcome.ABSENT: "absent", Outcome.LATE: "late"}


def _corrupt_event(tier: TierProcess, namespace: Namespace, slot: int) -> LogEvent:
    text = (
        f"tier {tier.name}: the chunk for slot {slot} of namespace {namespace.id.hex()[:8]} is not"
        " what was put there; it is dropped and computed again"
    )
    return LogEvent(text, "error", {"tier": tier.name})
