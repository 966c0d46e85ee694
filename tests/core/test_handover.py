"""What a daemon decides that is asked to leave to another one."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvd.core.broker import Broker
from kvd.core.effects import Effect, Event, Reply, RunLanes
from kvd.core.handover import HANDOVER, WayOut
from kvd.core.sessions import Peer, Session
from kvd.settings import Settings
from kvd.state.namespaces import Namespace, Namespaces
from kvd_proto.messages import (
    Clear,
    Drain,
    Error,
    ErrorCode,
    HandingOver,
    HandOver,
    Hello,
    Message,
    PrepareStore,
    Resume,
    Status,
    StatusReport,
)

BOOT = bytes(range(16))
ASK = HandOver(boot_id=BOOT, pid=77)
OWNER = 1
UID = 5


class Bench:
    """A broker with `drain_seconds` of 10, lanes that run while `lanes` says so, and a clock."""

    def __init__(self, way_out: WayOut | None = None) -> None:
        self.now = 100.0
        self.lanes = True
        self.wanted = True
        self.events: list[str] = []
        self._came = 0
        self.broker = Broker(
            Settings(runtime_dir="/nowhere", cpu_bytes=64 * 4096, drain_seconds=10.0),
            boot_id=BOOT,
            version="test",
            pid=1,
            devices=[],
            open_namespaces=lambda n: Namespaces(n, make_buffer=lambda _, size: bytearray(size)),
            available_bytes=lambda: 2**30,
            way_out=way_out or WayOut(uid=UID, keeps=lambda: True),
        )
        self.broker.state.allocated = 2**62
        assert self.broker.state.namespaces is not None
        self.namespace: Namespace = self.broker.state.namespaces.open(
            bytes(16), (4096,), world_size=1, replicated=False, boot_id=BOOT
        )
        self.broker.state.namespaces.attach_engine(self.namespace)
        self.tool = self.session()

    @property
    def state(self) -> Any:
        """The broker's."""
        return self.broker.state

    def session(self, kind: str = "tool", uid: int = UID) -> Session:
        """Somebody who has said HELLO."""
        self._came += 1
        session, _ = self.broker.connected(self._came.to_bytes(16), Peer(4211, uid, 5))
        assert session is not None
        hello = Hello(
            kind=kind,  # type: ignore[arg-type]
            engine="e",
            pid=1,
            protocol_min=1,
            protocol_max=1,
            client="test",
        )
        self.broker.request(session, 1, hello, self.now)
        return session

    def ask(self, message: Message, session: Session | None = None) -> Message | None:
        """The reply, if there is one yet."""
        effects = self.broker.request(session or self.tool, 7, message, self.now)
        self.carry_out(effects)
        return next((e.message for e in effects if isinstance(e, Reply)), None)

    def refusal(self, message: Message = ASK, session: Session | None = None) -> Error:
        """The ERROR that answers it."""
        reply = self.ask(message, session)
        assert isinstance(reply, Error)
        return reply

    def carry_out(self, effects: list[Effect]) -> None:
        """Note what is to be seen from outside."""
        self.events += [effect.text for effect in effects if isinstance(effect, Event)]
        for effect in effects:
            if isinstance(effect, RunLanes):
                self.wanted = effect.wanted

    def turn(self, seconds: float = 0.0) -> None:
        """Time passes, the loop turns."""
        self.now += seconds
        self.carry_out(self.broker.handover.turn(self.now, lanes_running=self.lanes))

    def lose(self, session: Session) -> None:
        """A session's door closes."""
        self.carry_out(self.broker.lost(session))

    def begin_store(self, key: bytes) -> None:
        """A chunk in writing."""
        assert self.namespace.table.prepare_store([key], OWNER, self.now).slots.size

    def wants_lanes(self) -> bool:
        """Whether lanes are to run."""
        return self.wanted

    def leaves(self) -> bool:
        """Whether the process ends."""
        return self.broker.handover.leaving


@pytest.fixture
def bench() -> Bench:
    """A broker that may hand over and is idle."""
    return Bench()


def test_an_idle_daemon_leaves_when_its_lanes_have_ended(bench: Bench) -> None:
    """Granted with the time that it takes at most; then lanes end; then it leaves."""
    assert bench.ask(ASK) == HandingOver(seconds=10.0, kept=True)
    bench.turn()
    assert not bench.wants_lanes()
    assert not bench.leaves()
    bench.lanes = False
    bench.turn(0.25)
    assert bench.leaves()
    assert bench.events == [
        "handing over to pid 77, asked by uid 5 pid 4211: no new stores",
        "handed over to pid 77 after 250 ms: leaving",
    ]


