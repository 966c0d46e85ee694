"""Daemons with tiers below a small pool, as tests see them: what goes down, and comes up again."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvd_client import LookupResult
from tests.daemon.engines import Engine, keys_of
from tests.daemon.serving import Daemon
from tests.waiting import eventually

HIT, MISS = LookupResult.HIT, LookupResult.MISS
POOL = "1MiB"  # 64 chunks
AGAIN_SECONDS = 15.0  # until what has not gone down is stored once more


def tiers_of(daemon: Daemon) -> list[dict[str, Any]]:
    """What the daemon says of its tiers."""
    tiers: list[dict[str, Any]] = daemon.status()["tiers"]
    return tiers


def tier_of(daemon: Daemon, index: int = 0) -> dict[str, Any]:
    """What it says of one."""
    return tiers_of(daemon)[index]


def wait_tier(daemon: Daemon, index: int = 0, **wanted: Any) -> dict[str, Any]:
    """One tier, once these fields are so."""
    return eventually(
        lambda: tier_of(daemon, index),
        lambda tier: all(tier[key] == value for key, value in wanted.items()),
    )


def wait_below(engine: Engine, keys: Sequence[bytes], tier: int) -> None:
    """Until the directory says that this one has all of these, or -1: that none has."""
    eventually(lambda: set(map(engine.scheduler.find_tier, keys)), {tier}.__eq__)


def wait_down(engine: Engine, keys: Sequence[bytes]) -> None:
    """Until the directory says that a tier has all of these."""
    below = engine.scheduler.find_tier
    eventually(lambda: [below(key) for key in keys], lambda found: min(found) >= 0)


def wait_aside(daemon: Daemon, engine: Engine, keys: Sequence[bytes]) -> None:
    """Seek these until the first tier is set aside, or was until its process was replaced."""

    def aside() -> bool:
        engine.scheduler.request_promotion(keys)
        opened = tier_of(daemon)["counters"]["opened"]
        return bool(opened["late"] + opened["failed"])

    eventually(aside)


def engine_of(daemon: Daemon, **more: Any) -> Engine:
    """An engine of one rank that is attached."""
    return Engine(daemon.runtime_dir, world_size=1, **more).wait_attached()


def wait_usable(engine: Engine) -> None:
    """Until the directory says that all tiers may be used."""
    scheduler = engine.scheduler
    eventually(
        lambda: list(map(scheduler.tier_status, range(len(scheduler.tiers)))),
        lambda found: found and all(each is not None and each.usable for each in found),
    )


_floods = itertools.count()


def flood() -> list[bytes]:
    """Eight keys that no other chunk has."""
    return keys_of(f"flood-{next(_floods)}", 8)


def push_out(engine: Engine, keys: Sequence[bytes]) -> None:
    """Store others until memory has none of these."""
    while any(answer is not MISS for answer in engine.scheduler.lookup_many(keys)):
        engine.store(flood(), must=False)


def go_down(
    engine: Engine, keys: Sequence[bytes], is_down: Callable[[bytes], bool] | None = None
) -> None:
    """Store these until a tier has them all, or all are down: a put that is late is lost."""
    stored, below = float("-inf"), engine.scheduler.find_tier
    is_down = is_down or (lambda key: below(key) >= 0)

    def down() -> bool:
        nonlocal stored
        lacking = [key for key in keys if not is_down(key)]
        if lacking and time.monotonic() > stored + AGAIN_SECONDS:
            push_out(engine, lacking)
            engine.store(lacking)
            stored = time.monotonic()
        return not lacking

    eventually(down)


def bring_up(engine: Engine, keys: Sequence[bytes]) -> None:
    """Seek these until they are in memory."""

    def sought() -> list[LookupResult]:
        engine.scheduler.request_promotion(keys)
        return engine.scheduler.lookup_many(keys)

    eventually(sought, {HIT}.issuperset)


def comes_back(engine: Engine, keys: list[bytes]) -> None:
    """These are brought up and loaded, byte for byte."""
    bring_up(engine, keys)
    assert engine.load(keys) == (len(keys), 0)


@contextlib.contextmanager
def kept(
    daemon: Daemon, name: str = "kept", chunks: int = 8
) -> Iterator[tuple[Engine, list[bytes]]]:
    """An engine, and keys of chunks that are in the first tier and not in memory."""
    with engine_of(daemon) as engine:
        keys = keys_of(name, chunks)
        wait_usable(engine)
        go_down(engine, keys)
        push_out(engine, keys)
        yield engine, keys
