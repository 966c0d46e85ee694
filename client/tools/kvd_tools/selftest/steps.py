"""The steps of the self-test, in their order, and the run over them.

A step acts, and then proves that it acted, or raises StepFailed. A proof never takes a word for
it: it looks at the memory past the daemon, at the directory of chunks, or at the daemon's status,
so that what a step calls may do nothing, or do wrong, and is found out.

Of tiers below the pool the self-test says what the daemon reports. No bytes go through a tier here:
the test's own namespace is a temporary one, which no tier keeps.
"""

import time
from collections.abc import Callable
from typing import Any

from kvd_client.errors import KvdClientError
from kvd_client.scheduler import Scheduler
from kvd_proto.directory import LookupResult
from kvd_proto.messages import Fingerprint
from kvd_tools.errors import StepFailed
from kvd_tools.selftest.bench import Bench

ROUNDS = 5


def run(bench: Bench) -> list[dict[str, Any]]:
    """Do the steps in order, up to the first that fails; that one is the last of the list.

    Returns:
        Of each its name, whether it is ok, what was seen or was wrong as text, and the seconds.
    """
    steps: list[dict[str, Any]] = []
    for name, step in STEPS.items():
        started = time.perf_counter()
        try:
            text, ok = step(bench), True
        except KvdClientError as error:
            text, ok = str(error), False
        seconds = time.perf_counter() - started
        steps.append({"name": name, "ok": ok, "text": text, "seconds": seconds})
        if not ok:
            break
    return steps


def _memory(bench: Bench) -> str:
    bench.allocate()
    for block in (0, bench.num_blocks - 1):
        bench.write([block], [bench.content[block % len(bench.content)]])
    if (bench.rows[0] != bench.content[0]).any():
        raise StepFailed("what was written into the memory cannot be read back")
    return f"{bench.num_blocks} blocks of {bench.block_bytes} bytes"


def _register(bench: Bench) -> str:
    """Become an engine with a temporary namespace that nobody else has."""
    bench.worker.register(
        [bench.memory],
        bench.layout,
        Fingerprint(model="kvd selftest", label=bench.keys[0].hex()),
        temporary=True,
        required=True,
        timeout=bench.timeout,
    )
    bench.scheduler.wait_attached(bench.timeout)
    if not bench.worker.wait_attached(bench.timeout) or not bench.scheduler.attached:
        raise StepFailed(f"no lane has mapped the memory within {bench.timeout:g} s")
    bench.namespace_id = bench.scheduler.namespace.hex()
    own = bench.own_namespace()
    if own is None or own["engines"] != 1 or own["chunks"]["ready"] or own["chunks"]["writing"]:
        raise StepFailed(f"not in an empty namespace of its own: {own}")
    return f"namespace {bench.namespace_id[:8]}, used by nobody else"


def _fill(bench: Bench) -> str:
    bench.write(bench.source, bench.content)
    if wrong := bench.differences(bench.source):
        raise StepFailed(f"{wrong} bytes of the source are not what was to be written")
    return f"{len(bench.source)} blocks hold random bytes"


def _store(bench: Bench) -> str:
    bench.store()
    stored = len(bench.stored)
    if not bench.wait_until(bench.ready):
        ready = bench.count(LookupResult.HIT)
        raise StepFailed(f"{ready} of {stored} stored chunks can be loaded")
    return f"{len(bench.stored)} chunks of {bench.chunk_bytes} bytes"


def _poison(bench: Bench) -> str:
    """Leave the bytes in the pool alone."""
    blocks = [*bench.used(bench.source), *bench.used(bench.destination)]
    bench.poison(blocks)
    if left := sum(bench.unpoisoned(blocks)):
        raise StepFailed(f"{left} bytes of source and destination are not overwritten")
    return f"{len(blocks)} blocks of source and destination overwritten"


def _load(bench: Bench) -> str:
    bench.load()
    if same := bench.unpoisoned(bench.used(bench.destination)).count(0):
        raise StepFailed(f"nothing was copied into {same} of the blocks")
    if strayed := sum(bench.unpoisoned(bench.used(bench.source))):
        raise StepFailed(f"{strayed} bytes went into blocks that were not to be loaded")
    return f"{len(bench.stored)} chunks into other blocks"


def _compare(bench: Bench) -> str:
    """The comparison has to find a difference that is planted before its word counts."""
    blocks = bench.used(bench.destination)
    total = len(blocks) * bench.block_bytes
    if wrong := bench.differences(blocks):
        raise StepFailed(f"{wrong} of {total} loaded bytes are not what was stored")
    spoilt = bench.rows[blocks[-1]].copy()
    spoilt[-1] ^= 1
    bench.write(blocks[-1:], [spoilt])
    if (found := bench.differences(blocks)) != 1:
        raise StepFailed(f"a wrong byte was planted, and {found} were found")
    return f"{total} bytes are right, and one planted wrong byte was found"


def _measure(bench: Bench) -> str:
    for samples in bench.samples.values():
        samples.clear()
    for _ in range(ROUNDS):
        bench.scheduler.reset()
        bench.store()
        bench.wait_until(bench.ready)
        bench.load()
    for kind, samples in bench.samples.items():
        if len(samples) != ROUNDS or not all(job.bytes for job, _ in samples):
            raise StepFailed(f"{len(samples)} of {ROUNDS} {kind}s were measured")
    return f"{ROUNDS} more stores and loads"


def _evict(bench: Bench) -> str:
    bench.scheduler.reset()
    if found := bench.count(LookupResult.HIT, LookupResult.HIT_PENDING):
        raise StepFailed(f"{found} chunks can still be found")
    with bench.scheduler.prepare_load(bench.keys) as ticket:
        if ticket.keys or not len(ticket.found):
            raise StepFailed(f"{len(ticket.keys)} chunks can still be loaded")
    own = bench.own_namespace()
    if own is None or own["chunks"]["ready"]:
        raise StepFailed(f"the daemon still counts chunks: {own}")
    return f"none of {len(bench.keys)} keys is found"


def _leave(bench: Bench) -> str:
    bench.leave()
    if not bench.wait_until(lambda: bench.own_namespace() is None):
        raise StepFailed(f"the daemon keeps namespace {bench.namespace_id[:8]}")
    return "the namespace is gone, its space is given back"


STEPS: dict[str, Callable[[Bench], str]] = {
    "memory": _memory,
    "register": _register,
    "fill": _fill,
    "store": _store,
    "poison": _poison,
    "load": _load,
    "compare": _compare,
    "measure": _measure,
    "evict": _evict,
    "leave": _leave,
}


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
