"""The broker's decisions about tiers: messages, liveness, ends of processes, namespaces.

The broker never waits for a tier. While batches are under way it checks liveness every
`LIVENESS_SECONDS` and sets aside a tier without progress (`breaker`). A tier costs misses at worst;
only the slots that it may still write to stay unused until its process has ended.

The same holds for bugs of the broker: an exception in a decision leads to `_start_over`, which sets
all tiers aside and replaces their processes; the daemon goes on.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvd.broker.effects import ChunksReady, Effect, KillTier, LogEvent, NamespaceFds, ToTier
from kvd.broker.state import BrokerState
from kvd.broker.tiers.breaker import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    QUIET_SECONDS,
    BreakerState,
)
from kvd.broker.tiers.demotion import Demotion
from kvd.broker.tiers.promotion import Promotion
from kvd.broker.tiers.tier import TierBatch, TierNamespace, TierProcess
from kvd.cache.namespaces import Namespace
from kvd.logs import safe_repr, safe_traceback
from kvd.outcomes import Outcome
from kvd.wire.tiering import (
    BatchResult,
    CloseNamespace,
    Get,
    Lookup,
    NamespaceOpened,
    NewSalt,
    OpenNamespace,
    Put,
    RemovedChunks,
    ScanResult,
    StopTier,
    TierFailed,
    TierPing,
    TierPong,
    TierReady,
)
from kvd_proto.messages import Message

LIVENESS_SECONDS = 0.05
NAMESPACES_SECONDS = 0.25
PUBLISH_SECONDS = 0.01
IDLE_PING_SECONDS = 1.0
STUCK_SECONDS = 10.0  # without progress, the tier's process is replaced
START_SECONDS = 120.0
_OUTCOMES = frozenset(map(int, Outcome))
_FAILURES = {int(Outcome.FAILED), int(Outcome.LATE)}

_PendingScan: TypeAlias = tuple[TierProcess, Namespace, ScanResult]


class Tiering:
    """Decides what tiers are sent, when they are set aside, and when processes are replaced."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._checked_at = self._next_namespaces = self._next_publish = 0.0
        self._resumes_at = 0.0  # no decisions before this time, after an exception
        self._pause = FIRST_PAUSE_SECONDS
        self._reset_decisions()

    def _reset_decisions(self) -> None:
        """Drop all requests, queues and scan results."""
        self.demotion = Demotion(self._state)
        self.promotion = Promotion(self._state)
        self._pending_scans: deque[_PendingScan] = deque()
        self._watched: set[Namespace] = set()  # their chunks are queued for demotion

    # --------------------------------------------------------------- entry points

    def process_started(self, index: int, pid: int, now: float) -> None:
        """Record that a tier's process was started."""
        tier = self._state.tiers[index]
        tier.child.started(now)
        tier.breaker.process_changed(now)
        tier.writer_name = f"tier {index} pid {pid}"

    def received(self, index: int, message: Message, now: float) -> list[Effect]:
        """Process a message from a tier's process; messages of a killed one are ignored."""
        tier = self._state.tiers[index]
        tier.child.heard(now)
        if tier.child.killed:
            return []
        return self._guard(now, lambda: self._on_message(tier, message, now))

    def lost(self, index: int, reason: str, now: float) -> list[Effect]:
        """Process the end of a tier's process.

        Its breaker trips, its scans and batches are forgotten, the slots that it filled are freed.
        The end of a process that served is logged and counted as a restart.
        """
        tier = self._state.tiers[index]
        served = tier.child.up
        effects = self._guard(now, lambda: self._on_end(tier, reason, now))
        self._give_up_slots(tier)  # by the slot tables: `_start_over` may have forgotten the orders
        for namespace in self._state.open_namespaces:
            namespace.table.slots.writer_lost(tier.writer_name)
        tier.process_ended()
        if served:
            tier.child.last_error = reason
            tier.counts.restarts += 1
            effects.append(tier.event(f"is lost: {reason}; it is started again", "error"))
        elif not tier.child.last_error:
            tier.child.last_error = reason
        return effects

    def request_promotion(
        self, namespace: Namespace, engine: int, keys: Sequence[bytes], now: float
    ) -> list[Effect]:
        """Process an engine's request for chunks, a prompt's head first."""
        if now < self._resumes_at:
            return []
        return self._guard(now, lambda: self.promotion.request(namespace, engine, keys, now))

    def due(self, now: float) -> float:
        """Return the seconds until `turn` has something to do; `NAMESPACES_SECONDS` at most."""
        if not self._state.tiers or now < self._resumes_at:
            return NAMESPACES_SECONDS
        if self._pending_scans or (self.promotion.has_requests and not self.promotion.blocked):
            return 0.0
        seconds = self.demotion.due(now)
        needs_check = any(tier.batches or not tier.breaker.closed for tier in self._state.tiers)
        if needs_check or self.promotion.has_requests or self.demotion.blocked:
            seconds = min(seconds, max(0.0, self._checked_at + LIVENESS_SECONDS - now))
        return min(seconds, NAMESPACES_SECONDS)

    def turn(self, now: float) -> list[Effect]:
        """Check liveness, apply scan results, open namespaces, send orders, publish status."""
        if not self._state.tiers or self._state.stopping or now < self._resumes_at:
            return []
        return self._guard(now, lambda: self._turn(now))

    def stop(self) -> list[Effect]:
        """Tell all processes to stop."""
        return [ToTier(tier.index, StopTier()) for tier in self._state.tiers if tier.up]

    def _guard(self, now: float, decide: Callable[[], list[Effect]]) -> list[Effect]:
        """Run `decide`; if it raises, replace the tiers' processes and keep the daemon running."""
        try:
            return decide()
        except Exception as error:  # noqa: BLE001  # whatever the bug, engines only miss
            return self._start_over(error, now)

    def _start_over(self, error: Exception, now: float) -> list[Effect]:
        """Set all tiers aside and replace their processes: the broker's state may be wrong.

        1. Pause decisions; the pause doubles with repeated exceptions.
        2. Kill the processes; slots being filled stay unused until they have ended.
        3. Drop all requests, publish that no tier is usable, and wake the engines.
        """
        quiet = now - self._resumes_at >= QUIET_SECONDS
        self._pause = FIRST_PAUSE_SECONDS if quiet else min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self._resumes_at = now + self._pause
        reason = f"it cannot be handled: {safe_repr(error)}"
        text = (
            f"tiers cannot be handled ({safe_repr(error)}), a bug in kvd: they are set aside"
            " (breaker open), and their processes are replaced"
        )
        effects: list[Effect] = [LogEvent(text, "error", trace=safe_traceback(error))]
        for tier in self._state.tiers:
            tier.breaker.trip("wrong", now, reason)
            tier.handled_state, tier.child.last_error = tier.breaker.state, reason
            tier.child.killed = True
            # Also if it was ordered before: that order may be lost.
            effects.append(KillTier(tier.index, reason, back_off=True))
            self._give_up_slots(tier)
        self._reset_decisions()
        with contextlib.suppress(Exception):
            self._publish()
        engines = self._state.registry.engines.values()
        return effects + [ChunksReady(engine.number) for engine in engines]

    def _give_up_slots(self, tier: TierProcess) -> None:
        """Give up all slots that its process fills, by the slot tables and not by orders."""
        for namespace in self._state.open_namespaces:
            slots = namespace.table.slots
            for slot in [slot for slot, name in slots.filling.items() if name == tier.writer_name]:
                with contextlib.suppress(Exception):  # this call may be what has just failed
                    slots.give_up([slot])

    # ------------------------------------------------------------------ processes

    def _on_message(self, tier: TierProcess, message: Message, now: float) -> list[Effect]:
        """Process a message of a tier, then act if its breaker has changed."""
        effects: list[Effect] = []
        match message:
            case BatchResult():
                effects = self._on_result(tier, message, now)
                # An answer frees queue space: send the next orders now, not in the next turn.
                effects += self._work(now)
            case TierPong():
                self._on_pong(tier, message, now)
            case ScanResult():
                namespace = self._state.namespace(message.namespace)
                if namespace is not None and (message.keys or message.last):
                    self._pending_scans.append((tier, namespace, message))
            case RemovedChunks():
                self._on_removed(tier, message)
            case NamespaceOpened():
                self._on_opened(tier, message)
            case TierReady():
                effects = self._on_ready(tier, message, now)
            case TierFailed():
                if tier.child.last_error != message.error:
                    tier.child.last_error = message.error
                    effects.append(tier.event(f"cannot be used: {message.error}", "error"))
                effects.append(KillTier(tier.index, message.error))
            case _:
                return [tier.event(f"sent {type(message).__name__}", "error")]
        return effects + self._on_breaker_change(tier, now)

    def _on_ready(self, tier: TierProcess, message: TierReady, now: float) -> list[Effect]:
        tier.child.began_serving(message.pid)
        tier.described = message.described
        tier.breaker.process_changed(now)
        tier.total_bytes, tier.used_bytes = message.total_bytes, message.used_bytes
        tier.chunks = message.chunks
        tier.counts.damaged_records += message.damaged_records
        text = f"is up (pid {message.pid}): {message.described or tier.setting.text}"
        return [tier.event(text), *self._update_namespaces(tier, now)]

    def _on_pong(self, tier: TierProcess, message: TierPong, now: float) -> None:
        if message.progress > tier.progress:
            tier.breaker.moved_at = now
        tier.progress = message.progress
        tier.total_bytes, tier.used_bytes = message.total_bytes, message.used_bytes
        tier.chunks = message.chunks
        tier.child.last_error = message.error or tier.child.last_error

    def _on_end(self, tier: TierProcess, reason: str, now: float) -> list[Effect]:
        tier.breaker.trip("lost", now, f"its process ended: {reason}")
        effects = self._on_breaker_change(tier, now)
        self._pending_scans = deque(scan for scan in self._pending_scans if scan[0] is not tier)
        if not tier.info.shared:
            for namespace in self._state.open_namespaces:
                if (tiers := namespace.directory.tiers) is not None:
                    tiers.release_tier(tier.index)
        return effects

    # ----------------------------------------------------------------- namespaces

    def _update_namespaces(self, tier: TierProcess, now: float) -> list[Effect]:
        """Send `OpenNamespace` for namespaces newly in use, `CloseNamespace` for those closed."""
        effects: list[Effect] = []
        for namespace in [known for known in tier.namespaces if not self._state.is_open(known)]:
            del tier.namespaces[namespace]
            effects.append(ToTier(tier.index, CloseNamespace(namespace=namespace.id)))
        for namespace in self._state.open_namespaces:
            tiers = namespace.directory.tiers
            # The length of descriptions is unknown until an engine is attached.
            if namespace in tier.namespaces or tiers is None or not namespace.engines:
                continue
            if not tiers.is_releasing(tier.index):
                tier.namespaces[namespace] = TierNamespace(now)
                order = _open_order(namespace, reset=namespace.id in tier.unconfirmed)
                effects.append(ToTier(tier.index, order, NamespaceFds(namespace.id)))
        return effects

    def _on_opened(self, tier: TierProcess, message: NamespaceOpened) -> None:
        """Record a namespace as opened, under the broker's salt, or the tier's if it has none."""
        namespace = self._state.namespace(message.namespace)
        tier_namespace = tier.namespaces.get(namespace) if namespace is not None else None
        if namespace is not None and tier_namespace is not None:
            # The message may be older than the last reset.
            tier_namespace.salt = namespace.salt or message.salt
            if message.salt == namespace.salt:
                tier.unconfirmed.discard(namespace.id)
            self._publish()

    def reset(self, namespace: Namespace) -> list[Effect]:
        """Send a namespace's new salt to the tiers, which confirm it with `NamespaceOpened`."""
        effects: list[Effect] = []
        for tier in self._state.tiers:
            tier.unconfirmed.add(namespace.id)
            if tier.probe_chunk is not None and tier.probe_chunk[0] is namespace:
                tier.probe_chunk = None  # dropped: while it is sought, lookups would wait for it
            tier_namespace = tier.namespaces.get(namespace)
            if tier_namespace is not None:
                if tier_namespace.salt is not None:
                    tier_namespace.salt = namespace.salt
                order = NewSalt(namespace=namespace.id, salt=namespace.salt)
                effects.append(ToTier(tier.index, order))
            if not tier.in_use and not namespace.temporary:
                text = (
                    f"has not noted the reset of namespace {namespace.id.hex()[:8]}, and will when"
                    " it serves again; if the machine is restarted before, empty the tier first"
                )
                effects.append(tier.event(text, "warning"))
        return effects

    # ------------------------------------------------------------------- contents

    def _apply_scan(self) -> None:
        """Enter one message of a scan into the table of tiers, unless a reset has made it old."""
        tier, namespace, scan = self._pending_scans.popleft()
        tiers, tier_namespace = namespace.directory.tiers, tier.namespaces.get(namespace)
        current = tier_namespace is not None and scan.salt == tier_namespace.salt
        if tiers is not None and current and self._state.is_open(namespace):
            columns = (scan.first.numpy(), scan.count.numpy(), scan.groups.numpy())
            tiers.hold_all(scan.keys, tier.index, *columns)
            if scan.last:
                tiers.request_rescan()

    def _on_removed(self, tier: TierProcess, message: RemovedChunks) -> None:
        tier.counts.dropped += len(message.keys)
        namespace = self._state.namespace(message.namespace)
        if namespace is not None and (tiers := namespace.directory.tiers) is not None:
            for key in message.keys:
                tiers.release(key, tier.index)

    def _on_result(self, tier: TierProcess, result: BatchResult, now: float) -> list[Effect]:
        outcomes, batch = result.outcomes.tolist(), tier.batches.get(result.number)
        is_complete = batch is not None and len(outcomes) == len(batch.order.keys)
        is_valid = is_complete and _OUTCOMES.issuperset(outcomes)
        if batch is None or not is_valid:  # a bug of the backend
            text = f"its answer {result.number}, of {len(outcomes)} chunks, fits no order"
            return self._kill(tier, text)
        tier.batch_ended(batch, now)
        tier.breaker.moved_at = now
        if result.error:
            tier.child.last_error = result.error
        num_failed = sum(code in _FAILURES for code in outcomes)
        effects = self._dispatch_answer(tier, batch, result, now)
        tier.breaker.batch_ended(now, failed=2 * num_failed >= len(outcomes))
        return effects

    def _dispatch_answer(
        self, tier: TierProcess, batch: TierBatch, result: BatchResult, now: float
    ) -> list[Effect]:
        if not self._state.is_open(batch.namespace):
            return []
        match batch.order:
            case Put():
                return self.demotion.put_ended(tier, batch, batch.order, result, now)
            case Get() if batch.given_up:
                self.promotion.free_slots(tier, batch)
                return []
            case Get():
                return self.promotion.get_ended(tier, batch, batch.order, result, now)
            case Lookup():
                return self.promotion.lookup_ended(tier, batch, batch.order, result, now)

    # ---------------------------------------------------------------------- time

    def _turn(self, now: float) -> list[Effect]:
        """Do what is due: liveness, one scan result, namespaces, orders, published health."""
        effects: list[Effect] = []
        if now >= self._checked_at + LIVENESS_SECONDS:
            stalled, self._checked_at = now - self._checked_at - 2 * LIVENESS_SECONDS, now
            for tier in self._state.tiers:
                if stalled > 0:
                    tier.breaker.excuse(stalled, now)
                effects += self._check_liveness(tier, now)
                effects += self._on_breaker_change(tier, now)
        if self._pending_scans:
            self._apply_scan()
        if self._watch_new() or now >= self._next_namespaces:
            self._next_namespaces = now + NAMESPACES_SECONDS
            self._watched = set(filter(self._state.is_open, self._watched))
            self.promotion.prune()
            for tier in self._state.tiers:
                if tier.up:
                    effects += self._update_namespaces(tier, now)
        effects += self._work(now)
        if now >= self._next_publish:
            self._next_publish = now + PUBLISH_SECONDS
            self._publish()
        return effects

    def _work(self, now: float) -> list[Effect]:
        """Send orders as far as there is room: gets first."""
        effects = self.promotion.work(now) if self.promotion.has_requests else []
        return effects + self.demotion.work(now)

    def _watch_new(self) -> bool:
        """Start demotion in namespaces newly used by an engine; return whether there are any."""
        new = [
            namespace
            for namespace in self._state.open_namespaces
            if namespace.engines
            and namespace.directory.tiers is not None
            and namespace not in self._watched
        ]
        for namespace in new:
            self._watched.add(namespace)
            self.demotion.watch(namespace)
        return bool(new)

    def _check_liveness(self, tier: TierProcess, now: float) -> list[Effect]:
        """Trip the breaker of a late tier, kill a stuck process, ping, or start a probe."""
        breaker, child = tier.breaker, tier.child
        if reason := child.check(now, STUCK_SECONDS if child.up else START_SECONDS):
            return self._kill(tier, reason)
        if not tier.up:
            return []
        outstanding = bool(tier.batches)
        breaker.check(now, outstanding=outstanding)
        if (silent := child.silent(now)) > max(IDLE_PING_SECONDS, breaker.late_seconds):
            breaker.trip(
                "late", now, f"its process has not answered for {silent:.1f} s{child.cause}"
            )
        if outstanding and (stuck := now - breaker.moved_at) > STUCK_SECONDS:
            return self._kill(tier, f"nothing has moved for {stuck:.1f} s{child.cause}")
        if child.ping_due(now, LIVENESS_SECONDS if outstanding else IDLE_PING_SECONDS):
            return [ToTier(tier.index, TierPing())]
        return []

    def _on_breaker_change(self, tier: TierProcess, now: float) -> list[Effect]:
        """Act if the breaker's state has changed since the last call.

        - OPEN: give up what waits for the tier, and keep the key of a get to probe it with; log it
          if the state was CLOSED.
        - HALF_OPEN: send a probe.
        - CLOSED: log it.

        Then publish the tiers' health.
        """
        previous, tier.handled_state = tier.handled_state, tier.breaker.state
        if previous is tier.handled_state:
            return []
        effects: list[Effect] = []
        if tier.handled_state is BreakerState.OPEN:
            get = next((batch for batch in tier.gets() if not batch.given_up), None)
            if get is not None:
                tier.probe_chunk = get.namespace, get.order.keys[0]
            effects = self.promotion.give_up(tier)
            if previous is BreakerState.CLOSED:
                text = (
                    f"is set aside (breaker open): {tier.breaker.reason}; lookups miss chunks that"
                    " only it has, until it recovers"
                )
                effects.append(tier.event(text, "warning"))
        elif tier.handled_state is BreakerState.HALF_OPEN:
            effects = self._probe(tier, now)
        else:
            effects.append(tier.event("is used again (breaker closed)"))
        self._publish()
        return effects

    def _probe(self, tier: TierProcess, now: float) -> list[Effect]:
        """Probe a tier: a shared one with a Lookup, else a get that was given up, else a put."""
        effects: list[Effect] = []
        opened = [ns for ns, opening in tier.namespaces.items() if opening.salt is not None]
        if tier.info.shared and opened:
            effects = self.promotion.probe(tier, opened[0], now)
        elif tier.probe_chunk is not None and tier.probe_chunk[0] in opened:
            namespace, key = tier.probe_chunk
            effects = self.promotion.get(tier, namespace, [key], (), now)
        tier.probe_chunk = None
        effects = effects or self.demotion.probe(tier, now)
        if not tier.batches:
            tier.breaker.skip_probe(now)
            effects += self._on_breaker_change(tier, now)
        return effects

    def _kill(self, tier: TierProcess, reason: str) -> list[Effect]:
        """Kill a tier's process without waiting; its slots stay unused until it has ended."""
        tier.child.killed = True
        return [tier.event(f"is killed: {reason}", "error"), KillTier(tier.index, reason)]

    def _publish(self) -> None:
        """Write the changed health of tiers into the directories."""
        for namespace in self._state.open_namespaces:
            if (tiers := namespace.directory.tiers) is None:
                continue
            waiting_bytes = self.promotion.waiting_bytes(namespace)
            for tier in self._state.tiers:
                health = tier.health(namespace, waiting_bytes)
                if tiers.health(tier.index) != health:
                    tiers.set_health(tier.index, health)


def _open_order(namespace: Namespace, *, reset: bool) -> OpenNamespace:
    geometry = namespace.geometry
    return OpenNamespace(
        namespace=namespace.id,
        salt=namespace.salt,
        reset=reset,
        slot_bytes=geometry.slot_bytes,
        arena_bases=tuple(map(geometry.arena_base, range(len(geometry.slot_bytes)))),
        num_slots=geometry.num_slots,
        description_bytes=namespace.table.descriptions.max_bytes,
    )
