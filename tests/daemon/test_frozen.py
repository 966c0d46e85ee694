"""A broker that does nothing for a while: engines neither wait for it nor lose what they have."""

from itertools import count

import pytest

from kvd.wire.tool import ToolConnection
from kvd_client import LookupResult
from kvd_proto.directory import SlotState
from kvd_proto.messages import Check, Checked, Ping
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of, lend, wait_hit
from tests.daemon.slots import slots_of
from tests.processes import frozen
from tests.raw_client import RawClient
from tests.waiting import DEADLINE, PATIENCE, eventually

LONG = 600.0  # of a call that waited; a test may take half of that
STEPS = 100


def check(daemon: Daemon, engine: Engine, ready: int) -> None:
    """The broker's tables agree; every slot is FREE or READY, and on loan if it is at hand."""
    eventually(
        lambda: (slots_of(daemon.runtime_dir, engine.name), engine.scheduler.reserve(0, 0.0)),
        lambda found: (
            found[0]
            and found[0].states[SlotState.READY] == ready
            and len(found[0].loans) == found[1]
            and not found[0].states[SlotState.WRITING]
            and not found[0].states[SlotState.DRAINING]
        ),
    )
    with ToolConnection(daemon.runtime_dir, PATIENCE) as control:
        checked = control.ask(Check(), Checked)
    assert (checked.violation, checked.whole) == ("", True)


def test_a_reply_that_comes_too_late_is_no_message_that_cannot_be_read(daemon: Daemon) -> None:
    """Clients that gave a frozen broker up are counted apart, and no condition follows."""
    with RawClient(daemon.runtime_dir) as client:
        client.hello()
        with frozen(daemon.process.pid):
            client.request(Ping())
            client.close()
    report = eventually(daemon.status, lambda report: report["broker"]["dropped_replies"])
    assert report["broker"]["dropped_frames"] == 0
    assert "messages dropped" not in {found["name"] for found in report["conditions"]}


@pytest.mark.parametrize("steps", [True, False])
def test_no_call_of_a_step_waits_for_a_frozen_broker(
    start_daemon: StartDaemon, steps: bool
) -> None:
    """Loads succeed meanwhile; stores into slots on loan go on when it reads their step."""
    daemon = start_daemon()
    with Engine(daemon.runtime_dir, deadline=LONG, steps=steps).wait_attached() as engine:
        scheduler = engine.scheduler
        kept, new, more = keys_of("kept", 6), keys_of("new", 4), keys_of("more", STEPS)
        engine.store(kept)
        scheduler.end_step()
        wait_hit(engine, kept)
        lend(scheduler, len(new) + len(more))
        with frozen(daemon.process.pid):
            assert engine.load(kept) == (6, 0)
            ticket = scheduler.prepare_store(new)
            assert ticket.keys == tuple(new)
            blocks = engine.fill(new, 1)
            jobs = engine.submit("store", [0, 1], blocks, ticket.slots, ticket.generations)
            scheduler.end_step()
            assert set(scheduler.lookup_many(new)) == {LookupResult.HIT_PENDING}
            for key in more:
                scheduler.count_tokens(32, 0)
                with scheduler.prepare_load(kept) as found:
                    assert len(found) == 6
                given_up = scheduler.prepare_store([key])
                assert given_up.keys == (key,)
                scheduler.complete_store(given_up, success=False)
                scheduler.request_finished(kept)
                scheduler.take_ready()
                scheduler.take_changes()
                for worker in engine.workers.values():
                    worker.cancel([])
                    assert worker.get_finished() == []
                scheduler.end_step()
            assert scheduler.attached
        assert all(result.success for result in engine.results(jobs).values())
        scheduler.complete_store(ticket)
        wait_hit(engine, new)
        assert engine.load(new) == (4, 0)
        eventually(lambda: set(scheduler.lookup_many(more)), {LookupResult.MISS}.__eq__)
        scheduler.end_step()
        check(daemon, engine, ready=10)


def test_a_session_that_a_frozen_broker_costs_leaves_nothing_behind(
    start_daemon: StartDaemon,
) -> None:
    """Frozen for longer than the deadline: misses, then a new session; all slots are accounted."""
    daemon = start_daemon()
    with Engine(daemon.runtime_dir, steps=True).wait_attached() as engine:
        scheduler = engine.scheduler
        kept, lost = keys_of("kept", 6), keys_of("lost", 4)
        engine.store(kept)
        scheduler.end_step()
        eventually(lambda: set(scheduler.lookup_many(kept)), {LookupResult.HIT}.__eq__)
        with frozen(daemon.process.pid):
            scheduler.deadline = 0.5
            ticket = scheduler.prepare_store(lost)
            blocks = engine.fill(ticket.keys, 1)
            jobs = engine.submit("store", [0], blocks, ticket.slots, ticket.generations)
            scheduler.end_step()
            eventually(lambda: not scheduler.attached)
            for number in count():  # still no call waits, and nothing is found
                assert not scheduler.prepare_load(kept).keys
                assert not scheduler.prepare_store(keys_of("none", 1)).keys
                scheduler.request_finished(kept)
                scheduler.end_step()
                if number == STEPS:
                    break
            scheduler.deadline = DEADLINE
        engine.results(jobs)  # good where the broker read the step before it dropped the session
        engine.wait_attached()
        engine.load(kept)  # perhaps before it knows that it is attached
        eventually(lambda: engine.load(kept), (6, 0).__eq__)
        assert set(engine.scheduler.lookup_many(lost)) == {LookupResult.MISS}
        assert engine.store(lost) == lost
        scheduler.end_step()
        wait_hit(engine, lost)
        check(daemon, engine, ready=10)
