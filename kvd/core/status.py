"""The daemon's state as one plain dictionary: the model of `kvd status --json`."""

from typing import Any

from kvd.core.lanes import Lane, add_counters
from kvd.core.operations import by, drain_report
from kvd.core.sessions import Engine
from kvd.core.state import BrokerState
from kvd.state.namespaces import Namespace


def status_report(state: BrokerState, pid: int, version: str, now: float) -> dict[str, Any]:
    """Everything an operator's script may want; see docs/status.md."""
    namespaces = list(state.namespaces) if state.namespaces is not None else []
    return {
        "version": version,
        "boot_id": state.boot_id.hex(),
        "pid": pid,
        "ready": state.ready,
        "not_ready": _reasons(state),
        "draining": state.draining,
        "drain": drain_report(state, now),
        "pool": state.namespaces.stats() if state.namespaces is not None else {"cpu_bytes": 0},
        "namespaces": [_namespace(namespace) for namespace in namespaces],
        "engines": [_engine(engine) for engine in state.registry.engines.values()],
        "lanes": [_lane(lane, now) for lane in state.lanes.values()],
        "counters": _counters(state, namespaces),
    }


def _reasons(state: BrokerState) -> list[str]:
    reasons = [f"lane {lane.device} is not up" for lane in state.lanes_missing]
    if not state.pool_ready:
        reasons.append(f"{state.allocated} bytes of the pool's memory are there yet")
    if state.stopping:
        reasons.append("stopping")
    if state.drain is not None:
        reasons.append(f"drained by {by(state.drain.by)}; kvd resume undoes that")
    return reasons


def _namespace(namespace: Namespace) -> dict[str, Any]:
    geometry = namespace.geometry
    return {
        "id": namespace.id.hex(),
        "model": namespace.label,
        "engines": namespace.engines,
        "world_size": geometry.world_size,
        "replicated": geometry.replicated,
        "bytes_per_chunk": sum(geometry.slot_bytes),
        "num_chunks": geometry.num_slots,
        "chunks": namespace.table.stats(),
    }


def _engine(engine: Engine) -> dict[str, Any]:
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
            }
            for session in engine.sessions.values()
        ],
    }


def _lane(lane: Lane, now: float) -> dict[str, Any]:
    return {
        "device": lane.device,
        "up": lane.up,
        "pid": lane.pid,
        "incarnation": lane.incarnation,
        "restarts": lane.restarts,
        "last_error": lane.last_error,
        "seconds_since_heard": round(now - lane.last_seen, 3) if lane.up else None,
        "queued_jobs": lane.pong.queued_jobs,
        "bytes_in_flight": lane.pong.bytes_in_flight,
        "workers": lane.pong.workers,
    }


def _counters(state: BrokerState, namespaces: list[Namespace]) -> dict[str, Any]:
    moved, restarts = state.gone_counters, state.gone_restarts
    for lane in state.lanes.values():
        moved = add_counters(moved, lane.counters)
        restarts += lane.restarts
    totals: dict[str, Any] = {
        "store_bytes": moved.store_bytes,
        "load_bytes": moved.load_bytes,
        "store_seconds": moved.store_ns / 1e9,
        "load_seconds": moved.load_ns / 1e9,
        "lane_restarts": restarts,
        "lane_dropped_frames": moved.dropped_frames,
        "lane_dropped_replies": moved.dropped_replies,
        "jobs": dict(moved.jobs),
    }
    for namespace in namespaces:
        for name, value in namespace.table.counters().items():
            totals[name] = totals.get(name, 0) + value
    return totals
