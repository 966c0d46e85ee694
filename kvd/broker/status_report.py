"""The daemon's state as one plain dictionary: the model of everything that shows it.

`kvd status --json`, the health endpoint, the page and the metrics are made from
it; docs/status.md documents every field.
"""

from collections import Counter
from dataclasses import asdict
from typing import Any

from kvd.broker.lanes import Lane, add_counters, histogram
from kvd.broker.measures import Surroundings
from kvd.broker.operations import drain_report
from kvd.broker.readiness import checks
from kvd.broker.sessions import Engine
from kvd.broker.state import BrokerState
from kvd.cache.counters import Counters
from kvd.cache.namespaces import Namespace
from kvd.wire.link import LaneCounters


def status_report(state: BrokerState, pid: int, version: str, now: float) -> dict[str, Any]:
    """Everything an operator's script may want; see docs/status.md."""
    namespaces = list(state.namespaces) if state.namespaces is not None else []
    around = state.surroundings()
    checked = checks(state, now)
    return {
        "version": version,
        "boot_id": state.boot_id.hex(),
        "pid": pid,
        "host": around.host,
        "time": around.time,
        "started": state.measures.started,
        "runtime_dir": state.settings.runtime_dir,
        "ready": state.ready,
        "not_ready": [check.in_words for check in checked if not check.ok],
        "draining": state.draining,
        "drain": drain_report(state, now),
        "checks": [asdict(check) for check in checked],
        "pool": _pool(state),
        "namespaces": [_namespace(namespace) for namespace in namespaces],
        "engines": [_engine(engine, now) for engine in state.registry.engines.values()],
        "lanes": [_lane(state, lane, now) for lane in state.lanes.values()],
        "broker": _broker(state, around, now),
        "sessions": {
            "open": len(state.registry.sessions),
            "limit": state.registry.max_sessions,
        },
        "leases": sum(len(namespace.table.slots.leases) for namespace in namespaces),
        "counters": _counters(state, namespaces),
        "events": state.events.recent(),
    }


def _pool(state: BrokerState) -> dict[str, Any]:
    figures = {"cpu_bytes": 0, "free_bytes": 0, "namespaces": {}, "quotas": []}
    if state.namespaces is not None:
        figures = state.namespaces.stats()
    return {**figures, "allocated_bytes": state.allocated}


def _namespace(namespace: Namespace) -> dict[str, Any]:
    geometry, table = namespace.geometry, namespace.table
    return {
        "id": namespace.id.hex(),
        "model": namespace.label,
        "engines": namespace.engines,
        "world_size": geometry.world_size,
        "replicated": geometry.replicated,
        "bytes_per_chunk": geometry.bytes_per_chunk,
        "tokens_per_chunk": namespace.tokens_per_chunk,
        "num_chunks": geometry.num_slots,
        "chunks": table.slots.stats(),
        "counters": table.counters(),
        "eviction_age": table.ages.at_eviction.as_dict(),
    }


def _engine(engine: Engine, now: float) -> dict[str, Any]:
    return {
        "name": engine.name,
        "attached": engine.attached,
        "namespace": engine.namespace.id.hex() if engine.namespace else None,
        "world_size": engine.world_size,
        "missing_ranks": list(engine.missing_ranks),
        "sessions": [
            {
                "kind": session.kind,
                "rank": session.registration.rank if session.registration else None,
                "device": session.registration.device if session.registration else None,
                "state": str(session.state),
                "pid": session.peer.pid,
                "uid": session.peer.uid,
                "seconds": round(now - session.since, 3),
            }
            for session in engine.sessions.values()
        ],
        "lookups": asdict(engine.lookups),
    }


def _lane(state: BrokerState, lane: Lane, now: float) -> dict[str, Any]:
    pong = lane.pong
    return {
        "device": lane.device,
        "up": lane.up,
        "state": lane.state,
        "pid": lane.pid,
        "incarnation": lane.incarnation,
        "restarts": lane.restarts,
        "last_error": lane.last_error,
        "seconds_since_heard": round(now - lane.last_seen, 3) if lane.up else None,
        "queued_jobs": pong.queued_jobs,
        "oldest_job_seconds": pong.oldest_job_ns / 1e9,
        "bytes_in_flight": pong.bytes_in_flight,
        "workers": pong.workers,
        "pool_bytes": state.pool_bytes or 0,
        "usable_bytes": min(lane.usable_bytes, state.allocated) if lane.up else 0,
        "pins": lane.pins,
        "pin_error": lane.pool_error,
        "counters": _moved(lane.counters),
        "stages": {
            way: {name: histogram(spread).as_dict() for name, spread in names.items()}
            for way, names in lane.counters.stages.items()
        },
    }


def _moved(counters: LaneCounters) -> dict[str, Any]:
    return {
        "store_bytes": counters.store_bytes,
        "load_bytes": counters.load_bytes,
        "store_seconds": counters.store_ns / 1e9,
        "load_seconds": counters.load_ns / 1e9,
        "jobs": dict(counters.jobs),
        "dropped_frames": counters.dropped_frames,
        "dropped_replies": counters.dropped_replies,
        "limits": dict(counters.limits),
    }


def _broker(state: BrokerState, around: Surroundings, now: float) -> dict[str, Any]:
    measures = state.measures
    return {
        "loop_lag": measures.loop_lag.as_dict(),
        "loop_lag_max_seconds": measures.recent_lag.get(now),
        "requests": dict(measures.requests),
        "refusals": dict(measures.refusals),
        "limits": dict(measures.limits),
        "dropped_frames": around.dropped_frames,
        "cpu_seconds": around.cpu_seconds,
        "rss_bytes": around.rss_bytes,
        "open_fds": around.open_fds,
        "max_fds": around.max_fds,
    }


def _counters(state: BrokerState, namespaces: list[Namespace]) -> dict[str, Any]:
    moved, restarts = state.gone_counters, state.gone_restarts
    for lane in state.lanes.values():
        moved = add_counters(moved, lane.counters)
        restarts += lane.restarts
    figures = _moved(moved)
    chunks = Counter(asdict(Counters()))  # all fields, whether there are namespaces or not
    if state.namespaces is not None:
        chunks.update(state.namespaces.closed_counters)
    for namespace in namespaces:
        chunks.update(namespace.table.counters())
    lookups = state.measures.lookups
    return {
        "store_bytes": figures["store_bytes"],
        "load_bytes": figures["load_bytes"],
        "store_seconds": figures["store_seconds"],
        "load_seconds": figures["load_seconds"],
        "lane_restarts": restarts,
        "lane_dropped_frames": figures["dropped_frames"],
        "lane_dropped_replies": figures["dropped_replies"],
        "jobs": figures["jobs"],
        **chunks,
        "lookup_chunks": lookups.chunks,
        "hit_chunks": lookups.hit_chunks,
        "lookup_tokens": lookups.tokens,
        "hit_tokens": lookups.hit_tokens,
    }
