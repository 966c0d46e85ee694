"""How long an engine without requests goes on stepping for what it has stored."""

from types import SimpleNamespace

import pytest

from kvd_client.vllm.unpublished import PATIENCE, Unpublished

KEYS = [b"a", b"b", b"c"]


@pytest.fixture
def clock() -> SimpleNamespace:
    """Seconds, as the test says."""
    return SimpleNamespace(now=100.0)


@pytest.fixture
def stores(clock: SimpleNamespace) -> Unpublished:
    """Three stores have begun."""
    stores = Unpublished(lambda: clock.now)
    stores.begin(KEYS)
    return stores


def test_an_ended_store_is_waited_for_until_it_is_seen(stores: Unpublished) -> None:
    """Stores that run are not waited for here: vLLM itself waits until they end."""
    assert not stores.pending()
    stores.end(KEYS[:2])
    assert stores.pending()
    stores.seen([b"a", b"another engine's"])
    assert stores.pending()
    stores.seen([b"b"])
    assert not stores.pending()


def test_what_was_seen_before_it_ended_is_not_waited_for(stores: Unpublished) -> None:
    """The daemon may know it before the ranks have reported."""
    stores.seen(KEYS)
    stores.end(KEYS)
    assert not stores.pending()


def test_failed_stores_are_not_waited_for(stores: Unpublished) -> None:
    """Nor those that this engine has not begun."""
    stores.end([*KEYS, b"unknown"], failed=KEYS)
    assert not stores.pending()


def test_patience_ends(stores: Unpublished, clock: SimpleNamespace) -> None:
    """Of a chunk that was evicted before it was seen; later stores have patience of their own."""
    stores.end(KEYS[:1])
    clock.now += PATIENCE * 0.75
    assert stores.pending()
    stores.end(KEYS[1:2])
    clock.now += PATIENCE * 0.75
    assert stores.pending()
    clock.now += PATIENCE * 0.25
    assert not stores.pending()
    stores.end(KEYS[2:])
    stores.seen(KEYS[2:])
    assert not stores.pending(), repr(stores)


def test_after_a_reset_nothing_is_waited_for(stores: Unpublished) -> None:
    """What was begun comes to nothing."""
    stores.end(KEYS[:1])
    stores.clear()
    stores.end(KEYS)
    assert not stores.pending()
