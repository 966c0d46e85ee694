"""Loads beside stores into slots on loan: each reads the bytes of its own chunk, or fails."""

from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TypeAlias

import numpy as np
import pytest

from kvd_client import LookupResult, StoreTicket, attachment
from kvd_proto.directory import HEAD_DTYPE
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of, lend, wait_hit
from tests.processes import LONG, frozen
from tests.waiting import eventually

CHUNKS = 32
OLD, NEW = keys_of("old", CHUNKS), keys_of("new", 4)
READS = 20
Refs: TypeAlias = dict[bytes, tuple[int, int]]
"""Slots and generations of chunks, by key."""


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> Daemon:
    """A daemon with a pool of 32 chunks of 16 KiB."""
    return start_daemon(cpu_bytes="512KiB")


@pytest.fixture
def loading(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine that sends a step at its end; its chunks fill the pool."""
    monkeypatch.setattr(attachment, "OVERDUE_SECONDS", LONG)
    with Engine(daemon.runtime_dir, "loading", 1, deadline=LONG, steps=True) as engine:
        engine.wait_attached()
        assert engine.scheduler.num_chunks == CHUNKS
        for keys in (OLD[:16], OLD[16:]):
            lend(engine.scheduler, len(keys))
            assert engine.store(keys) == keys
        wait_hit(engine, OLD)
        yield engine


@pytest.fixture
def storing(daemon: Daemon, loading: Engine) -> Iterator[Engine]:
    """Another engine of the same namespace."""
    assert loading.scheduler.attached
    with Engine(daemon.runtime_dir, "storing", 1, deadline=LONG, steps=True) as engine:
        yield engine.wait_attached()


def begin(storing: Engine, loading: Engine) -> tuple[StoreTicket, dict[int, int], Refs]:
    """Give the slots of chunks to new keys, and submit the job before the step is sent."""
    lend(storing.scheduler, len(NEW))
    attachment = loading.scheduler._attachments.current
    assert attachment is not None
    entries = {key: attachment.directory.entry(key) for key in OLD}
    ticket = storing.scheduler.prepare_store(NEW)
    assert ticket.keys == tuple(NEW)
    slots = ticket.slots.tolist()
    victims = {
        key: (entry[0], entry[1])
        for key, entry in entries.items()
        if entry is not None and entry[0] in slots
    }
    assert len(victims) == len(NEW)
    blocks = storing.fill(NEW, 1)
    jobs = storing.submit("store", [0], blocks, ticket.slots, ticket.generations)
    return ticket, jobs, victims


def read(engine: Engine, chunks: Refs) -> tuple[bool, int]:
    """Load chunks, half of what fits: whether that went well, and bytes that are not theirs."""
    chunks = dict(list(chunks.items())[: CHUNKS // 2 - 1])
    blocks = list(range(33, 33 + 2 * len(chunks)))
    engine.poison(blocks)
    slots, generations = zip(*chunks.values(), strict=True)
    jobs = engine.submit("load", [0], blocks, np.array(slots, "<u4"), np.array(generations, "<u8"))
    success = engine.results(jobs)[0].success
    return success, engine.wrong_bytes(list(chunks), blocks)


@pytest.mark.parametrize("told", [False, True], ids=["step not sent", "broker stopped"])
def test_chunks_are_whole_until_the_broker_has_read_the_step_that_gives_their_slots_away(
    daemon: Daemon, storing: Engine, loading: Engine, told: bool
) -> None:
    """Then their loads are stale, and the store, which waited for that, has stored its bytes."""
    with ExitStack() as stack:
        ticket, jobs, victims = begin(storing, loading)
        if told:
            stack.enter_context(frozen(daemon.process.pid))
            storing.scheduler.end_step()
        for _ in range(READS):
            assert read(loading, victims) == (True, 0)
        assert storing.workers[0].get_finished() == []
    storing.scheduler.end_step()
    assert storing.results(jobs)[0].success
    storing.scheduler.complete_store(ticket)
    assert read(loading, victims)[0] is False
    assert set(loading.scheduler.lookup_many(list(victims))) == {LookupResult.MISS}
    wait_hit(storing, NEW)
    assert loading.load(NEW) == (4, 0)


def test_a_chunk_that_is_pinned_stays_and_the_store_into_its_slot_is_lost(
    daemon: Daemon, storing: Engine, loading: Engine
) -> None:
    """A pin ends the loan before the step is read; the job stores its other chunks."""
    ticket, jobs, victims = begin(storing, loading)
    pinned = next(iter(victims))
    lost = ticket.keys[ticket.slots.tolist().index(victims[pinned][0])]
    with loading.scheduler.prepare_load([pinned]) as found:
        assert found.keys == (pinned,)
        loading.scheduler.end_step()
        eventually(lambda: daemon.status()["namespaces"][0]["chunks"]["pinned"] == 1)
        storing.scheduler.end_step()
        assert storing.results(jobs)[0].success
        storing.scheduler.complete_store(ticket)
        stored = [key for key in NEW if key != lost]
        wait_hit(storing, stored)
        assert loading.scheduler.lookup(lost) is LookupResult.MISS
        assert read(loading, {pinned: victims[pinned]}) == (True, 0)
    loading.scheduler.end_step()
    assert loading.load([pinned, *stored]) == (4, 0)
    assert daemon.status()["counters"]["stores_lost"] == 1


def test_a_chunk_is_a_miss_for_the_scheduler_that_gave_its_slot_away_and_for_no_other(
    storing: Engine, loading: Engine
) -> None:
    """Until the broker has read the step other engines find it and load its bytes."""
    _, jobs, victims = begin(storing, loading)
    assert storing.scheduler.prepare_load(list(victims)).keys == ()
    assert set(storing.scheduler.lookup_many(list(victims))) == {LookupResult.MISS}
    assert loading.load(list(victims)) == (4, 0)
    storing.scheduler.end_step()
    assert storing.results(jobs)[0].success
    eventually(lambda: set(loading.scheduler.lookup_many(NEW)), {LookupResult.HIT}.__eq__)


def test_a_step_gives_away_no_slot_of_a_chunk_that_it_pins(daemon: Daemon, loading: Engine) -> None:
    """Also where the slot's loan comes with an answer that is taken in after the pin."""
    scheduler = loading.scheduler
    attachment = scheduler._attachments.current
    assert attachment is not None
    directory = attachment.directory
    lend(scheduler, 1)
    taken = scheduler.prepare_store(keys_of("full", CHUNKS))  # all loans that are at hand
    scheduler.end_step()

    eventually(lambda: directory.entry(taken.keys[-1]))
    daemon.status()  # the answer to the step was sent before, with loans that are not taken in yet
    entries = {key: entry for key in OLD if (entry := directory.entry(key)) is not None}
    heads = directory.heads(array("I", [entry[0] for entry in entries.values()]))
    loans = np.frombuffer(heads, HEAD_DTYPE)["loan"].tolist()
    pinned = [key for key, loan in zip(entries, loans, strict=True) if loan]
    with scheduler.prepare_load(pinned) as found:
        assert found.keys == tuple(pinned)
        assert not scheduler.prepare_store(NEW).keys
        assert not attachment.connection.has_replies
        scheduler.end_step()
        chunks = dict(zip(pinned, zip(found.slots, found.generations, strict=True), strict=True))
        assert read(loading, chunks) == (True, 0)
