"""The scheduler's session and its lookups against a fake daemon."""

import select
from pathlib import Path

import pytest

from kvd_client import Label, LoadTicket, LookupResult, Scheduler, UsageError, Worker, session
from kvd_proto.codec import WIRE
from kvd_proto.messages import (
    MAX_KEYS,
    Detached,
    Error,
    ErrorCode,
    Hello,
    Lookups,
    Message,
    Ping,
    Pong,
    Reset,
    ResetDone,
    Status,
    Step,
)
from tests.client.conftest import frozen
from tests.client.fake_daemon import NUM_SLOTS, SECONDS, FakeDaemon
from tests.waiting import DEADLINE, eventually


def ask_everything(scheduler: Scheduler) -> None:
    """Every call comes to nothing, and to nothing worse."""
    assert scheduler.lookup(b"k") is LookupResult.MISS
    assert scheduler.lookup_many([b"k", b"l"]) == [LookupResult.MISS] * 2
    stored = scheduler.prepare_store([b"k"])
    assert (stored.keys, stored.served, len(stored.slots)) == ((), False, 0)
    loaded = scheduler.prepare_load([b"k", b"l"])
    assert (loaded.keys, loaded.lease, loaded.found.tolist()) == ((), 0, [False, False])
    scheduler.complete_load(loaded)
    scheduler.complete_store([b"k"], success=False)
    scheduler.request_finished([b"k"])
    scheduler.label([b"k"], Label.DONE)
    scheduler.report_missed([b"k"])
    scheduler.give_up([b"k"])
    scheduler.end_step()
    assert scheduler.reserve(1) == 0
    assert not scheduler.take_changes()
    assert not scheduler.reset()
    assert scheduler.status() == {}


