"""Reports as a daemon under load gives them, for what reads reports."""

import copy
from typing import Any

import msgspec

from kvd.metrics.counts import DIRECTIONS, STAGES, ChunkCounts, LaneCounts, LookupCounts

BOOT = "0f" * 16
START = 1_700_000_000.0
GIB = 2**30
MODEL = "llama-3-70b"
BOUNDS = [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0]
AGES = [1.0, 60.0, 600.0, 3600.0]


def histogram(bounds: list[float], *counts: int) -> dict[str, Any]:
    """A histogram with `counts` in its first buckets."""
    full = [*counts, *[0] * (len(bounds) + 1 - len(counts))]
    return {"bounds": bounds, "counts": full, "sum": float(sum(full))}


def empty_report(seconds: float = 0.0) -> dict[str, Any]:
    """A ready daemon without engines, `seconds` after its start."""
    return {
        "version": "kvd 0.1.0",
        "boot_id": BOOT,
        "pid": 4242,
        "host": "node-7",
        "time": START + seconds,
        "started": START,
        "runtime_dir": "/run/kvd",
        "ready": True,
        "draining": False,
        "checks": [
            _check("pool", "64 GiB are allocated"),
            _check("lane host", "up"),
            _check("drain", "not draining"),
        ],
        "conditions": [],
        "pool": {
            "cpu_bytes": 64 * GIB,
            "free_bytes": 64 * GIB,
            "quotas": [],
            "allocated_bytes": 64 * GIB,
        },
        "namespaces": [],
        "engines": [],
        "lanes": [_lane("host", 0)],
        "broker": {
            "loop_lag": histogram(BOUNDS, int(100 * seconds)),
            "loop_lag_max_seconds": 0.002,
            "requests": {"PrepareStore": int(40 * seconds), "Status": int(seconds)},
            "refusals": {},
            "limits": {},
            "dropped_frames": 0,
            "cpu_seconds": 0.05 * seconds,
            "rss_bytes": 90 * 2**20,
            "open_fds": 40,
            "max_fds": 4096,
        },
        "sessions": {"open": 1, "limit": 1024},
        "leases": 0,
        "counters": _counters(0),
        "events": [_event(1, 0.0, "info", "the pool of 64 GiB is there")],
    }


def loaded_report(seconds: float = 0.0) -> dict[str, Any]:
    """Two namespaces, three engines, three lanes, at a steady load for `seconds`."""
    report = empty_report(seconds)
    done = int(seconds)
    report["pool"] |= {
        "free_bytes": 10 * GIB,
    }
    report["namespaces"] = [
        _namespace("aa" * 16, MODEL, 4, done) | _space(40, 30, 1, 0),
        _namespace("bb" * 16, "qwen-2.5-7b", 1, done) | _space(14, 9, 0, 1),
    ]
    report["engines"] = [
        _engine("llama-70b-0", "aa" * 16, 4, done),
        _engine("llama-70b-1", "aa" * 16, 4, done),
        _engine("qwen-0", "bb" * 16, 1, done),
    ]
    report["lanes"] = [_lane(name, done) for name in ("host", "cuda:" + "0f" * 16)]
    report["sessions"]["open"] = 12
    report["leases"] = 7
    report["counters"] = _counters(done)
    report["events"] += [
        _event(2, 5.0, "info", "engine llama-70b-0 attached with 4 ranks"),
        _event(3, 90.0, "warning", "engine llama-70b rank 3 gone; 412 chunks in writing freed"),
    ]
    return report


def changed(report: dict[str, Any], *path: str | int, to: Any) -> dict[str, Any]:
    """A copy with another value at `path`."""
    copied = copy.deepcopy(report)
    part: Any = copied
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = to
    return copied


def _check(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "ok": True, "text": text, "percent": None}


def _event(number: int, seconds: float, level: str, text: str) -> dict[str, Any]:
    return {"number": number, "time": START + seconds, "level": level, "text": text}


