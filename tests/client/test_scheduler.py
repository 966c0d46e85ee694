"""The scheduler's side against a fake daemon."""

import threading
from pathlib import Path

import pytest

from kvd_client import LoadTicket, LookupResult, Scheduler, StoreAnswer, UsageError
from kvd_client.connection import Notice
from kvd_proto.arrays import IntArray
from kvd_proto.messages import (
    CompleteLoad,
    CompleteStore,
    Error,
    ErrorCode,
    Hello,
    Message,
    Ping,
    PrepareLoad,
    PrepareStore,
    RequestFinished,
    Reset,
    ResetDone,
    StorePrepared,
)
from tests.client.conftest import frozen
from tests.client.fake_daemon import SECONDS, FakeDaemon
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
    assert scheduler.complete_store([b"k"]).ready == 0
    assert scheduler.request_finished([b"k"]) == 0
    assert not scheduler.reset()
    assert scheduler.status() == {}


def found(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """Attach the engine, and wait until it finds a chunk."""
    daemon.keys = {b"ready": 2}
    daemon.attach()
    eventually(lambda: scheduler.lookup(b"ready") is LookupResult.HIT)


def until(scheduler: Scheduler, *, connected: bool) -> None:
    """Wait until the session has noticed."""
    eventually(lambda: scheduler.connected is connected)


def test_handshake_says_who_is_there(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """A new scheduler greets with its kind, engine and pid, and is connected at once."""
    assert scheduler.connected
    hello = daemon.wait_for(Hello)[0]
    assert (hello.kind, hello.engine) == ("scheduler", "engine")
    assert "engine" in repr(scheduler)


def test_lookup_reads_the_mapped_directory(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """After ATTACHED, lookups answer from shared memory and send nothing."""
    daemon.keys = {b"ready": 2, b"writing": 1}
    assert not scheduler.attached
    assert scheduler.lookup(b"ready") is LookupResult.MISS
    daemon.attach()
    assert scheduler.wait_attached(SECONDS)
    assert scheduler.lookup_many([b"ready", b"writing", b"no"]) == [
        LookupResult.HIT,
        LookupResult.HIT_PENDING,
        LookupResult.MISS,
    ]
    assert (scheduler.num_chunks, scheduler.bytes_per_chunk) == (8, 4096)
    by_caller = [type(m) for m in daemon.received if not isinstance(m, Ping)]
    assert by_caller == [Hello]


def test_store_ticket_pairs_keys_and_slots(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """Only accepted keys are on the ticket; every key has its answer."""
    daemon.replies[PrepareStore] = lambda _: StorePrepared(
        answers=IntArray.of([StoreAnswer.PRESENT, StoreAnswer.ACCEPTED, StoreAnswer.FULL], "u1"),
        slots=IntArray.of([3], "u4"),
        generations=IntArray.of([9], "u8"),
        evicted=(b"gone",),
    )
    ticket = scheduler.prepare_store([b"a", b"b", b"c"])
    assert ticket.keys == (b"b",)
    assert (ticket.slots.tolist(), ticket.generations.tolist()) == ([3], [9])
    assert ticket.answers == (StoreAnswer.PRESENT, StoreAnswer.ACCEPTED, StoreAnswer.FULL)
    assert ticket.evicted == (b"gone",)
    summary = scheduler.complete_store(ticket.keys, success=False)
    assert (summary.ready, summary.pending, summary.dropped) == (1, 2, 3)
    complete = daemon.wait_for(CompleteStore)[0]
    assert (complete.keys, complete.success) == ((b"b",), False)


def test_load_ticket_holds_a_lease(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """The found keys are on the ticket, and completing it gives the lease back."""
    ticket = scheduler.prepare_load([b"a", b"b", b"c"], lease_seconds=2.5)
    assert ticket.keys == (b"a", b"c")
    assert ticket.found.tolist() == [True, False, True]
    assert (ticket.lease, ticket.lease_seconds, len(ticket)) == (7, 2.5, 2)
    scheduler.complete_load(ticket)
    assert daemon.wait_for(CompleteLoad)[0].lease == 7


def test_small_requests(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """The end of a request, reset and status return what the daemon says."""
    daemon.attach()
    assert scheduler.wait_attached(SECONDS)
    assert scheduler.request_finished([b"a", b"b"]) == 2
    assert scheduler.reset() == ResetDone(dropped=4, deferred=1)
    assert scheduler.status() == {"ready": True}


def test_absent_daemon_is_a_cache_that_misses(runtime_dir: Path) -> None:
    """Without a daemon every call comes to nothing, without waiting for a deadline."""
    with Scheduler(runtime_dir, "engine", deadline=60.0) as scheduler:
        ask_everything(scheduler)
        assert not scheduler.connected
        assert not scheduler.wait_attached(0.01)


def test_restarted_daemon_is_found_again(runtime_dir: Path) -> None:
    """After the daemon's death there are misses, and hits again with its successor."""
    with FakeDaemon(runtime_dir) as first:
        scheduler = Scheduler(runtime_dir, "engine", deadline=60.0)
        found(first, scheduler)
    with scheduler:
        until(scheduler, connected=False)
        ask_everything(scheduler)
        with FakeDaemon(runtime_dir) as second:
            second.wait_for(Hello)
            found(second, scheduler)  # and it was asked for the reset that no daemon had answered
            assert len(scheduler.prepare_store([b"x"])) == 1


def test_death_ends_a_pending_request(daemon: FakeDaemon) -> None:
    """A request whose daemon dies ends then, not at its deadline."""
    daemon.replies[PrepareStore] = lambda _: None
    with Scheduler(daemon.runtime_dir, "engine", deadline=3600.0) as scheduler:

        def die() -> None:
            daemon.wait_for(PrepareStore)
            daemon.kill()

        dying = threading.Thread(target=die)
        dying.start()
        assert not scheduler.prepare_store([b"k"]).served
        dying.join()


def test_frozen_daemon_costs_one_deadline(daemon: FakeDaemon, quiet: Scheduler) -> None:
    """After one deadline everything is a miss at once, until the daemon begins a new session."""
    found(daemon, quiet)
    ticket = quiet.prepare_load([b"ready"])
    assert ticket.lease
    with frozen(daemon, quiet):
        assert not quiet.prepare_store([b"k"]).served
        assert not quiet.connected
        ask_everything(quiet)
        quiet.complete_load(ticket)
    daemon.wait_for(Hello, 2)
    found(daemon, quiet)
    assert len(quiet.prepare_store([b"a", b"b"])) == 2
    # With the session before the daemon has dropped what it had granted.
    assert not [m for m in daemon.received if isinstance(m, (CompleteStore, CompleteLoad))]


def test_what_is_completed_beside_another_request_is_told_after_it(
    daemon: FakeDaemon, scheduler: Scheduler
) -> None:
    """Whoever completes something need not wait for other requests."""
    ticket = scheduler.prepare_load([b"k"])
    with scheduler._lock:  # a request is under way
        scheduler.complete_load(ticket)
        scheduler.complete_store([b"failed"], success=False)
    assert daemon.wait_for(CompleteLoad)[0].lease == ticket.lease
    assert daemon.wait_for(CompleteStore)[0].keys == (b"failed",)


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
        eventually(quiet._lock.locked)
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
            daemon.keys = {b"ready": 2}
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


@pytest.mark.parametrize("code", [ErrorCode.STALE_BOOT, ErrorCode.BAD_SESSION])
def test_stale_session_connects_again(
    daemon: FakeDaemon, scheduler: Scheduler, code: ErrorCode
) -> None:
    """A daemon that does not know the session gets a new one by itself."""
    good = daemon.replies[RequestFinished]
    daemon.replies[RequestFinished] = lambda _: Error(code=code, text="who?")
    assert scheduler.request_finished([b"k"]) == 0
    daemon.replies[RequestFinished] = good
    daemon.wait_for(Hello, 2)
    until(scheduler, connected=True)
    assert scheduler.request_finished([b"k"]) == 1


@pytest.mark.parametrize("code", [ErrorCode.NOT_READY, ErrorCode.LIMIT, ErrorCode.INTERNAL])
def test_refusal_is_a_miss(daemon: FakeDaemon, scheduler: Scheduler, code: ErrorCode) -> None:
    """A refused request comes to nothing, and the session goes on."""
    daemon.replies[PrepareLoad] = lambda _: Error(code=code, text="no")
    assert scheduler.prepare_load([b"k"]).keys == ()
    assert scheduler.request_finished([b"k"]) == 1


def nonsense_answers() -> StorePrepared:
    """An answer of one key's length that names no answer."""
    return StorePrepared(
        answers=IntArray.of([99], "u1"),
        slots=IntArray.of([], "u4"),
        generations=IntArray.of([], "u8"),
        evicted=(),
    )


@pytest.mark.parametrize("reply", [nonsense_answers(), Ping()], ids=["contradiction", "type"])
def test_nonsense_from_the_daemon_is_a_miss(
    daemon: FakeDaemon, scheduler: Scheduler, reply: Message
) -> None:
    """A reply that contradicts itself or is of the wrong type ends the session, not the engine."""
    daemon.replies[PrepareStore] = lambda _: reply
    assert not scheduler.prepare_store([b"k"]).served
    daemon.wait_for(Hello, 2)


def test_wrong_arguments_raise(scheduler: Scheduler, runtime_dir: Path) -> None:
    """The error says what is possible."""
    with pytest.raises(UsageError, match="49 bytes"):
        scheduler.lookup(b"x" * 49)
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
    assert "closed" in repr(scheduler)


def test_calls_from_many_threads(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """Concurrent calls each get their own reply."""
    wrong: list[int] = []

    def work(count: int) -> None:
        keys = [b"%d" % i for i in range(count)]
        wrong.extend(count for _ in range(30) if len(scheduler.prepare_store(keys)) != count)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(daemon.wait_for(PrepareStore, 120)) == 120


def test_an_attachment_that_comes_with_the_end_of_its_session_is_forgotten(
    daemon: FakeDaemon, quiet: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller may give the connection up while its thread handles what came over it."""
    found(daemon, quiet)
    handle = quiet._on_notice

    def given_up_meanwhile(notice: Notice) -> None:
        quiet._give_up(quiet._connection, "a caller was tired of it")
        handle(notice)

    monkeypatch.setattr(quiet, "_on_notice", given_up_meanwhile)
    daemon.attach()
    daemon.wait_for(Hello, 2)
    eventually(lambda: not quiet.attached)
    assert quiet.lookup(b"ready") is LookupResult.MISS
