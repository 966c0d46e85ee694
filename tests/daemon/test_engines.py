"""Engines on a real daemon: what is stored comes back, to whom it may, and only complete."""

from collections.abc import Callable
from functools import partial

import pytest

from kvd_client import LookupResult
from tests.conftest import Daemon
from tests.daemon.engines import Engine, keys_of, make_layout, wait_hit
from tests.waiting import eventually

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