def test_what_has_begun_is_waited_for(bench: Bench) -> None:
    """Stores and older leases hold it up, stores are refused; later leases do not count."""
    table = bench.namespace.table
    ready = table.prepare_store([b"r"], OWNER, bench.now)
    table.share_done(OWNER, 0, ready.slots, ready.generations, [0], [1], ok=True)
    lease = table.prepare_load([b"r"], OWNER, bench.now, 60.0)
    bench.begin_store(b"w")
    bench.ask(ASK)
    bench.turn(1.0)
    assert bench.wants_lanes()
    refused = bench.refusal(PrepareStore(keys=(b"x",)), bench.session("scheduler"))
    assert refused.code is ErrorCode.DRAINING
    table.complete_load(lease.lease_id, OWNER)
    later = table.prepare_load([b"r"], OWNER, bench.now, 60.0)
    assert later.lease_id
    bench.turn(1.0)
    assert bench.wants_lanes()
    dropped, refs = table.complete_store([b"w"], OWNER, success=False)
    assert dropped
    bench.state.revoke(bench.namespace, refs)
    bench.turn(1.0)
    assert not bench.wants_lanes()


def test_it_waits_no_longer_than_it_said(bench: Bench) -> None:
    """Half of drain_seconds for what has begun, the whole for lanes too; both are said."""
    bench.begin_store(b"w")
    bench.ask(ASK)
    bench.turn(4.9)
    assert bench.wants_lanes()
    bench.turn(0.2)
    assert not bench.wants_lanes()
    bench.turn(4.8)
    assert not bench.leaves()
    bench.turn(0.2)
    assert bench.leaves()
    assert any("1 chunks in writing and 0 leases" in text for text in bench.events)
    assert any("lanes have not finished within 10 s" in text for text in bench.events)


def test_a_clear_is_finished_first(bench: Bench) -> None:
    """A sweep that an operator waits for is not cut in half."""
    assert bench.ask(Clear()) is None
    bench.ask(ASK)
    bench.turn(1.0)
    assert bench.wants_lanes()
    while bench.broker.busy:
        bench.carry_out(bench.broker.work())
    bench.turn()
    assert not bench.wants_lanes()


@pytest.mark.parametrize("stopped", [False, True], ids=["draining", "stopping"])
@pytest.mark.parametrize("drained", [False, True], ids=["", "drained before"])
def test_the_end_of_the_new_daemon_undoes_it(bench: Bench, *, stopped: bool, drained: bool) -> None:
    """Stores are taken as before, lanes run again, an operator's drain is as it was."""
    if drained:
        bench.ask(Drain())
    before = bench.state.drain
    if not stopped:
        bench.begin_store(b"w")
    successor = bench.session()
    bench.ask(ASK, successor)
    bench.turn(1.0)
    assert bench.wants_lanes() is not stopped
    bench.lose(bench.session())
    assert bench.state.successor is not None
    bench.lose(successor)
    assert bench.wants_lanes()
    assert bench.state.successor is None
    assert not bench.state.stopping
    assert bench.state.drain is before
    assert bench.state.draining is drained
    bench.turn(60.0)
    assert not bench.leaves()
    assert bench.events[-1] == "pid 77, which was to take over, is gone: this daemon serves on"
    assert isinstance(bench.ask(ASK), HandingOver)


def test_when_it_leaves_nothing_is_undone(bench: Bench) -> None:
    """The new daemon's end comes too late; and a signal leaves nothing to undo either."""
    bench.lanes = False
    bench.ask(ASK)
    bench.turn()
    bench.turn()
    assert bench.leaves()
    bench.lose(bench.tool)
    assert bench.leaves()
    other = Bench()
    other.ask(ASK)
    other.broker.handover.overtaken()
    other.lose(other.tool)
    assert other.leaves()


def test_a_second_one_is_refused_with_the_firsts_pid(bench: Bench) -> None:
    """The handover that is under way is not touched."""
    bench.ask(ASK)
    text = bench.refusal(HandOver(boot_id=BOOT, pid=78), bench.session()).text
    assert text.startswith("pid 77 is taking over already")
    assert bench.state.successor.pid == 77


def test_operators_orders_wait_for_the_new_daemon(bench: Bench) -> None:
    """Drain and Resume name the new one's pid and change nothing."""
    bench.ask(Drain())
    before = bench.state.drain
    bench.ask(ASK)
    assert any("drain by uid 5 pid 4211 ends with this daemon" in text for text in bench.events)
    for order in (Drain(), Resume()):
        assert "hands over to pid 77" in bench.refusal(order).text
    assert bench.state.drain is before
    report = bench.ask(Status())
    assert isinstance(report, StatusReport)
    assert report.status["not_ready"] == ["handing over to pid 77"]


