"""Engines that share a daemon: every byte is right, and each gets its part."""

import itertools
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvd.wire.tool import ToolConnection
from kvd_client import NO_TIER, LookupResult, StoreAnswer, attachment
from kvd_proto.directory import SlotState
from kvd_proto.messages import Drain, Resume
from tests.asked import Asked
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of, lend, make_layout, wait_hit
from tests.daemon.serving import wait_state
from tests.daemon.slots import Slots, slots_of
from tests.processes import LONG
from tests.waiting import PATIENCE, eventually

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(shared_daemon: Daemon, label: str) -> MakeEngine:
    """An engine of this test's on the daemon of all, of a model that is this test's too."""
    return partial(Engine, shared_daemon.runtime_dir, name=label, model=label)


def test_two_ranks_store_and_load_every_byte(make_engine: MakeEngine) -> None:
    """Both groups of both ranks come back, from other blocks, over poisoned memory."""
    with make_engine().wait_attached() as engine:
        full, window = keys_of("full", 10), keys_of("window", 6)
        assert engine.store(full) == full
        assert engine.store(window, first_block=21, group=1) == window
        wait_hit(engine, full + window)
        assert engine.load(full) == (10, 0)
        assert engine.load(window, group=1) == (6, 0)
    # The pool outlives the engine, also where the next one has more GPU blocks.
    with make_engine(layout=make_layout(blocks=128)).wait_attached() as engine:
        assert engine.scheduler.lookup_many(full) == [LookupResult.HIT] * 10
        assert engine.load(full) == (10, 0)


def test_replicated_shares_are_stored_once(daemon: Daemon) -> None:
    """Ranks that hold the same bytes take turns to write one share, and all load it."""
    layout = make_layout(replicated=True)
    with Engine(daemon.runtime_dir, layout=layout).wait_attached() as engine:
        keys = keys_of("mla", 9)
        engine.store(keys)
        wait_hit(engine, keys)
        assert engine.load(keys) == (9, 0)
        assert engine.scheduler.bytes_per_chunk == 2 * 2 * 4096
    # The lane's counters come with its next heartbeats.
    eventually(lambda: daemon.status()["counters"]["store_bytes"], (9 * 2 * 2 * 4096).__eq__)


KEEP = ("--keep-pool", "yes")


def wait_slots(
    daemon: Daemon, engine: str = "engine", *, at_hand: Sequence[Engine] = (), **states: int
) -> Slots:
    """Until so many slots are in these states, all others FREE, and those at hand on loan."""
    due = {SlotState[name.upper()]: number for name, number in states.items()}

    def so(found: Slots | None) -> bool:
        if found is None:
            return False
        held = {state: n for state, n in found.states.items() if n and state != SlotState.FREE}
        lent = sum(one.scheduler.reserve(0, 0.0) for one in at_hand)
        return held == due and len(found.loans) == lent

    found = eventually(lambda: slots_of(daemon.runtime_dir, engine), so)
    assert found is not None
    return found


