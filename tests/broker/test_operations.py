"""What operators' requests decide, what goes on in pieces or to a deadline, and reloading."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.broker.broker import Broker
from kvd.broker.effects import LogEvent, ToLane
from kvd.broker.operations import apply_live_settings
from kvd.broker.sessions import Session
from kvd.broker.state import MAX_TASKS
from kvd.cache.chunks import PIECE_SLOTS
from kvd.cache.namespaces import Namespace, Namespaces
from kvd.client_names import Peer
from kvd.config.settings import SETTINGS, Settings
from kvd.config.sources import LoadedSettings
from kvd.errors import ConfigError
from kvd.wire.link import LaneLog
from kvd_proto.directory import LookupResult
from kvd_proto.messages import (
    Check,
    Clear,
    Cleared,
    ConfigReloaded,
    ConfigShown,
    Drain,
    Drained,
    Error,
    ErrorCode,
    Explain,
    Kind,
    Message,
    ReloadConfig,
    Reset,
    ResetDone,
    Resume,
    Resumed,
    ShowConfig,
    Status,
    StatusReport,
)
from tests.broker.benches import Bench, pin
from tests.broker.brokers import PAGE, join, make_broker, refusal, replies
from tests.cache import tables

OWNER = 1
PEER = Peer(pid=4211, uid=5, gid=5)


class Operator:
    """A broker without lanes, a tool that asks it, and namespaces without engines."""

    def __init__(self, chunks: int = 64, policy: str = "lru") -> None:
        self.now = 100.0
        self.broker = make_broker(chunks * PAGE, devices=[], policy=policy)
        self.events: list[str] = []
        self.tool = join(self.broker, "tool", peer=PEER)

    @property
    def namespaces(self) -> Namespaces:
        """All of the pool."""
        assert self.broker.state.namespaces is not None
        return self.broker.state.namespaces

    def namespace(self, number: int = 1) -> Namespace:
        """An open namespace of chunks of one page."""
        return self.namespaces.open(bytes([number]) * 16, (PAGE,), world_size=1, replicated=False)

    def store(self, namespace: Namespace, keys: list[bytes], *, finish: bool = True) -> None:
        """Chunks in the namespace, READY or still being written."""
        begun = tables.begin(namespace.table, keys, self.now, owner=OWNER)
        assert len(begun.slots) == len(keys)
        if finish:
            tables.finish(namespace.table, begun)

    def ask(self, message: Message, session: Session | None = None) -> Message:
        """The one reply; events are noted."""
        effects = self.broker.request(session or self.tool, 7, message, self.now)
        while self.broker.background.busy:
            effects += self.broker.background.work()
            self.broker.state.check_integrity()
        self.events += [effect.text for effect in effects if isinstance(effect, LogEvent)]
        (reply,) = replies(effects)
        return reply.message

    def report(self) -> dict[str, Any]:
        """The status."""
        reply = self.ask(Status())
        assert isinstance(reply, StatusReport)
        return reply.status


@pytest.fixture
def operator() -> Operator:
    """One whose broker is ready."""
    return Operator()


@pytest.mark.parametrize(
    "message",
    [
        *(Drain(), Resume(), Clear(), Clear(unused_seconds=0), Check(), Explain(key=b"key")),
        *(ReloadConfig(), ShowConfig()),
    ],
    ids=lambda message: type(message).__name__,
)
@pytest.mark.parametrize("kind", ["scheduler", "worker"])
def test_only_tools_may(operator: Operator, kind: Kind, message: Message) -> None:
    """An engine's session is refused by name of the request, and nothing changes."""
    reply = operator.ask(message, join(operator.broker, kind))
    assert isinstance(reply, Error)
    assert reply.code is ErrorCode.BAD_STATE
    assert f"{type(message).__name__} is for sessions of kind tool" in reply.text
    assert operator.broker.state.drain is None
    assert operator.events == []


