"""Reports as a daemon under load gives them, for what reads reports."""

import copy
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, get_origin

import msgspec

from kvd.broker.forecast import advice
from kvd.metrics import schema
from kvd.metrics.counts import (
    DIRECTIONS,
    GET_OUTCOMES,
    PUT_OUTCOMES,
    STAGES,
    ChunkCounts,
    EventCounts,
    LaneCounts,
    LookupCounts,
    MissReason,
    TierCounts,
)

START = 1_700_000_000.0
GIB = 2**30
MODEL = "llama-3-70b"
BOUNDS = [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0]
AGES = [1.0, 60.0, 600.0, 3600.0]
HUB = "/root/.cache/huggingface/hub/models--"
REVISION = "6f6073b423013f6a7d4d9f39144961bfbfbc386b"
LONG_NAMES = {
    "a" * 27: "a" * 27,
    "vllm-llama-3-3-70b-instruct-prefill-7c9d8f6b5d-x2k4q": "vllm-llama-3-…d8f6b5d-x2k4q",
    f"{HUB}meta-llama--Llama-3.3-70B-Instruct/snapshots/{REVISION}": "Llama-3.3-70B…ruct@6f6073b4",
    f"{HUB}gpt2/snapshots/{REVISION}/": "gpt2@6f6073b4",
    "/mnt/models/shared/llama-3-70b-instruct-awq": "/mnt/models/s…-instruct-awq",
    "\N{GRINNING FACE}" * 28: "\N{GRINNING FACE}" * 13 + "…" + "\N{GRINNING FACE}" * 13,
}
"""Names and how they are shortened: by Python and by the page."""


def part(kind: type, **given: Any) -> Any:
    """A part of the report with these fields; the others are zero, empty or absent."""
    for field in fields(kind):
        if field.name not in given and field.default is field.default_factory is MISSING:
            of: Any = get_origin(field.type) or field.type
            is_part = hasattr(of, "__dataclass_fields__")
            given[field.name] = part(of) if is_part else None if of is UnionType else of()
    return kind(**given)


def histogram(bounds: list[float], *counts: int) -> dict[str, Any]:
    """A histogram with `counts` in its first buckets."""
    full = [*counts, *[0] * (len(bounds) + 1 - len(counts))]
    return {"bounds": bounds, "counts": full, "sum": float(sum(full))}


def _report(seconds: float, done: int, **given: Any) -> dict[str, Any]:
    checks = {"pool": "64 GiB are allocated", "lane host": "up", "drain": "not draining"}
    broker = part(
        schema.BrokerStatus,
        loop_lag=histogram(BOUNDS, int(100 * seconds)),
        loop_lag_max_seconds=0.002,
        requests={"Step": int(40 * seconds), "Status": int(seconds)},
        cpu_seconds=0.05 * seconds,
        open_fds=40,
        max_fds=4096,
    )
    usual: dict[str, Any] = {
        "version": "kvd 0.1.0",
        "boot_id": "0f" * 16,
        "pid": 4242,
        "host": "node-7",
        "time": START + seconds,
        "started": START,
        "runtime_dir": "/run/kvd",
        "ready": True,
        "checks": [schema.CheckStatus(name, ok=True, text=text) for name, text in checks.items()],
        "broker": broker,
        "counters": _counters(done),
    }
    report: dict[str, Any] = msgspec.to_builtins(part(schema.Report, **usual, **given))
    return report


def empty_report(seconds: float = 0.0) -> dict[str, Any]:
    """A ready daemon without engines, `seconds` after its start."""
    return _report(
        seconds,
        0,
        pool=schema.PoolStatus(64 * GIB, 64 * GIB, 64 * GIB, []),
        lanes=[_lane("host", 0)],
        sessions=schema.SessionLimit(1, 1024),
        events=[schema.EventStatus(1, START, "info", "the pool of 64 GiB is there")],
    )


def loaded_report(seconds: float = 0.0) -> dict[str, Any]:
    """Two namespaces, three engines, two lanes, at a steady load for `seconds`."""
    done = int(seconds)
    return _report(
        seconds,
        done,
        pool=schema.PoolStatus(64 * GIB, 10 * GIB, 64 * GIB, []),
        namespaces=[
            _namespace("aa" * 16, MODEL, done, 40, 30, 1, 0),
            _namespace("bb" * 16, "qwen-2.5-7b", done, 14, 9, 0, 1),
        ],
        engines=[
            _engine("llama-70b-0", "aa" * 16, 4, done),
            _engine("llama-70b-1", "aa" * 16, 4, done),
            _engine("qwen-0", "bb" * 16, 1, done),
        ],
        lanes=[_lane(name, done) for name in ("host", "cuda:" + "0f" * 16)],
        tiers=[
            _tier("disk", "disk", "disk:/var/lib/kvd,size=500GiB", done),
            _tier("mooncake", "remote", "mooncake:master=10.0.0.1:50051", done),
        ],
        sessions=schema.SessionLimit(12, 1024),
        leases=7,
        events=[
            schema.EventStatus(1, START, "info", "the pool of 64 GiB is there"),
            schema.EventStatus(2, START + 5, "info", "llama-70b-0 attached with 4 ranks"),
            schema.EventStatus(3, START + 90, "warning", "412 chunks in writing freed"),
        ],
    )


POOLS = ("-50%", "-25%", "now", "+25%", "+50%", "+100%", "+200%", "unlimited")


