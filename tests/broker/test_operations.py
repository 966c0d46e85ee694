"""What operators' requests decide, and what goes on in pieces or to a deadline."""

from typing import Any

import pytest

from kvd.broker.effects import LogEvent, Reply
from kvd.broker.sessions import Session
from kvd.broker.state import MAX_TASKS
from kvd.cache.chunks import PIECE_SLOTS
from kvd.cache.namespaces import Namespace, Namespaces
from kvd.client_names import Peer
from kvd_proto.directory import LookupResult
from kvd_proto.jobs import IntArray
from kvd_proto.messages import (
    Check,
    Clear,
    Cleared,
    Drain,
    Drained,
    Error,
    ErrorCode,
    Explain,
    Kind,
    Message,
    Pin,
    ReloadConfig,
    Reset,
    ResetDone,
    Resume,
    Resumed,
    ShowConfig,
    Status,
    StatusReport,
    Step,
    Stepped,
)
from tests.broker.brokers import PAGE, join, make_broker, refusal, replies
from tests.cache import tables

OWNER = 1
OPERATIONS = [
    Drain(),
    Resume(),
    Clear(),
    Clear(unused_seconds=0),
    Check(),
    Explain(key=b"key"),
    ReloadConfig(),
    ShowConfig(),
]


class Bench:
    """A broker with one namespace and sessions of every kind."""

    def __init__(self, chunks: int = 64, policy: str = "lru", tier: tuple[str, ...] = ()) -> None:
        self.now = 100.0
        self.broker = make_broker(chunks * PAGE, devices=[], policy=policy, tier=list(tier))
        self.events: list[str] = []
        self.turns = 0
        self.tool = self.session("tool")

    def session(self, kind: Kind, name: str = "e") -> Session:
        """A session that has said HELLO; tools come as uid 5, pid 4211."""
        return join(self.broker, kind, name, peer=Peer(4211, 5, 5), now=self.now)

    @property
    def namespaces(self) -> Namespaces:
        """All of the pool."""
        assert self.broker.state.namespaces is not None
        return self.broker.state.namespaces

    def namespace(self, number: int = 1) -> Namespace:
        """An open namespace of chunks of one page."""
        return self.namespaces.open(bytes([number]) * 16, (4096,), world_size=1, replicated=False)

    def store(self, namespace: Namespace, keys: list[bytes], *, finish: bool = True) -> None:
        """Chunks in the namespace, READY or still being written."""
        begun = tables.begin(namespace.table, keys, self.now, owner=OWNER)
        assert len(begun.slots) == len(keys)
        if finish:
            tables.finish(namespace.table, begun)

    def scheduler(self, namespace: Namespace) -> Session:
        """The scheduler of an engine that uses the namespace."""
        session = self.session("scheduler")
        assert session.engine is not None
        session.engine.namespace = namespace
        return session

    def ask(self, message: Message, session: Session | None = None) -> Message:
        """The one reply; events are noted."""
        effects = self.broker.request(session or self.tool, 7, message, self.now)
        while self.broker.background.busy:
            self.turns += 1
            effects += self.broker.background.work()
            self.broker.state.check_integrity()
        self.events += [effect.text for effect in effects if isinstance(effect, LogEvent)]
        (reply,) = [each.message for each in replies(effects) if each.request_id == 7]
        return reply

    def report(self) -> dict[str, Any]:
        """The status."""
        reply = self.ask(Status())
        assert isinstance(reply, StatusReport)
        return reply.status


@pytest.fixture
def bench() -> Bench:
    """A broker without lanes, which is ready."""
    return Bench()


