"""Daemons with tiers below a small pool, as tests see them: what goes down, and comes up again."""

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvd_client import LookupResult
from tests.daemon.engines import Engine, engine_of, keys_of
from tests.daemon.serving import Daemon
from tests.waiting import eventually

HIT, MISS = LookupResult.HIT, LookupResult.MISS
POOL = "1MiB"  # 64 chunks
AGAIN_SECONDS = 15.0  # until what has not gone down is stored once more

_floods = itertools.count()


def tier_of(daemon: Daemon) -> dict[str, Any]:
    """The status of a daemon's only tier."""
    (tier,) = daemon.status()["tiers"]
    return dict(tier)


def is_below(engine: Engine, keys: Sequence[bytes]) -> bool:
    """Whether the directory says that a tier has all of these."""
    return all(engine.scheduler.find_tier(key) >= 0 for key in keys)


def wait_usable(engine: Engine) -> None:
    """Until the directory says that all tiers may be used."""
    scheduler = engine.scheduler
    eventually(
        lambda: list(map(scheduler.tier_status, range(len(scheduler.tiers)))),
        lambda statuses: statuses and all(status and status.usable for status in statuses),
    )


def wait_aside(daemon: Daemon, engine: Engine, keys: Sequence[bytes]) -> None:
    """Seek these until the tier is set aside, or was until its process was replaced."""

    def is_aside() -> bool:
        engine.scheduler.request_promotion(keys)
        opened = tier_of(daemon)["counters"]["opened"]
        return bool(opened["late"] + opened["failed"])

    eventually(is_aside)


def push_out(engine: Engine, keys: Sequence[bytes]) -> None:
    """Store others until memory has none of these."""
    while any(answer is not MISS for answer in engine.scheduler.lookup_many(keys)):
        engine.store(keys_of(f"flood-{next(_floods)}", 8), must=False)


def go_down(engine: Engine, keys: Sequence[bytes]) -> None:
    """Store these until the tier has them all: a put that is late is lost."""
    stored = float("-inf")

    def are_down() -> bool:
        nonlocal stored
        lacking = [key for key in keys if not is_below(engine, [key])]
        if lacking and time.monotonic() > stored + AGAIN_SECONDS:
            push_out(engine, lacking)
            engine.store(lacking)
            stored = time.monotonic()
        return not lacking

    eventually(are_down)


def comes_back(engine: Engine, keys: list[bytes]) -> None:
    """Seek these until they are in memory, and load them byte for byte."""

    def lookups() -> list[LookupResult]:
        engine.scheduler.request_promotion(keys)
        return engine.scheduler.lookup_many(keys)

    eventually(lookups, {HIT}.issuperset)
    assert engine.load(keys) == (len(keys), 0)


@contextlib.contextmanager
def kept_below(daemon: Daemon, chunks: int = 8) -> Iterator[tuple[Engine, list[bytes]]]:
    """An engine, and keys of chunks that are in the tier and not in memory."""
    with engine_of(daemon) as engine:
        keys = keys_of("kept", chunks)
        wait_usable(engine)
        go_down(engine, keys)
        push_out(engine, keys)
        yield engine, keys