def test_a_drain_lasts_until_it_is_resumed(operator: Operator) -> None:
    """The daemon is not ready and says who drained it first; a second order changes nothing."""
    for _ in range(2):
        assert operator.ask(Drain()) == Drained(stores=0, leases=0)
        operator.now += 5
    report = operator.report()
    assert not report["ready"]
    assert report["checks"][-1]["text"] == "drained by uid 5 pid 4211; kvd resume undoes that"
    assert (report["drain"]["pid"], report["drain"]["seconds"]) == (4211, 10.0)
    operator.now += 80
    assert operator.ask(Resume()) == Resumed(was_draining=True)
    assert operator.report()["ready"]
    assert operator.ask(Resume()) == Resumed(was_draining=False)
    assert operator.events == [
        "drained by uid 5 pid 4211: no new stores until resumed",
        "resumed by uid 5 pid 4211 after 1 m 30 s of drain",
    ]


def test_a_drain_ends_loans_and_lends_none() -> None:
    """Until it is undone; keys that were given such slots are lost."""
    bench = Bench()
    refs, _ = bench.step(wanted=8)
    tool = join(bench.broker, "tool", "t")
    bench.broker.request(tool, 2, Drain(), 0.0)
    assert not bench.table.slots.loans
    bench.begin([b"a"], refs[:1])
    assert bench.table.counts.stores_lost == 1
    assert bench.step(wanted=8)[0] == []
    bench.broker.request(tool, 2, Resume(), 0.0)
    assert len(bench.step(wanted=8)[0]) == 8


def test_resume_does_not_undo_sigterm(operator: Operator) -> None:
    """A daemon that stops refuses both, and goes on stopping."""
    operator.broker.stop()
    for message in (Drain(), Resume()):
        reply = operator.ask(message)
        assert isinstance(reply, Error)
        assert reply.code is ErrorCode.DRAINING
        assert "stopping" in reply.text
    assert operator.broker.state.draining
    assert operator.report()["checks"][-1]["text"] == "stopping"


def test_a_load_that_never_ends_pins_no_longer_than_a_lease() -> None:
    """However long the engine asks for: afterwards its chunks are hits that may be evicted."""
    bench = Bench()
    bench.step(pins=(pin(1, bench.store(b"a"), lease_ms=600_000),))
    for seconds, pinned in ((59, 1), (60, 0)):
        bench.broker.tick(bench.now + seconds)
        assert bench.table.slots.stats()["pinned"] == pinned
    assert bench.table.directory.lookup(b"a") is LookupResult.HIT


def test_clear_drops_everything(operator: Operator) -> None:
    """READY chunks go, stores under way are given up, pinned ones go with their lease."""
    one, two = operator.namespace(1), operator.namespace(2)
    operator.namespaces.attach_engine(one)
    operator.store(one, [b"a", b"b", b"c"])
    operator.store(one, [b"d"], finish=False)
    operator.store(two, [b"e"])
    tables.pin(one.table, [b"a", b"b"], operator.now, 60.0)
    assert operator.ask(Clear()) == Cleared(chunks=3, bytes=3 * PAGE, deferred=2)
    assert all(one.directory.find(key) < 0 for key in (b"a", b"b", b"c", b"d"))
    assert one.table.slots.stats()["doomed"] == 2
    one.table.loads.unpin(1, OWNER)
    assert set(one.table.slots.stats().values()) == {0}
    assert [space.id for space in operator.namespaces] == [one.id]  # the other one is not in use
    assert one.table.counts.removed == 3
    assert operator.events[-1] == (
        "all open namespaces cleared by uid 5 pid 4211: 3 chunks dropped, 12 KiB;"
        " 2 more go when their leases end"
    )


def test_evict_drops_what_was_not_used_for_so_long(operator: Operator) -> None:
    """Of one namespace or of all; what is younger stays."""
    one, two = operator.namespace(1), operator.namespace(2)
    for namespace in (one, two):
        operator.store(namespace, [b"old"])
    operator.now += 40
    operator.broker.tick(operator.now)
    operator.store(one, [b"new"])
    evict = Clear(unused_seconds=30.0, namespace=one.id)
    assert operator.ask(evict) == Cleared(chunks=1, bytes=PAGE, deferred=0)
    assert operator.ask(evict) == Cleared(chunks=0, bytes=0, deferred=0)
    operator.now += 40
    assert operator.ask(Clear(unused_seconds=30.0)) == Cleared(chunks=2, bytes=8192, deferred=0)
    assert "not used for 30 s by uid 5 pid 4211: 1 chunks dropped" in operator.events[0]


