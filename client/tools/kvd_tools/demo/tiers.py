"""What lies below the demo's pool: brought up before a prompt is served, and measured."""

import select
import time
from typing import Any

from kvd_client.decisions import NOT_BELOW
from kvd_client.scheduler import Scheduler
from kvd_proto.directory import LookupResult
from kvd_tools.demo.content import chunk_key
from kvd_tools.demo.plan import FULL, WINDOW
from kvd_tools.demo.workload import Prompt

SEEK_SECONDS = 1.0  # a real engine waits for as long as computing would take
BEGIN_SECONDS = 0.05  # in which a promotion, or a question to a shared tier, must have begun
LOOK_SECONDS = 0.01
SETTLE_SECONDS = 10.0  # until what is on its way down has arrived

Figures = dict[str, int | float | None]
NO_FIGURES: Figures = {
    "tier_stored_chunks": None,
    "tier_loaded_chunks": None,
    "tier_in_GBps": None,
    "tier_out_GBps": None,
}


def bring_up(scheduler: Scheduler, prompt: Prompt) -> None:
    """Seek what tiers have of a prompt's head, and wait for what is on its way."""
    wanted: list[bytes] = []
    for piece in prompt:
        full, window = (chunk_key(piece, group) for group in (FULL, WINDOW))
        if scheduler.lookup(full) is LookupResult.MISS:
            if scheduler.below(full) == NOT_BELOW:
                break
            wanted.append(full)
        if scheduler.lookup(window) is LookupResult.MISS and scheduler.below(window) != NOT_BELOW:
            wanted.append(window)
    if not wanted:
        return
    scheduler.seek(wanted)
    scheduler.end_step()
    begun = time.monotonic()
    while (waited := time.monotonic() - begun) < SEEK_SECONDS:
        found = [scheduler.lookup(key) for key in wanted]
        moving = LookupResult.HIT_PENDING in found
        if not moving and (waited > BEGIN_SECONDS or not _may_begin(scheduler, wanted, found)):
            return
        select.select([scheduler], [], [], LOOK_SECONDS)
        scheduler.take_ready()


def _may_begin(scheduler: Scheduler, keys: list[bytes], found: list[LookupResult]) -> bool:
    missing = (key for key, result in zip(keys, found, strict=True) if result is LookupResult.MISS)
    return any(scheduler.below(key) != NOT_BELOW for key in missing)


def settled_figures(scheduler: Scheduler) -> Figures:
    """What the daemon's tiers have done when nothing is on its way any more.

    A status that did not come in time names no tiers, and is asked for again.
    """
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        tiers: list[dict[str, Any]] = scheduler.status().get("tiers", [])
        waiting = sum(tier["queued_put_bytes"] + tier["queued_get_bytes"] for tier in tiers)
        if (tiers and not waiting) or time.monotonic() > end:
            return figures([tier["counters"] for tier in tiers])
        time.sleep(LOOK_SECONDS)


def figures(tiers: list[dict[str, Any]]) -> Figures:
    """The figures of all tiers together; of none where there is no tier. Rates in 1e9 bytes/s.

    A rate is of the time in which anything was on its way; None where nothing was.
    """
    if not tiers:
        return NO_FIGURES
    return {
        "tier_stored_chunks": sum(counts["puts"]["ok"] for counts in tiers),
        "tier_loaded_chunks": sum(counts["gets"]["ok"] for counts in tiers),
        "tier_in_GBps": _rate(tiers, "put"),
        "tier_out_GBps": _rate(tiers, "get"),
    }


def _rate(tiers: list[dict[str, Any]], way: str) -> float | None:
    seconds = sum(counts[f"{way}_seconds"] for counts in tiers)
    nbytes = sum(counts[f"{way}_bytes"] for counts in tiers)
    return round(nbytes / seconds / 1e9, 3) if nbytes and seconds else None
