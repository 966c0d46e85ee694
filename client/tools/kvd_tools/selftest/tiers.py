"""What the self-test says of the tiers below the pool: what the daemon reports of them.

No bytes go through a tier here: the test's own namespace is a temporary one, which no tier keeps.
"""

import time
from typing import Any

from kvd_client.scheduler import Scheduler

_LOOK_SECONDS = 0.1


def look_at_tiers(observer: Scheduler, timeout: float) -> list[dict[str, Any]]:
    """Return what is so of each tier; one that is starting is given the time for it."""
    end = time.monotonic() + timeout
    while True:
        tiers: list[dict[str, Any]] = observer.status().get("tiers", [])
        starting = any(tier["state"] == "starting" for tier in tiers)
        if not starting or time.monotonic() > end:
            return [told(tier) for tier in tiers]
        time.sleep(_LOOK_SECONDS)


def told(tier: dict[str, Any]) -> dict[str, Any]:
    """Whether a tier of the report is used, and what it has done.

    ok: its process serves, and its breaker has not set it aside.
    stored, loaded, corrupt: chunks since the daemon's start.
    """
    counts = tier["counters"]
    return {
        "name": tier["name"],
        "ok": bool(tier["up"] and tier["usable"]),
        "state": tier["state"],
        "breaker": tier["breaker"],
        "chunks": tier["chunks"],
        "used_bytes": tier["used_bytes"],
        "stored": counts["puts"]["ok"],
        "loaded": counts["gets"]["ok"],
        "corrupt": counts["gets"]["corrupt"],
        "last_error": tier["last_error"],
    }


def line(tier: dict[str, Any]) -> str:
    """One of them in words."""
    state = tier["state"] if tier["breaker"] == "closed" else f"breaker {tier['breaker']}"
    said = (
        f"tier {tier['name']}: {state}, {tier['chunks']:,} chunks; since the start"
        f" {tier['stored']:,} stored, {tier['loaded']:,} loaded, {tier['corrupt']:,} corrupt"
    )
    return f"{said}; last error: {tier['last_error']}" if tier["last_error"] else said