@pytest.fixture
def engine(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """One with a rank, that says at a step's end what it has to say, and not before."""
    monkeypatch.setattr(attachment, "OVERDUE_SECONDS", LONG)
    with Engine(daemon.runtime_dir, world_size=1, steps=True).wait_attached() as engine:
        yield engine


def test_two_engines_store_the_same_keys_at_once(daemon: Daemon, engine: Engine) -> None:
    """Both got slots before either was told of: one stores them, the other's come back."""
    with Engine(daemon.runtime_dir, "rival", world_size=1, steps=True).wait_attached() as rival:
        both, keys = (engine, rival), keys_of("same", 4)
        tickets = [one.begin(keys) for one in both]
        assert [ticket.keys for ticket in tickets] == [tuple(keys)] * 2
        jobs = [
            one.submit("store", [0], one.fill(keys, 1), ticket.slots, ticket.generations)
            for one, ticket in zip(both, tickets, strict=True)
        ]
        for one in both:
            one.scheduler.end_step()
        ended = [one.results(job)[0].success for one, job in zip(both, jobs, strict=True)]
        assert sorted(ended) == [False, True]
        eventually(lambda: daemon.status()["counters"]["stores_raced"] == 4)
        for one in both:
            wait_hit(one, keys)
            assert one.load(keys) == (4, 0)
            one.scheduler.end_step()
        wait_slots(daemon, ready=4, at_hand=both)


def test_loans_of_a_killed_engine_come_back(daemon: Daemon, engine: Engine) -> None:
    """SIGKILL of an engine with slots at hand, some of them given to keys: all are free."""
    doomed = Asked(Engine, daemon.runtime_dir, "doomed", 1)
    assert doomed.ask("scheduler.wait_attached", PATIENCE)
    doomed.ask("begin", keys_of("half", 3))
    doomed.ask("scheduler.reserve", 8, PATIENCE)
    found = eventually(
        lambda: slots_of(daemon.runtime_dir, "doomed"),
        lambda found: found and found.states[SlotState.WRITING] == 3,
    )
    assert found is not None
    assert found.loans
    doomed.kill()
    wait_slots(daemon, at_hand=(engine,))


def test_a_drain_takes_loans_back(daemon: Daemon, engine: Engine) -> None:
    """No slot is at hand while the daemon drains, of no engine; after a resume there are others."""
    with (
        Engine(daemon.runtime_dir, "other", world_size=1).wait_attached() as other,
        ToolConnection(daemon.runtime_dir, PATIENCE) as control,
    ):
        for one in (engine, other):
            lend(one.scheduler, 8)
        control.request(Drain())
        wait_slots(daemon)
        for one in (engine, other):
            refused = one.scheduler.prepare_store(keys_of("refused", 2))
            assert set(refused.answers) == {StoreAnswer.FULL}
        control.request(Resume())
        for one in (engine, other):
            stores_and_loads(one, f"of {one.name}")


def stores_and_loads(engine: Engine, name: str) -> None:
    """Two chunks, with right bytes."""
    keys = keys_of(name, 2)
    assert engine.store(keys) == keys
    engine.scheduler.end_step()
    wait_hit(engine, keys)
    assert engine.load(keys) == (2, 0)
    engine.scheduler.end_step()


POOL = "1MiB"  # 64 chunks
BATCH = 4


def flood(engine: Engine, ended: threading.Event) -> None:
    """Store without end."""
    for turn in itertools.count():
        if ended.is_set():
            return
        engine.store(keys_of(f"flood-{turn}", BATCH), must=False)


def test_chunks_of_requests_that_wait_are_kept(start_daemon: StartDaemon) -> None:
    """Another engine stores three times what the pool holds before the load is sent."""
    daemon = start_daemon("--lease-seconds", "600", cpu_bytes=POOL)
    with (
        Engine(daemon.runtime_dir, world_size=1).wait_attached() as engine,
        Engine(daemon.runtime_dir, "other", world_size=1).wait_attached() as other,
    ):
        keys = keys_of("kept", 8)
        engine.store(keys)
        wait_hit(engine, keys)
        with engine.scheduler.prepare_load(keys, lease_seconds=600.0) as ticket:
            assert len(ticket) == 8
            wait_state(daemon, pinned=8)
            for turn in range(24):
                other.store(keys_of(f"flood-{turn}", 8))
            blocks = list(range(33, 49))
            engine.poison(blocks)
            jobs = engine.submit("load", [0], blocks, ticket.slots, ticket.generations)
            assert engine.results(jobs)[0].success
            assert engine.wrong_bytes(keys, blocks) == 0
        report = daemon.status()
        assert report["counters"]["evicted"] > 64
        assert report["counters"]["pins_late"] == 0


HIT, MISS = LookupResult.HIT, LookupResult.MISS


def test_who_seeks_a_chunk_is_woken_when_it_is_there(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """And another engine of the same model finds it as well."""
    tier = f"disk:{tmp_path / 'slabs'},size=64MiB,keep=all,late=5"
    daemon = start_daemon("--tier", tier, cpu_bytes="1MiB")
    (key,) = keys = keys_of("k", 1)
    with (
        Engine(daemon.runtime_dir, world_size=1).wait_attached() as engine,
        Engine(daemon.runtime_dir, world_size=1, name="other").wait_attached() as other,
    ):
        scheduler = engine.scheduler
        eventually(lambda: scheduler.tier_status(0), lambda status: status and status.usable)
        engine.store(keys)
        wait_hit(engine, keys)
        assert [tier.medium for tier in scheduler.tiers] == ["disk"]
        eventually(lambda: scheduler.find_tier(key), lambda number: number == 0)
        flood = iter(range(10_000))
        while scheduler.lookup(key) is not MISS:
            engine.store(keys_of(f"flood-{next(flood)}", 8), must=False)
        wait_state(daemon, writing=0)
        poll = select.poll()
        poll.register(scheduler.fileno(), select.POLLIN)
        eventually(lambda: not (scheduler.take_ready() or poll.poll(0)))  # of what was stored
        told = 0

        def is_there() -> bool:
            nonlocal told
            told += scheduler.request_promotion(keys)  # once more where the tier was late
            return scheduler.lookup(key) is HIT

        eventually(is_there)
        assert told
        assert poll.poll(PATIENCE * 1000), "the scheduler was not woken"
        assert other.scheduler.lookup(key) is HIT
        assert engine.load(keys) == other.load(keys) == (1, 0)
        assert scheduler.find_tier(b"unheard of") == NO_TIER


LAYOUT = make_layout(page=16 * 1024)  # 64 KiB a chunk: an engine's loans are a part of the pool
MIB = 2**20


def named(daemon: Daemon, model: str) -> dict[str, Any]:
    """A namespace in the report."""
    (found,) = [n for n in daemon.status()["namespaces"] if n["model"] == model]
    return dict(found)


def test_a_flood_of_stores_takes_no_floor_and_fails_no_load(start_daemon: StartDaemon) -> None:
    """The quiet engine's chunks stay and all its loads succeed, while the other fills the pool."""
    daemon = start_daemon("--quota", '{quiet = {floor = "4MiB"}}', cpu_bytes="16MiB")
    with (
        Engine(daemon.runtime_dir, "quiet", 1, "quiet", LAYOUT).wait_attached() as quiet,
        Engine(daemon.runtime_dir, "greedy", 1, "greedy", LAYOUT).wait_attached() as greedy,
    ):
        keys = keys_of("mine", 12)
        quiet.store(keys)
        wait_hit(quiet, keys)
        under_way: dict[int, int] = {}
        for turn in range(40):
            greedy.results(under_way)
            ticket = greedy.begin(keys_of(f"flood-{turn}", 16))
            blocks = list(range(1, 1 + 2 * len(ticket.keys)))
            under_way = greedy.submit("store", [0], blocks, ticket.slots, ticket.generations)
            assert quiet.load(keys) == (12, 0)
        mine, theirs = named(daemon, "quiet"), named(daemon, "greedy")
        assert theirs["counters"]["evicted"] > 0
        assert mine["counters"]["yielded"] == 0
        assert mine["counters"]["pins_late"] == 0
        assert mine["chunks"]["ready"] == 12
        (quota,) = daemon.status()["pool"]["quotas"]
        assert quota["held_bytes"] >= 12 * 64 * 1024
        assert quiet.begin(keys_of("more", 1)).slots.size == 1


def test_a_cap_keeps_a_flood_out_of_the_rest_of_the_pool(start_daemon: StartDaemon) -> None:
    """A capped engine evicts its own chunks and leaves free what it may not have."""
    daemon = start_daemon("--quota", '{greedy = {cap = "25%"}}', cpu_bytes="16MiB")
    with Engine(daemon.runtime_dir, "greedy", 1, "greedy", LAYOUT).wait_attached() as greedy:
        for turn in range(8):
            greedy.store(keys_of(f"flood-{turn}", 16))
        report = daemon.status()
        (quota,) = report["pool"]["quotas"]
        assert 3 * MIB <= quota["held_bytes"] <= quota["cap_bytes"] == 4 * MIB
        assert report["pool"]["free_bytes"] >= 12 * MIB
        assert named(daemon, "greedy")["counters"]["evicted"] > 0
