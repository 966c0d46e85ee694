"""Slots on loan: every one has an owner, and comes back however that ends."""

from collections.abc import Iterator, Sequence

import pytest

from kvd.wire.tool import ToolConnection
from kvd_client import StoreAnswer, attachment
from kvd_proto.directory import SlotState
from kvd_proto.messages import Drain, Resume
from tests.asked import Asked
from tests.conftest import Daemon
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
