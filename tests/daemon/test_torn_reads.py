"""Loads beside stores into slots on loan: each reads the bytes of its own chunk, or fails."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TypeAlias

import numpy as np
import pytest

from kvd_client import LookupResult, StoreTicket, attachment
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, engine_of, keys_of, lend, wait_hit
from tests.processes import LONG, frozen

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
    with engine_of(daemon, "loading", deadline=LONG, steps=True) as engine:
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
    with engine_of(daemon, "storing", deadline=LONG, steps=True) as engine:
        yield engine


def begin(storing: Engine, loading: Engine) -> tuple[StoreTicket, dict[int, int], Refs]:
    """Give the slots of chunks to new keys, and submit the job before the step is sent."""
    lend(storing.scheduler, len(NEW))
    attachment = loading.scheduler._attachments.current
    assert attachment is not None
    entries = {key: attachment.directory.entry(key) for key in OLD}
    ticket = storing.scheduler.prepare_store(NEW)
    assert ticket.keys == tuple(NEW)
    slots = ticket.slots.tolist()
    victims = {key: entry[:2] for key, entry in entries.items() if entry and entry[0] in slots}
    assert len(victims) == len(NEW)
    blocks = storing.fill(NEW, 1)
    jobs = storing.submit("store", [0], blocks, ticket.slots, ticket.generations)
    return ticket, jobs, victims


def read(engine: Engine, chunks: Refs) -> tuple[bool, int]:
    """Load chunks: whether that went well, and bytes that are not theirs."""
    blocks = list(range(33, 33 + 2 * len(chunks)))
    engine.poison(blocks)
    slots, generations = zip(*chunks.values(), strict=True)
    success = engine.moves("load", blocks, np.array(slots, "<u4"), np.array(generations, "<u8"))
    return success, engine.wrong_bytes(list(chunks), blocks)


@pytest.mark.parametrize("sent", [False, True], ids=["step not sent", "broker stopped"])
def test_chunks_are_whole_until_the_broker_has_read_the_step_that_gives_their_slots_away(
    daemon: Daemon, storing: Engine, loading: Engine, sent: bool
) -> None:
    """Then their loads are stale, and the store, which waited for that, has stored its bytes.

    For the scheduler that gave the slots away the chunks are misses at once.
    """
    with ExitStack() as stack:
        ticket, jobs, victims = begin(storing, loading)
        if sent:
            stack.enter_context(frozen(daemon.process.pid))
            storing.scheduler.end_step()
        for _ in range(READS):
            assert read(loading, victims) == (True, 0)
        assert loading.load(list(victims)) == (4, 0)
        assert set(storing.scheduler.lookup_many(list(victims))) == {LookupResult.MISS}
        assert storing.workers[0].get_finished() == []
    storing.scheduler.end_step()
    assert storing.results(jobs)[0].success
    storing.scheduler.complete_store(ticket)
    assert read(loading, victims)[0] is False
    assert set(loading.scheduler.lookup_many(list(victims))) == {LookupResult.MISS}
    wait_hit(storing, NEW)
    assert loading.load(NEW) == (4, 0)