def test_a_namespace_that_is_closed_under_a_sweep_ends_it(operator: Operator) -> None:
    """What is gone need not be dropped; the reply comes all the same."""
    namespace = operator.namespace()
    operator.store(namespace, [b"a"])
    operator.broker.request(operator.tool, 8, Clear(unused_seconds=0), operator.now)
    operator.namespaces.close(namespace)
    effects = operator.broker.background.work() + operator.broker.background.work()
    assert [e.message for e in replies(effects)] == [Cleared(chunks=0, bytes=0, deferred=0)]


@pytest.mark.parametrize(
    ("kind", "message"), [("sweeps", Clear(unused_seconds=0)), ("checks", Check())]
)
def test_too_many_sweeps_at_a_time_are_refused(
    operator: Operator, kind: str, message: Message
) -> None:
    """The limit is counted by its name; each request before gets its answer, in its turn."""
    for number in range(MAX_TASKS[kind]):
        assert operator.broker.request(operator.tool, 100 + number, message, operator.now) == []
    error = refusal(operator.broker.request(operator.tool, 8, message, operator.now))
    assert error.code is ErrorCode.LIMIT
    assert operator.broker.state.counts.limits[kind] == 1
    answered = []
    while operator.broker.background.busy:
        answered += [reply.request_id for reply in replies(operator.broker.background.work())]
    assert answered == list(range(100, 100 + MAX_TASKS[kind]))


@pytest.mark.parametrize("policy", ["adaptive", "lru"])
def test_a_reset_is_answered_at_once_and_swept_in_pieces(policy: str) -> None:
    """From the answer on nothing of before is found; what is stored then is, and stays."""
    operator = Operator(chunks=4 * PIECE_SLOTS, policy=policy)
    namespace = operator.namespace()
    operator.namespaces.attach_engine(namespace)
    scheduler = join(operator.broker, "scheduler")
    assert scheduler.engine is not None
    scheduler.engine.namespace = namespace
    table = namespace.table
    keys = [b"%d" % number for number in range(3 * PIECE_SLOTS)]
    operator.store(namespace, keys)
    tables.pin(table, [b"1000"], operator.now, 60.0)
    operator.store(namespace, [b"begun"], finish=False)
    (reply,) = replies(operator.broker.request(scheduler, 8, Reset(), operator.now))
    assert reply.message == ResetDone(dropped=len(keys), deferred=1)  # with the one that was begun
    assert set(table.directory.lookup_many([*keys, b"begun"])) == {LookupResult.MISS}
    assert tables.pin(table, keys, operator.now, 60.0, number=2) == []
    assert table.slots.stats()["ready"] == table.slots.stats()["doomed"] == 1
    table.check_integrity()
    new = [b"new", b"2"]  # one of them under a key that was there before
    operator.store(namespace, new)
    turns = 0
    while operator.broker.background.busy:
        operator.broker.background.work()
        turns += 1
        assert table.directory.lookup_many(new) == [LookupResult.HIT] * 2
        assert replies(operator.broker.request(operator.tool, 9, Status(), operator.now))
        table.check_integrity()
    assert turns >= 3
    assert not table.slots.forgotten
    assert table.slots.stats()["ready"] == 3
    assert table.counts.reset == len(keys)
    assert table.counts.removed == 0
    assert table.loads.unpin(1, OWNER)
    assert table.slots.stats()["doomed"] == 0


def test_an_unknown_namespace_is_named(operator: Operator) -> None:
    """The id that was given, and where to look."""
    for message in (Clear(namespace=b"x" * 16), Clear(unused_seconds=1, namespace=b"x" * 16)):
        reply = operator.ask(message)
        assert isinstance(reply, Error)
        assert reply.code is ErrorCode.BAD_STATE
        assert (b"x" * 16).hex() in reply.text
        assert "kvd namespaces" in reply.text


