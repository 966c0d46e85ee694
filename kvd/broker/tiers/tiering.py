"""What follows when a tier's process answers, falls silent or ends.

The broker decides and never waits: while anything is under way it looks every `LOOK_SECONDS`, and
a tier that does not move is set aside (`breaker`). The worst that a tier can cause is a
miss: the slots that it may still write to, alone, are kept from other use until it has ended. That
holds for what goes wrong here, too: an exception sets the tier aside, and the daemon goes on.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from kvd.broker.effects import Effect, Event, KillTier, ToTier
from kvd.broker.state import BrokerState
from kvd.broker.tiers.breaker import Signal, State
from kvd.broker.tiers.demotion import Demotion
from kvd.broker.tiers.promotion import Promotion
from kvd.broker.tiers.spaces import TierSpaces
from kvd.broker.tiers.tier import Batch, Tier, Tiers
from kvd.cache.namespaces import Namespace
from kvd.logs import fault_text, fault_trace
from kvd.wire.tiering import (
    Ask,
    Done,
    Get,
    Gone,
    Held,
    Outcome,
    Put,
    SpaceOpened,
    StopTier,
    TierFailed,
    TierPing,
    TierPong,
    TierReady,
)
from kvd_proto.messages import Message

LOOK_SECONDS = 0.05
SPACES_SECONDS = 0.25
TELL_SECONDS = 0.01
IDLE_PING_SECONDS = 1.0
STUCK_SECONDS = 10.0  # without progress: its process is replaced
START_SECONDS = 120.0
HELD_A_TURN = 1024  # keys of a scan: one or two milliseconds

_Scanned: TypeAlias = tuple[Tier, str, Namespace, Held]


class Tiering:
    """Decisions about tiers."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self.demotion = Demotion(state)
        self.promotion = Promotion(state)
        self.spaces = TierSpaces(state)
        self._scanned: deque[_Scanned] = deque()
        self._scanned_at = 0  # how far the first of them was taken in
        self._watched: set[Namespace] = set()  # those that engines have used
        self._looked = self._next_spaces = self._next_tell = 0.0
        self._rests_until = 0.0  # what concerns all tiers
        self._handlers: dict[type[Message], Callable[..., list[Effect]]] = {
            TierReady: self._ready,
            TierFailed: self._failed,
            SpaceOpened: self._opened,
            Held: self._held,
            Gone: self._gone,
            Done: self._done,
            TierPong: self._pong,
        }

    # ----------------------------------------------------------------- processes

    def begun(self, index: int, pid: int, now: float) -> None:
        """A process was started, and knows of nothing."""
        tier = self._state.tiers[index]
        tier.child.started(now)
        tier.wrong = False
        tier.breaker.process_changed(now)
        tier.process = f"tier {index} pid {pid}"

    def received(self, index: int, message: Message, now: float) -> list[Effect]:
        """A tier's process has sent a message."""
        tier = self._state.tiers[index]
        tier.child.heard(now)
        handler, name = self._handlers.get(type(message)), type(message).__name__
        if handler is None:
            return [tier.event(f"sent {name}", "error")]
        if tier.wrong:  # it ends, and what it says leads to no good
            return []
        effects = self._guarded([tier], f"its {name}", now, partial(handler, tier, message, now))
        if isinstance(message, Done):
            # What follows an answer goes on at once, and not after the next look.
            effects += self._guarded(
                self._state.tiers, "what follows", now, lambda: self._work(now)
            )
        return effects + self._guarded([tier], "its state", now, lambda: self._follow(tier, now))

    def lost(self, index: int, reason: str, now: float) -> list[Effect]:
        """A process has ended: nothing of it moves, and what it held is not known any more."""
        tier = self._state.tiers[index]
        served = tier.child.up
        effects = self._guarded([tier], "its end", now, lambda: self._end(tier, reason, now))
        tier.forget()
        effects += self._guarded([tier], "its end", now, lambda: self._clean_up(tier))
        if served:
            tier.child.last_error = reason
            tier.counts.restarts += 1
            effects.append(tier.event(f"is lost: {reason}; it is started again", "error"))
        elif not tier.child.last_error:
            tier.child.last_error = reason
        return effects

    def _clean_up(self, tier: Tier) -> list[Effect]:
        """Nothing is left of a process that has ended."""
        self.promotion.lost(tier)
        self._drop_scans([tier])
        if not tier.info.shared:
            for namespace in self._state.open_namespaces:
                if (tiers := namespace.directory.tiers) is not None:
                    tiers.release_tier(tier.index)
        self._tell()
        return []

    def _drop_scans(self, tiers: Tiers) -> None:
        self._scanned = deque(each for each in self._scanned if each[0] not in tiers)
        self._scanned_at = 0

    def _end(self, tier: Tier, reason: str, now: float) -> list[Effect]:
        tier.breaker.lost(now, f"its process ended: {reason}")
        return self._follow(tier, now) + self.promotion.give_up(tier)

    def reset(self, namespace: Namespace) -> list[Effect]:
        """A namespace was reset, and has another epoch."""
        return self.spaces.reset(namespace)

    def seek(
        self, namespace: Namespace, engine: int, keys: Sequence[bytes], now: float
    ) -> list[Effect]:
        """An engine wants these in memory, a prompt's head first."""
        if now < self._rests_until:
            return []
        return self._guarded(
            self._state.tiers,
            "what is sought",
            now,
            lambda: self.promotion.seek(namespace, engine, keys, now),
        )

    def stop(self) -> list[Effect]:
        """The daemon ends."""
        return [ToTier(tier.index, StopTier()) for tier in self._state.tiers if tier.up]

    def _ready(self, tier: Tier, message: TierReady, now: float) -> list[Effect]:
        tier.child.serves(message.pid)
        tier.described = message.described
        tier.breaker.process_changed(now)
        tier.total_bytes, tier.used_bytes = message.total_bytes, message.used_bytes
        tier.chunks = message.chunks
        tier.counts.damaged_records += message.damaged_records
        text = f"is up (pid {message.pid}): {message.described or tier.setting.text}"
        return [tier.event(text), *self.spaces.tell(tier, now)]

    def _failed(self, tier: Tier, message: TierFailed, now: float) -> list[Effect]:
        del now
        new, tier.child.last_error = tier.child.last_error != message.error, message.error
        told = [tier.event(f"cannot be used: {message.error}", "error")] if new else []
        return [*told, KillTier(tier.index, message.error)]

    def _pong(self, tier: Tier, message: TierPong, now: float) -> list[Effect]:
        if message.progress > tier.progress:
            tier.breaker.moved(now)
        tier.progress = message.progress
        tier.total_bytes, tier.used_bytes = message.total_bytes, message.used_bytes
        tier.chunks = message.chunks
        tier.child.last_error = message.error or tier.child.last_error
        return []

    def _opened(self, tier: Tier, message: SpaceOpened, now: float) -> list[Effect]:
        del now
        effects = self.spaces.opened(tier, message)
        self._tell()
        return effects

    # ------------------------------------------------------------------ contents

    def _held(self, tier: Tier, message: Held, now: float) -> list[Effect]:
        del now
        namespace = self._state.namespace(message.namespace)
        if namespace is not None and (message.keys or message.last):
            self._scanned.append((tier, tier.process, namespace, message))
        return []

    def _take_in(self) -> list[Effect]:
        """Note some of what scans have found."""
        tier, process, namespace, held = self._scanned[0]
        tiers = namespace.directory.tiers
        begin, end = self._scanned_at, self._scanned_at + HELD_A_TURN
        if (
            tiers is not None
            and process == tier.process
            and held.epoch == namespace.epoch
            and self._state.is_open(namespace)
        ):
            columns = (held.first.numpy(), held.count.numpy(), held.groups.numpy())
            first, count, groups = (column[begin:end] for column in columns)
            tiers.hold_all(held.keys[begin:end], tier.index, first, count, groups)
            if held.last and end >= len(held.keys):
                tiers.tell()
        else:
            end = len(held.keys)
        self._scanned_at = end
        if end >= len(held.keys):
            self._scanned.popleft()
            self._scanned_at = 0
        return []

    def _gone(self, tier: Tier, message: Gone, now: float) -> list[Effect]:
        del now
        tier.counts.dropped += len(message.keys)
        namespace = self._state.namespace(message.namespace)
        if namespace is not None and (tiers := namespace.directory.tiers) is not None:
            for key in message.keys:
                tiers.release(key, tier.index)
        return []

    def _done(self, tier: Tier, done: Done, now: float) -> list[Effect]:
        outcomes, order = done.outcomes.tolist(), tier.batches.get(done.number)
        if order is None or len(outcomes) != len(order.order.keys) or tier.child.killed:
            why = f"its answer {done.number}, of {len(outcomes)} chunks, fits no order"
            return [] if tier.child.killed else self._kill(tier, why)
        batch = tier.ended(done.number, now)
        tier.breaker.moved(now)
        if done.error:
            tier.child.last_error = done.error
        bad = sum(code in _BAD for code in outcomes)
        effects = self._take(tier, batch, done, now) if batch is not None else []
        tier.breaker.ended(now, failed=2 * bad >= len(outcomes))
        return effects

    def _take(self, tier: Tier, batch: Batch, done: Done, now: float) -> list[Effect]:
        if not self._state.is_open(batch.namespace):
            return []
        match batch.order:
            case Put():
                return self.demotion.done(tier, batch, batch.order, done, now)
            case Get() if batch.given_up:
                self.promotion.late(tier, batch)
                return []
            case Get():
                return self.promotion.done(tier, batch, batch.order, done, now)
            case Ask():
                return self.promotion.answered(tier, batch, batch.order, done, now)

    # ---------------------------------------------------------------------- time

    def due(self, now: float) -> float:
        """Seconds until `turn` has something to do, as far as nothing arrives; at most a tick."""
        if not self._state.tiers:
            return SPACES_SECONDS
        if now < self._rests_until:
            return min(SPACES_SECONDS, self._rests_until - now)
        if self._scanned or (self.promotion.waiting and not self.promotion.blocked):
            return 0.0
        due = self.demotion.due(now)
        watched = any(tier.batches or not tier.breaker.closed for tier in self._state.tiers)
        if watched or self.promotion.waiting or self.demotion.blocked:
            due = min(due, max(0.0, self._looked + LOOK_SECONDS - now))
        return min(due, SPACES_SECONDS)

    def turn(self, now: float) -> list[Effect]:
        """Do what is due."""
        if not self._state.tiers or self._state.stopping or now < self._rests_until:
            return []
        effects: list[Effect] = []
        if now >= self._looked + LOOK_SECONDS:
            away, self._looked = now - self._looked - 2 * LOOK_SECONDS, now
            for tier in self._awake(now):
                if away > 0:
                    tier.breaker.held_up(away, now)
                effects += self._guarded(
                    [tier], "a look at it", now, partial(self._look, tier, now)
                )
        if self._scanned:
            tier = self._scanned[0][0]
            effects += self._guarded([tier], "its scan", now, self._take_in)
        return effects + self._guarded(
            self._state.tiers, "what is due", now, lambda: self._rest_of_turn(now)
        )

    def _rest_of_turn(self, now: float) -> list[Effect]:
        """What concerns all tiers, or any."""
        effects: list[Effect] = []
        if self._watch_new() or now >= self._next_spaces:
            self._next_spaces = now + SPACES_SECONDS
            self.spaces.prune()
            self._watched = set(filter(self._state.is_open, self._watched))
            self.promotion.prune()
            for tier in self._awake(now):
                if tier.up:
                    tell = partial(self.spaces.tell, tier, now)
                    effects += self._guarded([tier], "its namespaces", now, tell)
        effects += self._work(now)
        if now >= self._next_tell:
            self._next_tell = now + TELL_SECONDS
            self._tell()
        return effects

    def _awake(self, now: float) -> list[Tier]:
        """Tiers that nothing has gone wrong with lately."""
        return [tier for tier in self._state.tiers if now >= tier.rests_until]

    def _work(self, now: float) -> list[Effect]:
        """Give orders, as far as there is room."""
        effects = self.promotion.work(now) if self.promotion.waiting else []
        return effects + self.demotion.work(now)

    # --------------------------------------------------------------------- guard

    def _guarded(
        self, tiers: Tiers, what: str, now: float, act: Callable[[], list[Effect]]
    ) -> list[Effect]:
        """Do something for these tiers; what goes wrong here ends their processes, not this one.

        What was noted of orders that are under way may be wrong then. So the tiers concerned begin
        anew: their slots wait for the end of their processes, as those of any that is killed.
        """
        try:
            return act()
        except Exception as error:  # noqa: BLE001  # whatever it is, engines only miss
            return self._went_wrong(tiers, what, error, now)

    def _went_wrong(self, tiers: Tiers, what: str, error: Exception, now: float) -> list[Effect]:
        fault, trace, effects = fault_text(error), fault_trace(error), list[Effect]()
        names = ", ".join(tier.name for tier in tiers)
        text = (
            f"tier {names}: {what} cannot be handled ({fault}), a bug in kvd: it is set aside,"
            " and its process is replaced"
        )
        effects.append(Event(text, "error", {"tier": names}, trace))
        for tier in tiers:
            tier.breaker.wrong(now, f"{what} could not be handled: {fault}")
            tier.seen, tier.rests_until = tier.breaker.state, tier.breaker.retry_at
            tier.child.last_error = f"{what}: {fault}"
            if not tier.wrong:
                tier.child.killed = tier.wrong = True
                effects.append(KillTier(tier.index, f"{what}: {fault}", wrong=True))
            # What it leaves behind `lost` takes up, whatever this comes to.
            with contextlib.suppress(Exception):
                effects += self.promotion.give_up(tier)
            with contextlib.suppress(Exception):
                self.promotion.give_up_slots(tier)
        self._drop_scans(tiers)
        if tiers is self._state.tiers:  # it may come of what waits
            self._rests_until = max(tier.rests_until for tier in tiers)
            self.promotion.drop_waiting()
            self._watched.clear()
        with contextlib.suppress(Exception):
            self._tell()
        return effects

    # ---------------------------------------------------------------------- looks

    def _watch_new(self) -> bool:
        """Note of namespaces that an engine has begun to use what is to go down; are there any?"""
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

    def _look(self, tier: Tier, now: float) -> list[Effect]:
        """See whether a tier is late, stuck, or to be tried again."""
        breaker, child, effects = tier.breaker, tier.child, list[Effect]()
        why = child.check(now, STUCK_SECONDS if child.up else START_SECONDS)
        if not tier.up:
            return self._kill(tier, why) if why else []
        outstanding = bool(tier.batches)
        breaker.look(now, outstanding=outstanding)
        if (silent := child.silent(now)) > max(IDLE_PING_SECONDS, breaker.late_seconds):
            breaker.signal(Signal.LATE, now, f"its process has not answered for {silent:.1f} s")
        if outstanding and (stuck := now - breaker.moved_at) > STUCK_SECONDS:
            effects += self._kill(tier, f"nothing has moved for {stuck:.1f} s")
        elif child.ping_due(now, LOOK_SECONDS if outstanding else IDLE_PING_SECONDS):
            effects.append(ToTier(tier.index, TierPing()))
        return effects + self._follow(tier, now)

    def _follow(self, tier: Tier, now: float) -> list[Effect]:
        """Act where the breaker's state is another than before."""
        before, tier.seen = tier.seen, tier.breaker.state
        if before is tier.seen:
            return []
        effects: list[Effect] = []
        if tier.seen is State.OPEN:
            gets = (batch for batch in tier.gets() if not batch.given_up)
            for batch in gets:
                tier.trial = batch.namespace, batch.order.keys[0]
                break
            effects = self.promotion.give_up(tier)
            if before is State.CLOSED:
                text = f"is set aside: {tier.breaker.why}; engines miss what it holds meanwhile"
                effects.append(tier.event(text, "warning"))
        elif tier.seen is State.PROBING:
            effects = self._probe(tier, now)
        else:
            effects.append(tier.event("is used again"))
        self._tell()
        return effects

    def _probe(self, tier: Tier, now: float) -> list[Effect]:
        """Try a tier with one order, the last that was given up if there is one."""
        effects: list[Effect] = []
        spaces = [namespace for namespace, opening in tier.spaces.items() if opening.used]
        if tier.info.shared and spaces:
            effects = self.promotion.probe(tier, spaces[0], now)
        elif tier.trial is not None and tier.trial[0] in spaces:
            namespace, key = tier.trial
            effects = self.promotion.get(tier, namespace, [key], (), now)
        tier.trial = None
        effects = effects or self.demotion.probe(tier, now)
        if not tier.batches:  # there is nothing to try it with, nor to lose
            tier.breaker.signal(Signal.PROVEN, now)
            effects += self._follow(tier, now)
        return effects

    def _kill(self, tier: Tier, why: str) -> list[Effect]:
        """Have a process end; nobody waits for that, and its slots stay till then."""
        tier.child.killed = True
        return [tier.event(f"is killed: {why}", "error"), KillTier(tier.index, why)]

    def _tell(self) -> None:
        """Write what is known of tiers into the directories, where it has changed."""
        for namespace in self._state.open_namespaces:
            if (tiers := namespace.directory.tiers) is None:
                continue
            waiting = self.promotion.waiting_bytes(namespace)
            for tier in self._state.tiers:
                status = tier.status(namespace, waiting)
                if tiers.status(tier.index) != status:
                    tiers.set_status(tier.index, status)

    def __repr__(self) -> str:
        return f"<Tiering of {self._state.tiers!r}>"


_BAD = {int(Outcome.FAILED), int(Outcome.LATE)}