@pytest.mark.parametrize(
    ("way_out", "code", "words"),
    [
        (WayOut(uid=UID + 1), ErrorCode.FORBIDDEN, "belong to uid 6"),
        (WayOut(uid=UID, managed=True), ErrorCode.BAD_STATE, "systemctl restart kvd"),
    ],
)
def test_who_may_not_take_over_reads_why(way_out: WayOut, code: ErrorCode, words: str) -> None:
    """Another user, or a manager that would not know the new process: refused, with a remedy."""
    bench = Bench(way_out)
    refusal = bench.refusal()
    assert refusal.code is code
    assert words in refusal.text
    assert not bench.state.draining


def test_only_tools_and_only_this_daemon(bench: Bench) -> None:
    """An engine cannot ask; a request meant for another daemon has no effect."""
    assert bench.refusal(session=bench.session("scheduler")).code is ErrorCode.BAD_STATE
    other = bench.refusal(HandOver(boot_id=bytes(16), pid=77))
    assert other.code is ErrorCode.STALE_BOOT
    bench.state.stopping = True
    assert bench.refusal().code is ErrorCode.DRAINING
    assert bench.state.successor is None


def test_it_says_when_nothing_is_kept() -> None:
    """With keep_pool = no the reply and the log say that the cache starts empty."""
    bench = Bench(WayOut(uid=UID))
    assert bench.ask(ASK) == HandingOver(seconds=10.0, kept=False)
    assert "the cache starts empty" in bench.events[0]


@given(st.data())
def test_every_state_leads_out(data: st.DataObject) -> None:
    """From everywhere the table has a way to LEAVING, and none out of it."""
    table: Mapping[Any, Mapping[Any, Any]] = HANDOVER
    state = data.draw(st.sampled_from(sorted(table)))
    reached, todo = {state}, [state]
    while todo:
        for target in table[todo.pop()].values():
            if target not in reached:
                reached.add(target)
                todo.append(target)
    assert "leaving" in reached
    assert not table["leaving"]


class Orders(RuleBasedStateMachine):
    """Any order of events; see the invariants."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.tools: list[Session] = [self.bench.tool]
        self.drained = False
        self.keys = 0

    @rule(pick=st.integers(0, 99))
    def hand_over(self, pick: int) -> None:
        """A tool asks."""
        tool = self.tools[pick % len(self.tools)]
        free = self.bench.state.successor is None
        reply = self.bench.ask(request_of(pick), tool)
        assert isinstance(reply, HandingOver) == free

    @rule(pick=st.integers(0, 99))
    def leave(self, pick: int) -> None:
        """A tool goes, another comes."""
        self.bench.lose(self.tools.pop(pick % len(self.tools)))
        self.tools.append(self.bench.session())

    @rule()
    def come(self) -> None:
        """One more tool."""
        self.tools.append(self.bench.session())

    @rule(wanted=st.booleans())
    def drain(self, *, wanted: bool) -> None:
        """An operator drains or resumes."""
        reply = self.bench.ask(Drain() if wanted else Resume(), self.tools[-1])
        if not isinstance(reply, Error):
            self.drained = wanted

    @rule()
    def store(self) -> None:
        """An engine begins to store, where that is allowed."""
        if not self.bench.state.draining:
            self.keys += 1
            self.bench.begin_store(b"%d" % self.keys)

    @rule(seconds=st.floats(0, 4))
    def pass_time(self, seconds: float) -> None:
        """The loop turns."""
        self.bench.turn(seconds)

    @rule()
    def end_lanes(self) -> None:
        """Lanes end if they were told to; else they run."""
        self.bench.lanes = self.bench.wants_lanes()

    @invariant()
    def holds(self) -> None:
        """Drained exactly by operator or successor; nobody leaves for nobody, or with lanes on."""
        bench, state = self.bench, self.bench.state
        bench.broker.handover.check_integrity()
        assert (state.drain is not None) == self.drained
        assert state.draining == (self.drained or state.successor is not None)
        assert state.stopping == (not bench.wants_lanes())
        if bench.leaves():
            assert state.successor is not None
            assert not bench.wants_lanes()
        elif state.successor is None:
            assert bench.wants_lanes()


def request_of(pid: int) -> HandOver:
    """The request of another process."""
    return HandOver(boot_id=BOOT, pid=pid)


TestOrders = Orders.TestCase