@pytest.mark.parametrize("message", OPERATIONS, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("kind", ["scheduler", "worker"])
def test_only_tools_may(bench: Bench, kind: Kind, message: Message) -> None:
    """An engine's session is refused by name of the request, and nothing changes."""
    reply = bench.ask(message, bench.session(kind))
    assert isinstance(reply, Error)
    assert reply.code is ErrorCode.BAD_STATE
    assert f"{type(message).__name__} by a {kind}" in reply.text
    assert bench.broker.state.drain is None
    assert bench.events == []


def test_a_drain_lasts_until_it_is_resumed(bench: Bench) -> None:
    """The daemon is not ready and says who drained it first; a second order changes nothing."""
    assert bench.report()["ready"]
    for _ in range(2):
        assert bench.ask(Drain()) == Drained(stores=0, leases=0)
        bench.now += 5
    report = bench.report()
    assert (report["ready"], report["draining"]) == (False, True)
    assert report["checks"][-1]["text"] == "drained by uid 5 pid 4211; kvd resume undoes that"
    assert report["drain"] == {
        "uid": 5,
        "pid": 4211,
        "seconds": 10.0,
        "stores_in_flight": 0,
        "leases_in_flight": 0,
    }
    bench.now += 80
    assert bench.ask(Resume()) == Resumed(was_draining=True)
    assert bench.report()["ready"]
    assert bench.report()["drain"] is None
    assert bench.ask(Resume()) == Resumed(was_draining=False)
    assert bench.events == [
        "drained by uid 5 pid 4211: no new stores until resumed",
        "resumed by uid 5 pid 4211 after 1 m 30 s of drain",
    ]


def test_resume_does_not_undo_sigterm(bench: Bench) -> None:
    """A daemon that stops refuses both, and goes on stopping."""
    bench.broker.stop()
    for message in (Drain(), Resume()):
        reply = bench.ask(message)
        assert isinstance(reply, Error)
        assert reply.code is ErrorCode.DRAINING
        assert "stopping" in reply.text
    assert bench.broker.state.draining
    assert bench.report()["checks"][-1]["text"] == "stopping"


def test_a_load_that_never_ends_pins_no_longer_than_a_lease(bench: Bench) -> None:
    """However long the engine asks for: afterwards its chunks are hits that may be evicted."""
    namespace = bench.namespace()
    bench.store(namespace, [b"a"])
    slot = namespace.directory.find(b"a")
    load = Pin(
        lease=1,
        lease_ms=600_000,
        slots=IntArray.of([slot], "u4"),
        generations=IntArray.of([namespace.directory.generation(slot)], "u8"),
    )
    assert isinstance(bench.ask(Step(pins=(load,)), bench.scheduler(namespace)), Stepped)
    for seconds, pinned in ((59, 1), (1, 0)):
        bench.now += seconds
        bench.broker.tick(bench.now)
        assert namespace.table.slots.stats()["pinned"] == pinned
    assert namespace.directory.lookup(b"a") is LookupResult.HIT


def test_clear_drops_everything(bench: Bench) -> None:
    """READY chunks go, stores under way are given up, pinned ones go with their lease."""
    one, two = bench.namespace(1), bench.namespace(2)
    bench.namespaces.attach_engine(one)
    bench.store(one, [b"a", b"b", b"c"])
    bench.store(one, [b"d"], finish=False)
    bench.store(two, [b"e"])
    tables.pin(one.table, [b"a", b"b"], bench.now, 60.0)
    assert bench.ask(Clear()) == Cleared(chunks=3, bytes=3 * 4096, deferred=2)
    assert all(one.directory.find(key) < 0 for key in (b"a", b"b", b"c", b"d"))
    assert one.table.slots.stats()["doomed"] == 2
    one.table.loads.unpin(1, OWNER)
    assert set(one.table.slots.stats().values()) == {0}
    assert [space.id for space in bench.namespaces] == [one.id]  # nobody uses the other one
    assert one.table.counts.removed == 3
    assert bench.events[-1] == (
        "all namespaces cleared by uid 5 pid 4211: 3 chunks dropped, 12 KiB;"
        " 2 more go when their leases end"
    )


def test_evict_drops_what_was_of_no_use_for_so_long(bench: Bench) -> None:
    """What was loaded or used since stays, what is pinned stays, what is old goes."""
    namespace = bench.namespace()
    table = namespace.table
    bench.store(namespace, [b"old", b"pinned", b"loaded", b"used"])
    tables.pin(table, [b"pinned"], bench.now, 60.0)
    bench.now += 40
    bench.broker.tick(bench.now)
    tables.pin(table, [b"loaded"], bench.now, number=2)
    table.loads.unpin(2, OWNER)
    table.loads.refresh([b"used"], bench.now)
    bench.now += 10
    evict = Clear(unused_seconds=30.0, namespace=namespace.id)
    assert bench.ask(evict) == Cleared(chunks=1, bytes=4096, deferred=0)
    here = [k for k in (b"old", b"pinned", b"loaded", b"used") if namespace.directory.find(k) >= 0]
    assert here == [b"pinned", b"loaded", b"used"]
    assert bench.ask(Clear(unused_seconds=30.0)) == Cleared(chunks=0, bytes=0, deferred=0)
    assert "not used for 30 s by uid 5 pid 4211: 1 chunks dropped" in bench.events[0]
    bench.now += 30
    assert bench.ask(Clear(unused_seconds=30.0)) == Cleared(chunks=2, bytes=8192, deferred=0)


def test_a_namespace_that_is_closed_under_a_sweep_ends_it(bench: Bench) -> None:
    """What is gone need not be dropped; the reply comes all the same."""
    namespace = bench.namespace()
    bench.store(namespace, [b"a"])
    bench.broker.request(bench.tool, 8, Clear(unused_seconds=0), bench.now)
    bench.namespaces.close(namespace)
    effects = bench.broker.background.work() + bench.broker.background.work()
    assert [e.message for e in replies(effects)] == [Cleared(chunks=0, bytes=0, deferred=0)]


@pytest.mark.parametrize(
    ("kind", "message"), [("sweeps", Clear(unused_seconds=0)), ("checks", Check())]
)
def test_too_many_sweeps_at_a_time_are_refused(bench: Bench, kind: str, message: Message) -> None:
    """The limit is counted by its name; each request before gets its answer, in its turn."""
    for number in range(MAX_TASKS[kind]):
        assert bench.broker.request(bench.tool, 100 + number, message, bench.now) == []
    error = refusal(bench.broker.request(bench.tool, 8, message, bench.now))
    assert error.code is ErrorCode.LIMIT
    assert bench.broker.state.counts.limits[kind] == 1
    answered = []
    while bench.broker.background.busy:
        answered += [reply.request_id for reply in replies(bench.broker.background.work())]
    assert answered == list(range(100, 100 + MAX_TASKS[kind]))


@pytest.mark.parametrize("policy", ["adaptive", "lru"])
def test_a_reset_is_answered_at_once_and_swept_in_pieces(policy: str) -> None:
    """From the answer on nothing of before is found; what is stored then is, and stays."""
    bench = Bench(chunks=4 * PIECE_SLOTS, policy=policy)
    namespace = bench.namespace()
    bench.namespaces.attach_engine(namespace)
    scheduler = bench.scheduler(namespace)
    table = namespace.table
    keys = [b"%d" % number for number in range(3 * PIECE_SLOTS)]
    bench.store(namespace, keys)
    tables.pin(table, [b"1000"], bench.now, 60.0)
    bench.store(namespace, [b"begun"], finish=False)
    (reply,) = replies(bench.broker.request(scheduler, 8, Reset(), bench.now))
    assert reply.message == ResetDone(dropped=len(keys), deferred=1)  # with the one that was begun
    assert set(table.directory.lookup_many([*keys, b"begun"])) == {LookupResult.MISS}
    assert tables.pin(table, keys, bench.now, 60.0, number=2) == []
    assert table.slots.stats()["ready"] == table.slots.stats()["doomed"] == 1
    table.check_integrity()
    new = [b"new", b"2"]  # one of them under a key that was there before
    bench.store(namespace, new)
    turns = 0
    while bench.broker.background.busy:
        bench.broker.background.work()
        turns += 1
        assert table.directory.lookup_many(new) == [LookupResult.HIT] * 2
        assert isinstance(bench.broker.request(bench.tool, 9, Status(), bench.now)[0], Reply)
        table.check_integrity()
    assert turns >= 3
    assert not table.slots.forgotten
    assert table.slots.stats()["ready"] == 3
    assert table.counts.reset == len(keys)
    assert table.counts.removed == 0
    assert table.loads.unpin(1, OWNER)
    assert table.slots.stats()["doomed"] == 0


def test_an_unknown_namespace_is_named(bench: Bench) -> None:
    """The id that was given, and where to look."""
    for message in (Clear(namespace=b"x" * 16), Clear(unused_seconds=1, namespace=b"x" * 16)):
        reply = bench.ask(message)
        assert isinstance(reply, Error)
        assert reply.code is ErrorCode.BAD_STATE
        assert (b"x" * 16).hex() in reply.text
        assert "kvd namespaces" in reply.text