# -------------------------------------------------------------------- reloading

START = Settings(runtime_dir="/nowhere", cpu_bytes=2**20)


def read(**changes: object) -> LoadedSettings:
    """What a reading brings: the settings of the start with these changes."""
    settings = msgspec.structs.replace(START, **changes)
    origins = {key: "kvd.toml:1" if key in changes else "default" for key in SETTINGS}
    return LoadedSettings(settings, origins, Path("kvd.toml"))


@pytest.fixture
def broker() -> Broker:
    """One with a pool and the host's lane."""
    return make_broker(START.cpu_bytes)


def ask_to_reload(broker: Broker) -> int:
    """A tool asks; the number of its session."""
    tool = join(broker, "tool", peer=PEER)
    assert broker.request(tool, 9, ReloadConfig(), 0.0) == []
    return tool.number


def test_what_can_change_live_holds_at_once(broker: Broker) -> None:
    """Times, limits and the log's level reach every part of the daemon that uses them."""
    changed = read(
        lease_seconds=1.0,
        ticket_seconds=2.0,
        max_sessions=3,
        max_sessions_per_user=2,
        log_level="debug",
    )
    ask_to_reload(broker)
    assert broker.reloading.begin()
    effects = broker.reloading.finish(changed)
    assert broker.state.settings == changed.settings
    assert broker.state.registry.max_sessions == 3
    assert broker.state.registry.max_sessions_per_user == 2
    assert ToLane("host", LaneLog(level="debug")) in effects
    (reply,) = replies(effects)
    assert isinstance(reply.message, ConfigReloaded)
    assert all(change.live for change in reply.message.changes)
    (event,) = [effect for effect in effects if isinstance(effect, LogEvent)]
    assert "uid 5 pid 4211" in event.text
    assert "lease_seconds = 1.0 (was 60.0)" in event.text


def test_a_request_during_a_reading_is_answered_from_the_next(broker: Broker) -> None:
    """A reading that began before does not answer it; one that fails changes nothing."""
    first = ask_to_reload(broker)
    assert broker.reloading.begin()
    later = [ask_to_reload(broker), ask_to_reload(broker)]
    assert not broker.reloading.begin()
    effects = broker.reloading.finish(ConfigError("line one\nline two"))
    (reply,) = replies(effects)
    assert reply.session == first
    assert reply.message == Error.of(ErrorCode.BAD_CONFIG, "line one\nline two")
    assert broker.state.settings == START
    assert broker.reloading.begin()
    effects = broker.reloading.finish(read(cpu_bytes="1GiB"))
    assert [reply.session for reply in replies(effects)] == later
    assert broker.state.settings == START  # a new size waits for a restart, and is shown
    assert not broker.reloading.begin()
    (reply,) = replies(broker.request(join(broker, "tool"), 9, ShowConfig(), 0.0))
    assert isinstance(reply.message, ConfigShown)
    shown = reply.message.config["settings"]["cpu_bytes"]
    assert (shown["value"], shown["from"]) == (2**20, "default")
    assert shown["after_restart"] == {"value": "1GiB", "from": "kvd.toml:1"}


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "lease_seconds": st.sampled_from([1.0, 2.0, 60.0]),
                "cpu_bytes": st.sampled_from(["auto", "1GiB", 2**20]),
                "policy": st.sampled_from(["adaptive", "lru"]),
                "max_sessions": st.sampled_from([1, 1024]),
            },
        ),
        max_size=6,
    )
)
def test_after_any_readings_live_settings_are_the_last_and_others_the_first(
    readings: list[dict[str, object]],
) -> None:
    """Live settings follow the file, the others stay, and exactly what differs waits."""
    present = LoadedSettings(START)
    for changes in readings:
        present, _ = apply_live_settings(present, read(**changes))
    last = read(**readings[-1]).settings if readings else START
    for key, known in SETTINGS.items():
        value = getattr(last if known.live else START, key)
        assert getattr(present.settings, key) == value
        assert (key in present.pending_restart) == (getattr(last, key) != value)