def forecast(*hit_ratios: float, now_gib: float = 64, **given: Any) -> dict[str, Any]:
    """`namespaces[].forecast` with these hits by size of the pool, from `-50%` to `unlimited`.

    What is missed takes 20 prefill seconds an hour for each point of hits.
    """
    parts = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, None)
    sizes = [
        {
            "pool": pool,
            "bytes": None if share is None else int(share * now_gib * GIB),
            "hit_ratio": ratio,
            "prefill_seconds_per_hour": 2000 * (1 - ratio),
        }
        for pool, share, ratio in zip(POOLS, parts, hit_ratios, strict=True)
    ]
    usual = {
        "requests": 12_031,
        "first_time": 0.38,
        "ceiling": hit_ratios[-1],
        "hit_ratio": hit_ratios[2],
        "prefill_seconds_per_token": 0.0002,
    }
    return {**usual, "sizes": sizes, **given}


STEEP = (0.18, 0.225, 0.28, 0.335, 0.39, 0.485, 0.54, 0.58)
"""Hits by size where memory pays."""


def changed(report: dict[str, Any], *path: str | int, to: Any) -> dict[str, Any]:
    """A copy with another value at `path`."""
    copied = copy.deepcopy(report)
    inner: Any = copied
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return copied


def _namespace(identity: str, model: str, done: int, held: int, *bytes_by_state: int) -> Any:
    ready, writing, draining = (gib * GIB for gib in bytes_by_state)
    return part(
        schema.NamespaceStatus,
        id=identity,
        model=model,
        engines=1,
        bytes_per_chunk=20 * 2**20,
        tokens_per_chunk=16,
        missed_tokens=missed(done, 16),
        forecast=forecast(*STEEP),
        advice=advice(msgspec.convert(forecast(*STEEP), schema.ForecastStatus)),
        num_chunks=3200,
        held_bytes=held * GIB,
        ready_bytes=ready,
        writing_bytes=writing,
        draining_bytes=draining,
        chunks=part(schema.ChunksStatus, ready=1536, lent=205, writing=51, pinned=12),
        counters=_chunks(done) | {"eviction_age": histogram(AGES, 0, 0, 10 * done)},
    )


def _engine(name: str, namespace: str, world_size: int, done: int) -> Any:
    sessions = [("scheduler", None), *(("worker", rank) for rank in range(world_size))]
    return part(
        schema.EngineStatus,
        name=name,
        attached=True,
        namespace=namespace,
        world_size=world_size,
        sessions=[
            schema.SessionStatus(
                kind=kind,
                rank=rank,
                device=None if rank is None else "host",
                state="registered",
                pid=100 + at,
                uid=1000,
                seconds=100.0,
            )
            for at, (kind, rank) in enumerate(sessions)
        ],
        counters=LookupCounts(100 * done, 75 * done, 12_800 * done, 9600 * done),
        published=schema.PublishedStatus(
            kv_events=30 * done, kv_event_snapshots=1, lag_max_seconds=0.012
        ),
    )


def _lane(device: str, done: int) -> Any:
    return part(
        schema.LaneStatus,
        device=device,
        up=True,
        state="up",
        seconds_since_heard=0.2,
        queued_jobs=3,
        oldest_job_seconds=0.01,
        pool_bytes=64 * GIB,
        usable_bytes=64 * GIB,
        counters=_lane_counts(done),
    )


def _tier(name: str, medium: str, setting: str, done: int) -> Any:
    return part(
        schema.TierStatus,
        name=name,
        setting=setting,
        keep="asked",
        medium=medium,
        shared=medium == "remote",
        described="4 threads",
        state="up",
        up=True,
        pid=4260,
        breaker="closed",
        state_seconds=3 * 86_400.0,
        usable=True,
        total_bytes=500 * GIB,
        used_bytes=100 * GIB,
        chunks=5120,
        latency_seconds=0.0004,
        bytes_per_second=2.3e9,
        counters=TierCounts(
            puts=dict.fromkeys(PUT_OUTCOMES, 0) | {"ok": 10 * done},
            gets=dict.fromkeys(GET_OUTCOMES, 0) | {"ok": 5 * done, "absent": done},
            put_bytes=2 * 10**8 * done,
            get_bytes=10**8 * done,
            put_seconds=0.05 * done,
            get_seconds=0.05 * done,
            get_latency=histogram(BOUNDS, 0, 0, 10 * done),  # type: ignore[arg-type]
        ),
    )


def _lane_counts(done: int) -> LaneCounts:
    stage = histogram(BOUNDS, 0, 10 * done, 80 * done, 10 * done)
    return LaneCounts(
        store_bytes=2 * 10**8 * done,
        load_bytes=10**9 * done,
        jobs={"store_ok": 20 * done, "load_ok": 80 * done},
        stages={f"{way}_{name}": stage for way in DIRECTIONS for name in STAGES},  # type: ignore[misc]
    )


def _counters(done: int) -> dict[str, Any]:
    lookups = LookupCounts(200 * done, 150 * done, 25_600 * done, 19_200 * done)
    sums = _chunks(done)
    for counts in (lookups, EventCounts(150 * done, 4), _lane_counts(2 * done)):
        sums |= msgspec.to_builtins(counts)
    return sums


def _chunks(done: int) -> dict[str, Any]:
    happened: dict[str, Any] = {
        "offered": 25 * done,
        "accepted": 20 * done,
        "present": 5 * done,
        "stored": 20 * done,
        "evicted": 10 * done,
        "asked": 150 * done,
        "hits": 150 * done,
        "missed": missed(done),
    }
    counts: dict[str, Any] = msgspec.to_builtins(ChunkCounts(**happened))
    return counts | {"missed_age": histogram(AGES, 0, 0, 10 * done)}


def missed(done: int, tokens: int = 1) -> dict[str, int]:
    """`counters.missed`, or the same of chunks with so many `tokens`."""
    per_second = {"never_seen": 30, "evicted": 10, "being_stored": 6, "refused": 4}
    return {reason.value: tokens * done * per_second.get(reason, 0) for reason in MissReason}
