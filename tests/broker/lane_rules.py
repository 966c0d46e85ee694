"""Two lanes for a state machine of the broker: they answer, end, die and fail when they like."""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from kvd.broker.broker import Broker
from kvd.broker.children import EXITED, MAX_FATAL_IMPORTS
from kvd.broker.effects import DropLane, Effect, KillLane, StartLane, ToLane
from kvd.wire.link import (
    BindWorker,
    Importing,
    ImportWorker,
    LaneFailed,
    PoolUsable,
    StopLane,
)
from kvd_proto.messages import Message
from tests.broker.brokers import CUDA, DrivenBroker, lane_ready

DEVICE = st.sampled_from(["host", CUDA])
IDLE_SECONDS = 10.0


class LaneRules(DrivenBroker):
    """The host's lane, and one of a CUDA device, which pins and comes on demand.

    Attributes:
        lane_inbox: orders that a lane has not read.
        wanted: lanes that the broker wants to have a process.
        up: those that serve; `ending`: those of them that were told to end.
        cannot_pin: the CUDA device's lane knows that it never will.
        bindings: orders to bind a worker that were sent, `executed` those that were answered.
        fatal: how many lanes ended while they mapped the memory, by worker.
    """

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self.lane_inbox: dict[str, list[Message]] = {"host": [], CUDA: []}
        self.incarnation = 0
        self.wanted = {"host"}
        self.up: set[str] = set()
        self.ending: set[str] = set()
        self.cannot_pin = False
        self.bindings: Counter[str] = Counter()
        self.executed: Counter[str] = Counter()
        self.fatal: Counter[tuple[object, ...]] = Counter()

    def carried_out_by_lanes(self, effect: Effect) -> None:
        """Note what the broker wants lanes to do."""
        match effect:
            case ToLane():
                assert effect.device in self.up, f"{effect} to a lane that is down"
                self.lane_inbox[effect.device].append(effect.message)
                self.ordered(effect.device, effect.message)
            case KillLane():
                self.end_lane(effect.device)
            case StartLane():
                assert effect.device not in self.wanted
                self.wanted.add(effect.device)
            case DropLane():
                assert effect.device not in self.up
                self.wanted.remove(effect.device)

    def ordered(self, device: str, message: Message) -> None:
        """Note what a lane is told, and that it may be."""
        match message:
            case ImportWorker(session=number):
                assert device not in self.ending
                assert self.fatal[self.worker(number)] < MAX_FATAL_IMPORTS
            case BindWorker():
                self.bindings[device] += 1
            case StopLane():
                assert device == CUDA
                assert device not in self.ending
                assert self.cannot_pin or not self.broker.state.workers_of(device)
                self.ending.add(device)

    def worker(self, number: int) -> tuple[object, ...]:
        """What stays of a worker in its next session."""
        session = self.broker.state.registry.sessions.get(number)
        if session is None or session.register_message is None or session.engine is None:
            return ()
        return session.engine.name, session.register_message.rank, session.register_message.device

    @rule(device=DEVICE)
    def start_lane(self, device: str) -> None:
        """A lane process that is wanted comes up."""
        if device in self.wanted - self.up:
            self.up.add(device)
            self.incarnation += 1
            ready = lane_ready(incarnation=self.incarnation, pins=device == CUDA)
            self.from_lane(ready, device)

    @rule(device=DEVICE, says_why=st.booleans())
    def lane_does_not_start(self, device: str, says_why: bool) -> None:
        """A lane process that is wanted dies before it is up, with a word or without."""
        if device in self.wanted - self.up:
            if says_why:
                self.from_lane(LaneFailed(error="no such device"), device)
            else:
                self.end_lane(device)

    @rule(device=DEVICE)
    def lose_lane(self, device: str) -> None:
        """A lane process that is up dies."""
        if device in self.up:
            self.end_lane(device)

    def end_lane(self, device: str, reason: str = "killed") -> None:
        """A lane process is gone, up or not."""
        self.up.discard(device)
        self.ending.discard(device)
        self.lane_inbox[device].clear()
        self.bindings[device] = self.executed[device] = 0
        self.cannot_pin &= device != CUDA
        self.carry_out(self.broker.supervision.lost(device, reason))

    @rule(times=st.sampled_from([1, 1, 2, 3]))
    def memory_ends_its_lane(self, times: int) -> None:
        """A lane dies in the call that maps a worker's memory, and so do those after it."""
        for _ in range(times):
            if not self.orders_to_import():
                self.lose_lane(CUDA)
                self.start_lane(CUDA)
            for order in self.orders_to_import()[:1]:
                self.from_lane(Importing(session=order.session), CUDA)
                self.fatal[self.worker(order.session)] += 1
                self.end_lane(CUDA)

    def orders_to_import(self) -> list[ImportWorker]:
        """What the CUDA device's lane is to map, and has not read."""
        orders = [order for order in self.lane_inbox[CUDA] if isinstance(order, ImportWorker)]
        return [order for order in orders if order.attempt == self.attempt(order)]

    def leave_lane_idle(self) -> None:
        """All workers of the CUDA device are gone, for longer than its lane stays."""
        sessions = self.broker.state.registry.sessions.values()
        users = [
            session
            for session in sessions
            for use in (session.registration, session.pending, session.releasing)
            if use is not None and use.device == CUDA
        ]
        if CUDA in self.up:
            for session in users:
                self.lose(session)
            self.pass_time(IDLE_SECONDS + 1, sorted(self.up))
            assert CUDA in self.ending

    def attempt(self, order: ImportWorker) -> int | None:
        """Which answer of a lane about this memory counts; None where it is wanted no more."""
        session = self.broker.state.registry.sessions.get(order.session)
        if session is None or session.register_message is None:
            return None
        return session.attempt

    @rule(likely=st.sampled_from([True, False, False]))
    def lane_cannot_pin(self, likely: bool) -> None:
        """A lane that pins finds out that it cannot."""
        if likely and CUDA in self.up and not self.cannot_pin:
            self.cannot_pin = True
            self.report_usable(CUDA)

    @rule(device=DEVICE, count=st.integers(1, 8))
    def lane_works(self, device: str, count: int) -> None:
        """A lane answers some of what it was told."""
        inbox = self.lane_inbox[device]
        for _ in range(min(count, len(inbox))):
            if not inbox:
                return
            self.lane_executes(inbox.pop(0), device)

    def lane_executes(self, order: Message, device: str) -> None:
        """A lane does what it was told, and says so."""
        match order:
            case StopLane():
                restarts = self.broker.state.lanes[device].counters.restarts
                totals = self.broker.state.gone_lanes.restarts
                self.end_lane(device, EXITED)
                lane = self.broker.state.lanes.get(device)
                gained = self.broker.state.gone_lanes.restarts - totals
                assert restarts == (lane.counters.restarts if lane is not None else gained)
            case BindWorker():
                self.executed[device] += 1
                self.report_usable(device)
            case ImportWorker():
                self.from_lane(Importing(session=order.session), device)
                if order.attempt == self.attempt(order):
                    self.fatal.pop(self.worker(order.session), None)
                error = "no memory may be locked" if self.cannot_pin and device == CUDA else ""
                self.lane_answers(order, device, error)
            case _:
                self.lane_answers(order, device)

    def report_usable(self, device: str) -> None:
        """A lane says how much of the pool it can copy."""
        fails = self.cannot_pin and device == CUDA
        figures = PoolUsable(
            usable_bytes=0 if fails else 2**62,
            error="no memory may be locked" if fails else "",
            bindings=self.executed[device],
        )
        self.from_lane(figures, device)

    def lanes_work(self) -> None:
        """All lanes that are wanted are up and do what they were told."""
        for device in sorted(self.wanted) * 2:  # one that ends has another process then
            self.start_lane(device)
            self.lane_works(device, 10_000)

    @invariant()
    def usable_memory_is_known(self) -> None:
        """A lane that pins can copy something once it has answered every order that binds."""
        if CUDA in self.up:
            usable = self.broker.state.lanes[CUDA].usable_bytes > 0
            answered = self.executed[CUDA] == self.bindings[CUDA]
            assert usable == (answered and not self.cannot_pin)