def found(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """Attach the engine, and wait until it finds a chunk."""
    daemon.attach()
    eventually(lambda: scheduler.lookup(b"ready") is LookupResult.HIT)


def until(scheduler: Scheduler, *, connected: bool) -> None:
    """Wait until the session has noticed."""
    eventually(lambda: scheduler.connected is connected)


def test_lookup_reads_the_mapped_directory(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """After ATTACHED, lookups answer from shared memory and send nothing."""
    assert not scheduler.attached
    assert scheduler.lookup(b"ready") is LookupResult.MISS
    daemon.attach(scheduler)
    assert scheduler.lookup_many([b"ready", b"writing", b"no"]) == [
        LookupResult.HIT,
        LookupResult.HIT_PENDING,
        LookupResult.MISS,
    ]
    assert (scheduler.num_chunks, scheduler.bytes_per_chunk) == (NUM_SLOTS, 4096)
    by_caller = [type(m) for m in daemon.received if not isinstance(m, Ping)]
    assert by_caller == [Hello, Step]  # the step asks for loans


def test_absent_daemon_is_a_cache_that_misses(runtime_dir: Path) -> None:
    """Without a daemon every call comes to nothing, without waiting for a deadline."""
    with Scheduler(runtime_dir, "engine", deadline=60.0) as scheduler:
        ask_everything(scheduler)
        assert not scheduler.connected
        assert not scheduler.wait_attached(0.01)


def test_frozen_daemon_costs_who_waits_one_deadline(daemon: FakeDaemon, quiet: Scheduler) -> None:
    """After one deadline everything is a miss at once, until the daemon begins a new session."""
    found(daemon, quiet)
    with frozen(daemon, quiet):
        assert quiet.status() == {}
        assert not quiet.connected
        ask_everything(quiet)
    daemon.wait_for(Hello, 2)
    found(daemon, quiet)
    assert len(quiet.prepare_store([b"a", b"b"])) == 2


def test_a_reset_that_is_not_answered_in_time_is_asked_once(
    daemon: FakeDaemon, quiet: Scheduler
) -> None:
    """Nothing is found until the daemon has answered, late as it may be; then it is over."""
    found(daemon, quiet)
    with frozen(daemon, quiet):
        assert not quiet.reset(0.01)
        assert quiet.lookup(b"ready") is LookupResult.MISS
        assert not quiet.prepare_load([b"ready"]).keys
        assert not quiet.prepare_store([b"k"]).served
    eventually(lambda: quiet.lookup(b"ready") is LookupResult.HIT)
    assert len(daemon.wait_for(Reset)) == 1


def test_a_reset_during_another_one_is_made_after_it(daemon: FakeDaemon, quiet: Scheduler) -> None:
    """The answer to an earlier one does not count: what was stored meanwhile goes, too."""
    found(daemon, quiet)
    with frozen(daemon, quiet):
        assert not quiet.reset(0.01)
        eventually(lambda: quiet._connection and quiet._connection._awaited)
        assert not quiet.reset(0.01)
    eventually(lambda: quiet.lookup(b"ready") is LookupResult.HIT)
    assert len(daemon.wait_for(Reset)) == 2


def test_a_reset_without_a_daemon_is_told_to_the_next_one(runtime_dir: Path) -> None:
    """What it has kept is not found before it has answered."""
    with Scheduler(runtime_dir, "engine", deadline=DEADLINE) as scheduler:
        assert not scheduler.reset()
        with FakeDaemon(runtime_dir) as daemon:
            meanwhile: list[LookupResult | bool] = []

            def answer(_: Message) -> Message:
                meanwhile.extend((scheduler.attached, scheduler.lookup(b"ready")))
                return ResetDone(dropped=0, deferred=0)

            daemon.replies[Reset] = answer
            daemon.wait_for(Hello)
            daemon.attach()
            eventually(lambda: scheduler.lookup(b"ready") is LookupResult.HIT)
            assert len(daemon.wait_for(Reset)) == 1
            assert meanwhile == [True, LookupResult.MISS]


def test_daemon_frozen_before_the_handshake(daemon: FakeDaemon) -> None:
    """A daemon that accepts and never greets holds the constructor up for one deadline at most."""
    daemon.freeze()
    with Scheduler(daemon.runtime_dir, "engine", deadline=0.1) as scheduler:
        ask_everything(scheduler)
        daemon.thaw()
        until(scheduler, connected=True)


def test_a_session_that_the_daemon_ends_connects_again(
    daemon: FakeDaemon, scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the daemon's reason."""
    daemon.notify(Error(code=ErrorCode.LIMIT, text="others want its place"))
    daemon.wait_for(Hello, 2)
    until(scheduler, connected=True)
    assert "others want its place" in caplog.text
    assert scheduler.status()


def test_refusal_comes_to_nothing(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """A refused request comes to nothing, and the session goes on."""
    good = daemon.replies[Status]
    daemon.replies[Status] = lambda _: Error(code=ErrorCode.INTERNAL, text="no")
    assert scheduler.status() == {}
    daemon.replies[Status] = good
    assert scheduler.status()
    assert len(daemon.wait_for(Hello)) == 1


@pytest.mark.parametrize(
    "frame", [b"", b"nothing", WIRE.encode(Pong(pid=1), 12345)], ids=["kind", "bytes", "request"]
)
def test_nonsense_from_the_daemon_ends_the_session(
    daemon: FakeDaemon, scheduler: Scheduler, frame: bytes
) -> None:
    """A reply of the wrong type, to no request, or that cannot be read; the engine goes on."""

    def answer(_: Message) -> Message | None:
        if not frame:
            return Ping()
        daemon.send(frame)
        return None

    daemon.replies[Status] = answer
    assert scheduler.status() == {}
    daemon.wait_for(Hello, 2)


def test_wrong_arguments_raise(scheduler: Scheduler, runtime_dir: Path) -> None:
    """The error says what is possible."""
    with pytest.raises(UsageError, match="49 bytes"):
        scheduler.lookup(b"x" * 49)
    with pytest.raises(UsageError, match="keys in one call"):
        scheduler.request_promotion([b"k"] * (MAX_KEYS + 1))
    with pytest.raises(UsageError, match=r"found=2: .* 0 to 1"):
        scheduler.count_tokens(1, 2)
    with pytest.raises(UsageError, match="shorter"):
        Scheduler(runtime_dir / ("x" * 100), "e")


def test_closed_raises(scheduler: Scheduler) -> None:
    """A closed scheduler says so, and may be closed again."""
    scheduler.close()
    scheduler.close()
    for call in (
        lambda: scheduler.lookup(b"k"),
        lambda: scheduler.prepare_store([b"k"]),
        lambda: scheduler.complete_load(LoadTicket()),
        scheduler.status,
    ):
        with pytest.raises(UsageError, match="closed"):
            call()


# ------------------------------------- what an event loop is told: every change, and none too early


def wait_for_news(scheduler: Scheduler) -> None:
    """As an event loop does, which looks at nothing before it is told."""
    assert select.select([scheduler], [], [], SECONDS)[0]
    assert scheduler.take_ready()


def test_news_come_with_what_they_tell_of(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """Who was told of an attachment finds what is there, and of its end, nothing."""
    scheduler.fileno()
    scheduler.take_ready()  # what has happened until now
    for _ in range(10):
        daemon.attach()
        wait_for_news(scheduler)
        assert scheduler.lookup(b"ready") is LookupResult.HIT
        daemon.notify(Detached(reason="rank 0 is gone"))
        wait_for_news(scheduler)
        assert scheduler.lookup(b"ready") is LookupResult.MISS


def test_cached_blocks_are_those_that_are_there(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """First block and count of a READY chunk; nothing of others, nor before and after ATTACHED."""
    assert scheduler.cached_blocks(b"ready") is None
    daemon.attach(scheduler)
    daemon.call(lambda: daemon.make_ready(b"partial", 1, 1))
    assert scheduler.cached_blocks(b"partial") == (1, 1)
    assert [scheduler.cached_blocks(key) for key in (b"writing", b"no")] == [None, None]
    with pytest.raises(UsageError, match="key"):
        scheduler.cached_blocks(b"")
    daemon.notify(Detached(reason="rank 0 is gone"))
    eventually(lambda: scheduler.cached_blocks(b"partial") is None)


# --------------- what the daemon is told of lookups: totals of the session, nothing twice


@pytest.fixture
def told_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions tell when they are closed and not before, and wait for the answer."""
    monkeypatch.setattr(session, "REPORT_SECONDS", 3600.0)
    monkeypatch.setattr(session, "LAST_REPORT_SECONDS", DEADLINE)


def last_told(daemon: FakeDaemon) -> Lookups | None:
    """What the daemon was told last."""
    return daemon.wait_for(Ping)[-1].lookups


@pytest.mark.usefixtures("told_at_the_end")
def test_a_session_tells_before_it_leaves(
    daemon: FakeDaemon, scheduler: Scheduler, worker: Worker
) -> None:
    """The last lookups are told by `close`; without any, as in a worker, there is nothing to."""
    worker.close()
    with Scheduler(daemon.runtime_dir, "idle", deadline=DEADLINE):
        pass
    scheduler.lookup(b"no")
    scheduler.close()
    (ping,) = daemon.wait_for(Ping)
    assert ping.lookups == Lookups(chunks=1, hit_chunks=0)


@pytest.mark.usefixtures("told_at_the_end")
def test_tokens_asked_for_without_a_daemon_are_told_to_the_next_one(
    daemon: FakeDaemon,
) -> None:
    """Each once, as part of all tokens; of the others only those of its own session."""
    with Scheduler(
        daemon.runtime_dir, "engine", deadline=DEADLINE, counts_tokens=True
    ) as scheduler:
        daemon.attach(scheduler)
        scheduler.count_tokens(100, 48)
        daemon.kill()
        until(scheduler, connected=False)
        scheduler.count_tokens(20, 0)
        with FakeDaemon(daemon.runtime_dir) as other:
            until(scheduler, connected=True)
            other.attach(scheduler)
            scheduler.count_tokens(7, 0)
            scheduler.close()
            told = Lookups(chunks=0, hit_chunks=0, tokens=27, hit_tokens=0, detached_tokens=20)
            assert last_told(other) == told