def _space(held: int, ready: int, writing: int, draining: int) -> dict[str, Any]:
    return {
        "held_bytes": held * GIB,
        "directory_bytes": 2**20,
        "ready_bytes": ready * GIB,
        "writing_bytes": writing * GIB,
        "draining_bytes": draining * GIB,
    }


def _namespace(identity: str, model: str, world_size: int, done: int) -> dict[str, Any]:
    return {
        "id": identity,
        "model": model,
        "engines": 1,
        "world_size": world_size,
        "replicated": False,
        "bytes_per_chunk": 20 * 2**20,
        "num_chunks": 3200,
        "chunks": {"ready": 1536, "writing": 51, "draining": 0, "pinned": 12, "doomed": 0},
        "counters": _counters(done) | {"eviction_age": histogram(AGES, 0, 0, 10 * done)},
        "tokens_per_chunk": 128,
    }


def _engine(name: str, namespace: str, world_size: int, done: int) -> dict[str, Any]:
    sessions = [("scheduler", None), *(("worker", rank) for rank in range(world_size))]
    return {
        "name": name,
        "attached": True,
        "namespace": namespace,
        "world_size": world_size,
        "missing_ranks": [],
        "sessions": [
            {
                "kind": kind,
                "rank": rank,
                "device": None if rank is None else "host",
                "state": "registered",
                "pid": 100 + index,
                "uid": 1000,
                "seconds": 100.0,
            }
            for index, (kind, rank) in enumerate(sessions)
        ],
        "counters": {
            "lookup_chunks": 100 * done,
            "hit_chunks": 75 * done,
            "lookup_tokens": 12_800 * done,
            "hit_tokens": 9600 * done,
        },
    }


def _lane(device: str, done: int) -> dict[str, Any]:
    return {
        "device": device,
        "up": True,
        "state": "up",
        "pid": 4250,
        "incarnation": 1,
        "last_error": "",
        "seconds_since_heard": 0.2,
        "queued_jobs": 3,
        "oldest_job_seconds": 0.01,
        "bytes_in_flight": 20 * 2**20,
        "workers": 4,
        "pool_bytes": 64 * GIB,
        "usable_bytes": 64 * GIB,
        "pins": device != "host",
        "pin_error": "",
        "counters": {
            "store_bytes": 2 * 10**8 * done,
            "load_bytes": 10**9 * done,
            "store_seconds": 0.01 * done,
            "load_seconds": 0.05 * done,
            "jobs": {"store_ok": 20 * done, "load_ok": 80 * done},
            "dropped_frames": 0,
            "dropped_replies": 0,
            "limits": {},
            "restarts": 0,
            "stages": _stages(done),
        },
    }


def _stages(done: int) -> dict[str, Any]:
    return {
        f"{way}_{name}": histogram(BOUNDS, 0, 10 * done, 80 * done, 10 * done)
        for way in DIRECTIONS
        for name in STAGES
    }


def _counters(done: int) -> dict[str, Any]:
    zeros: dict[str, Any] = {}
    for counts in (ChunkCounts(), LookupCounts(), LaneCounts()):
        zeros |= msgspec.to_builtins(counts)
    return zeros | {
        "store_bytes": 4 * 10**8 * done,
        "load_bytes": 2 * 10**9 * done,
        "store_seconds": 0.02 * done,
        "load_seconds": 0.1 * done,
        "jobs": {"store_ok": 40 * done, "load_ok": 160 * done},
        "stages": _stages(2 * done),
        "offered": 25 * done,
        "accepted": 20 * done,
        "present": 5 * done,
        "stored": 20 * done,
        "evicted": 10 * done,
        "asked": 150 * done,
        "hits": 150 * done,
        "lookup_chunks": 200 * done,
        "hit_chunks": 150 * done,
        "lookup_tokens": 25_600 * done,
        "hit_tokens": 19_200 * done,
    }
