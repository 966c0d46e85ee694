"""Slots on loan: every one has an owner, and comes back however that ends."""

import signal
from collections.abc import Iterator, Sequence

import pytest

from kvd.wire.tool import ToolConnection
from kvd_client import LookupResult, StoreAnswer, attachment
from kvd_proto.directory import SlotState
from kvd_proto.messages import Drain, Resume
from tests.asked import Asked
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of, lend, wait_hit
from tests.daemon.slots import Slots, slots_of
from tests.processes import LONG
from tests.waiting import PATIENCE, eventually

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


def test_a_store_that_came_late_is_not_in_the_way(daemon: Daemon, engine: Engine) -> None:
    """It loses against chunks that are READY by then: nothing is written, its slots are free."""
    with Engine(daemon.runtime_dir, "rival", world_size=1).wait_attached() as rival:
        keys = keys_of("late", 3)
        ticket = engine.begin(keys)
        rival.store(keys)
        wait_hit(rival, keys)
        engine.scheduler.end_step()
        eventually(lambda: daemon.status()["counters"]["stores_raced"] == 3)
        blocks = engine.fill(keys, 1)
        jobs = engine.submit("store", [0], blocks, ticket.slots, ticket.generations)
        assert not engine.results(jobs)[0].success
        wait_slots(daemon, ready=3, at_hand=(engine, rival))
        assert engine.load(keys) == (3, 0)


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


def test_a_reset_takes_loans_back(daemon: Daemon, engine: Engine) -> None:
    """Also those of the engines that share the namespace; both store on, and find it."""
    with Engine(daemon.runtime_dir, "other", world_size=1).wait_attached() as other:
        for one in (engine, other):
            stores_and_loads(one, f"before {one.name}")
            lend(one.scheduler, 8)
        begun = engine.begin(keys_of("begun", 2))
        assert other.scheduler.reset(PATIENCE) is not None
        blocks = engine.fill(begun.keys, 1)
        jobs = engine.submit("store", [0], blocks, begun.slots, begun.generations)
        assert not engine.results(jobs)[0].success
        for one in (engine, other):
            assert set(one.scheduler.lookup_many(keys_of("before other", 2))) == {LookupResult.MISS}
            stores_and_loads(one, f"after {one.name}")


def stores_and_loads(engine: Engine, name: str) -> None:
    """Two chunks, with right bytes."""
    keys = keys_of(name, 2)
    assert engine.store(keys) == keys
    engine.scheduler.end_step()
    wait_hit(engine, keys)
    assert engine.load(keys) == (2, 0)
    engine.scheduler.end_step()


def test_the_next_daemon_has_lent_slots_free(start_daemon: StartDaemon) -> None:
    """SIGKILL of the daemon with slots on loan and in writing: what was READY is all there is."""
    first = start_daemon(*KEEP)
    keys = keys_of("kept", 5)
    with Engine(first.runtime_dir, world_size=1, steps=True).wait_attached() as engine:
        stores_and_loads(engine, "kept")
        engine.begin(keys_of("begun", 3))
        engine.scheduler.end_step()
        engine.begin(keys_of("not told", 3))
        first.stop(signal.SIGKILL)
    second = start_daemon(*KEEP)
    with Engine(second.runtime_dir, "other", world_size=1, steps=True).wait_attached() as engine:
        wait_slots(second, "other", ready=2, at_hand=(engine,))
        assert engine.load(keys[:2]) == (2, 0)
        for name in ("begun", "not told"):
            stores_and_loads(engine, name)


def test_an_idle_engine_gives_way(start_daemon: StartDaemon) -> None:
    """It has all slots of a small pool on loan and uses none: another one gets some of them."""
    daemon = start_daemon(cpu_bytes="512KiB")
    with Engine(daemon.runtime_dir, "idle", world_size=1).wait_attached() as idle:
        slots = idle.scheduler.num_chunks
        lend(idle.scheduler, slots)
        with Engine(daemon.runtime_dir, "busy", world_size=1).wait_attached() as busy:
            for turn in range(8):
                keys = keys_of(f"turn-{turn}", slots // 2)
                assert busy.store(keys) == keys
                wait_hit(busy, keys)
                assert busy.load(keys[:8]) == (8, 0)
        stores_and_loads(idle, "after all")
