"""The scheduler's session, its lookups, and chunks in tiers below memory."""

import random
import select
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvd.cache.tier_table import TierTable
from kvd_client import (
    NO_TIER,
    TIER_UNKNOWN,
    Label,
    LookupResult,
    Scheduler,
    TierInfo,
    UsageError,
    Worker,
    session,
)
from kvd_client.decisions import REREQUEST_SECONDS
from kvd_proto.codec import WIRE
from kvd_proto.directory import SlotState
from kvd_proto.messages import (
    MAX_KEY_BYTES,
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
from tests.client.fake_daemon import NUM_SLOTS, SECONDS, USABLE, FakeDaemon
from tests.client.test_steps import steps, wait_steps
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


CRC_POLYNOMIAL = 0x1_DB71_0641  # keys that differ by it have one hash


def twin(key: bytes) -> bytes:
    """Another key of the same hash."""
    changed = int.from_bytes(key, "little") ^ CRC_POLYNOMIAL << 8
    return changed.to_bytes(len(key), "little")


def test_a_hit_found_the_short_way_is_one_the_general_way(
    daemon: FakeDaemon, scheduler: Scheduler
) -> None:
    """Whatever keys, partial chunks, resets and garbled entries the directory has."""
    daemon.attach(scheduler)
    directory, source = daemon.directory, random.Random(0)
    assert directory is not None
    lengths = (6, 8, 36, 47, MAX_KEY_BYTES)
    keys = [bytes([number]) * length for number in range(4) for length in lengths]
    keys += [*map(twin, keys), bytes.fromhex("9d0ad96d")]  # whose hash is 0, as an empty entry's
    seen: Counter[LookupResult] = Counter()

    def compare() -> None:
        expected = [directory.lookup(key) for key in keys]
        assert [scheduler.lookup(key) for key in keys] == expected
        assert scheduler.lookup_many(keys) == expected
        for key in keys:
            assert scheduler.lookup(key, 1) is directory.lookup(key, 1)
        seen.update(expected)

    for _ in range(400):
        key, blocks = source.choice(keys), source.choice([(0, 2), (0, 2), (0, 1), (1, 1)])
        slot = directory.find(key)
        if slot < 0:
            directory.place(key, daemon.free()[-1], 1)
            if source.random() < 0.8:
                daemon.make_ready(key, *blocks)
        elif directory.state(slot) == SlotState.READY:
            directory.free([slot])
        else:
            daemon.make_ready(key, *blocks)
        if source.random() < 0.02:
            for other in keys:
                if directory.lookup(other) is LookupResult.HIT_PENDING:
                    daemon.make_ready(other)
            directory.forget()
            compare()
            directory.free(directory.indexed_slots())
        compare()
    assert len(seen) == len(LookupResult)
    index = directory.header.index_offset
    memory = memoryview(directory._memory)
    for slot_after in (2**32 - 1, NUM_SLOTS + 1, 0, 100):
        for at in range(index, directory.header.changes_offset, 8):
            if any(memory[at : at + 8]):
                memory[at : at + 4] = slot_after.to_bytes(4, "little")
        compare()
    memory[index : directory.header.changes_offset] = bytes([1]) * (
        8 * directory.header.index_capacity
    )
    compare()  # no entry is empty, and none has the hash


def test_without_a_daemon_that_greets_every_lookup_misses(runtime_dir: Path) -> None:
    """One that accepts and never greets holds the constructor up for one deadline at most."""
    with Scheduler(runtime_dir, "engine", deadline=60.0) as scheduler:
        ask_everything(scheduler)
        assert not scheduler.connected
        assert not scheduler.wait_attached(0.01)
    with FakeDaemon(runtime_dir) as daemon:
        daemon.freeze()
        with Scheduler(runtime_dir, "engine", deadline=0.1) as scheduler:
            ask_everything(scheduler)
            daemon.thaw()
            eventually(lambda: scheduler.connected)


def test_frozen_daemon_costs_who_waits_one_deadline(daemon: FakeDaemon, quiet: Scheduler) -> None:
    """After one deadline everything is a miss at once, until the daemon begins a new session."""
    daemon.attach(quiet)
    with frozen(daemon, quiet):
        assert quiet.status() == {}
        assert not quiet.connected
        ask_everything(quiet)
    daemon.wait_for(Hello, 2)
    daemon.attach(quiet)
    eventually(lambda: quiet.lookup(b"ready") is LookupResult.HIT)  # once a reset has its answer
    assert len(quiet.prepare_store([b"a", b"b"])) == 2


def test_a_reset_without_an_answer_is_sent_once(daemon: FakeDaemon, quiet: Scheduler) -> None:
    """Nothing is found until the daemon has answered, late as it may be; then it is over."""
    daemon.attach(quiet)
    with frozen(daemon, quiet):
        assert not quiet.reset(0.01)
        assert quiet.lookup(b"ready") is LookupResult.MISS
        assert not quiet.prepare_load([b"ready"]).keys
        assert not quiet.prepare_store([b"k"]).served
    eventually(lambda: quiet.lookup(b"ready") is LookupResult.HIT)
    assert len(daemon.wait_for(Reset)) == 1


def test_a_reset_during_another_one_is_made_after_it(daemon: FakeDaemon, quiet: Scheduler) -> None:
    """The answer to an earlier one does not count: what was stored meanwhile goes, too."""
    daemon.attach(quiet)
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


def test_refusal_comes_to_nothing(
    daemon: FakeDaemon, scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """The session goes on after a refused request; after one that the daemon ends comes another."""
    good = daemon.replies[Status]
    daemon.replies[Status] = lambda _: Error(code=ErrorCode.INTERNAL, text="no")
    assert scheduler.status() == {}
    daemon.replies[Status] = good
    assert scheduler.status()
    assert len(daemon.wait_for(Hello)) == 1
    daemon.notify(Error(code=ErrorCode.LIMIT, text="others want its place"))
    daemon.wait_for(Hello, 2)
    eventually(lambda: scheduler.connected)
    assert "others want its place" in caplog.text
    assert scheduler.status()


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


def test_arguments_above_their_bounds_are_refused(scheduler: Scheduler, runtime_dir: Path) -> None:
    """The error says what is possible."""
    with pytest.raises(UsageError, match="keys in one call"):
        scheduler.request_promotion([b"k"] * (MAX_KEYS + 1))
    with pytest.raises(UsageError, match=r"found=2: .* 0 to 1"):
        scheduler.count_tokens(1, 2)
    with pytest.raises(UsageError, match="shorter"):
        Scheduler(runtime_dir / ("x" * 100), "e")


def test_an_event_loop_hears_of_changes(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """Who was told of an attachment finds what is there, and of its end, nothing."""
    scheduler.fileno()
    scheduler.take_ready()  # what has happened until now
    for _ in range(10):
        for result in (LookupResult.HIT, LookupResult.MISS):
            if result is LookupResult.HIT:
                daemon.attach()
            else:
                daemon.notify(Detached(reason="rank 0 is gone"))
            assert select.select([scheduler], [], [], SECONDS)[0]
            assert scheduler.take_ready()
            assert scheduler.lookup(b"ready") is result


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


@pytest.mark.usefixtures("told_at_the_end")
def test_lookups_are_reported_at_the_end(
    daemon: FakeDaemon, scheduler: Scheduler, worker: Worker
) -> None:
    """The last lookups are told by `close`; without any, as in a worker, there is nothing to."""
    worker.close()
    with Scheduler(daemon.runtime_dir, "idle", deadline=DEADLINE):
        pass
    daemon.attach(scheduler)
    assert scheduler.lookup_many([b"ready", b"ready", b"no"]).count(LookupResult.HIT) == 2
    assert scheduler.lookup(b"ready", 1) is LookupResult.HIT
    scheduler.close()
    (ping,) = daemon.wait_for(Ping)
    assert ping.lookups == Lookups(chunks=4, hit_chunks=3)


@pytest.mark.usefixtures("told_at_the_end")
def test_tokens_without_a_daemon_are_reported(
    daemon: FakeDaemon,
) -> None:
    """Each once, as part of all tokens; of the others only those of its own session."""
    with Scheduler(
        daemon.runtime_dir, "engine", deadline=DEADLINE, counts_tokens=True
    ) as scheduler:
        daemon.attach(scheduler)
        scheduler.count_tokens(100, 48)
        daemon.kill()
        eventually(lambda: not scheduler.connected)
        scheduler.count_tokens(20, 0)
        with FakeDaemon(daemon.runtime_dir) as other:
            eventually(lambda: scheduler.connected)
            other.attach(scheduler)
            scheduler.count_tokens(7, 0)
            scheduler.close()
            last = Lookups(chunks=0, hit_chunks=0, tokens=27, hit_tokens=0, detached_tokens=20)
            assert other.wait_for(Ping)[-1].lookups == last


DISK = TierInfo(name="disk", medium="disk", shared=False)
SHARED = TierInfo(name="mooncake", medium="remote", shared=True)


@pytest.fixture
def table(daemon: FakeDaemon, stepping: Scheduler) -> TierTable:
    """What the daemon's two tiers hold, the second one shared; the scheduler is attached."""
    daemon.tiers = (DISK, SHARED)
    daemon.attach(stepping)
    assert daemon.directory is not None
    assert daemon.directory.tiers is not None
    return daemon.directory.tiers


def set_usable(table: TierTable, tier: int, usable: bool) -> None:
    """Set whether a tier is."""
    table.set_health(tier, USABLE._replace(usable=usable))


def test_the_first_usable_tier_that_has_all_blocks_is_named(
    table: TierTable, daemon: FakeDaemon, stepping: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk at a window's edge has only some; without a count all of the rest are needed."""
    monkeypatch.setattr("kvd_proto.tier_table.ABSENT_MS", 3_600_000)
    for key, tier, first, count in (
        *((b"both", 0, 0, 2), (b"both", 1, 0, 2), (b"only disk", 0, 0, 2)),
        *((b"edge", 0, 1, 1), (b"head", 0, 0, 1), (b"ready in part", 0, 0, 2)),
    ):
        table.hold(key, tier, first, count, 0)
    find = stepping.find_tier
    assert (find(b"both"), find(b"only disk")) == (0, 0)
    assert find(b"edge") == find(b"head") == find(b"edge", 0, 1) == NO_TIER
    assert find(b"edge", 1) == find(b"edge", 1, 1) == 0
    # The daemon promotes no chunk that is READY, with whatever blocks: a wait would be in vain.
    daemon.make_ready(b"ready in part", 1, 1)
    assert (find(b"ready in part"), find(b"ready in part", 1, 1)) == (NO_TIER, 0)
    # The shared tier may have any chunk of which it has not said lately that it has not.
    assert find(b"k") == TIER_UNKNOWN
    table.mark_absent(b"k", time.monotonic())
    assert (find(b"k"), find(b"other")) == (NO_TIER, TIER_UNKNOWN)
    set_usable(table, 0, usable=False)
    assert (find(b"both"), find(b"only disk")) == (1, NO_TIER)
    set_usable(table, 1, usable=False)
    assert find(b"other") == NO_TIER


def test_without_tiers_nothing_is_sought(daemon: FakeDaemon, stepping: Scheduler) -> None:
    """Nor while the engine is not attached, or a reset has no answer yet."""

    def nothing() -> bool:
        return (
            stepping.tiers == ()
            and stepping.find_tier(b"k") == NO_TIER
            and stepping.tier_status(0) is None
            and stepping.request_promotion([b"k"]) == 0
        )

    assert nothing()
    daemon.attach(stepping)
    assert nothing()
    stepping.end_step()
    assert steps(daemon) == []
    daemon.tiers = (DISK, SHARED)
    daemon.notify(Detached(reason="as the test says"))
    eventually(lambda: not stepping.attached)
    daemon.attach(stepping)
    assert stepping.find_tier(b"k") == TIER_UNKNOWN
    daemon.freeze()
    stepping.reset(0)
    assert nothing()
    daemon.thaw()


def test_a_key_is_told_again_after_a_while_or_when_it_was_loaded(
    table: TierTable, daemon: FakeDaemon, stepping: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it is looked for; once loaded it may have gone again."""
    del table
    clock = SimpleNamespace(now=100.0)
    fake_time = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr("kvd_client.scheduler.time", fake_time)
    assert stepping.request_promotion([b"a", b"ready"]) == 2
    clock.now += REREQUEST_SECONDS - 0.1
    assert stepping.request_promotion([b"a", b"ready"]) == 0
    stepping.complete_load(stepping.prepare_load([b"ready"]))
    assert stepping.request_promotion([b"a", b"ready"]) == 1
    clock.now += 0.1
    assert stepping.request_promotion([b"a", b"ready"]) == 1
    stepping.end_step()
    (step,) = wait_steps(daemon, 1)
    assert step.sought == (b"a", b"ready", b"ready", b"a")
