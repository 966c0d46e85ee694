"""The daemon's state as one plain dictionary: the model of everything that shows it.

`kvd.metrics.schema` declares every field; docs/status.md is generated from that.
"""

from dataclasses import fields
from typing import Any

import msgspec

from kvd.broker.lanes import Lane
from kvd.broker.operations import drain_report
from kvd.broker.readiness import checks
from kvd.broker.sessions import Engine
from kvd.broker.state import BrokerState
from kvd.cache.namespaces import Namespace
from kvd.metrics import schema
from kvd.metrics.conditions import conditions
from kvd.metrics.counts import BrokerCounts, ChunkCounts, LaneCounts, ProcessUsage
from kvd.metrics.history import Report, Span


def status_report(
    state: BrokerState, pid: int, version: str, now: float, before: Report | None = None
) -> dict[str, Any]:
    """Return the report as `kvd status --json` prints it.

    Conditions that are changes are looked for since the report `before`.
    """
    namespaces = list(state.namespaces) if state.namespaces is not None else []
    usage = state.usage()
    report = schema.Report(
        version=version,
        boot_id=state.boot_id.hex(),
        pid=pid,
        host=usage.host,
        time=usage.time,
        started=state.started,
        runtime_dir=state.settings.runtime_dir,
        ready=state.ready,
        draining=state.draining,
        drain=drain_report(state, now),
        checks=checks(state, now),
        conditions=[],
        pool=_pool(state),
        namespaces=list(map(_namespace, namespaces)),
        engines=[_engine(engine, now) for engine in state.registry.engines.values()],
        lanes=[_lane(state, lane, now) for lane in state.lanes.values()],
        broker=_broker(state, usage, now),
        sessions=schema.Sessions(
            open=len(state.registry.sessions), limit=state.registry.max_sessions
        ),
        leases=sum(len(namespace.table.slots.leases) for namespace in namespaces),
        counters=_totals(state, namespaces),
        events=list(state.events),
    )
    found: dict[str, Any] = msgspec.to_builtins(report)
    found["conditions"] = msgspec.to_builtins(conditions(Span(found, before)))
    return found


def _pool(state: BrokerState) -> schema.Pool:
    if state.namespaces is None:
        return schema.Pool(0, 0, state.allocated, [])
    pool = state.namespaces.pool
    return schema.Pool(
        cpu_bytes=pool.cpu_bytes,
        free_bytes=pool.free_bytes,
        allocated_bytes=state.allocated,
        quotas=[
            schema.Quota(
                model=group.model,
                floor_bytes=group.quota.floor_bytes,
                cap_bytes=group.quota.cap_bytes,
                held_bytes=sum(map(pool.held_bytes, group.spaces)),
            )
            for group in pool.quotas
        ],
    )


def _namespace(namespace: Namespace) -> schema.Namespace:
    geometry, chunks = namespace.geometry, namespace.table.slots.stats()
    nbytes = geometry.bytes_per_chunk
    return schema.Namespace(
        id=namespace.id.hex(),
        model=namespace.label,
        engines=namespace.engines,
        world_size=geometry.world_size,
        replicated=geometry.replicated,
        bytes_per_chunk=nbytes,
        tokens_per_chunk=namespace.tokens_per_chunk,
        num_chunks=geometry.num_slots,
        held_bytes=namespace.table.held_bytes,
        directory_bytes=namespace.directory.header.total_bytes,
        ready_bytes=chunks["ready"] * nbytes,
        writing_bytes=chunks["writing"] * nbytes,
        draining_bytes=chunks["draining"] * nbytes,
        chunks=schema.Chunks(**chunks),
        counters=namespace.table.counts,
    )


def _engine(engine: Engine, now: float) -> schema.Engine:
    return schema.Engine(
        name=engine.name,
        attached=engine.attached,
        namespace=engine.namespace.id.hex() if engine.namespace else None,
        world_size=engine.world_size,
        missing_ranks=list(engine.missing_ranks),
        sessions=[
            schema.SessionOfEngine(
                kind=session.kind,
                rank=session.registration.rank if session.registration else None,
                device=session.registration.device if session.registration else None,
                state=session.state,
                pid=session.peer.pid,
                uid=session.peer.uid,
                seconds=round(now - session.since, 3),
            )
            for session in engine.sessions.values()
        ],
        counters=engine.lookups,
    )


def _lane(state: BrokerState, lane: Lane, now: float) -> schema.Lane:
    pong = lane.pong
    return schema.Lane(
        device=lane.device,
        up=lane.up,
        state=lane.state,
        pid=lane.pid,
        incarnation=lane.incarnation,
        last_error=lane.last_error,
        seconds_since_heard=round(now - lane.last_seen, 3) if lane.up else None,
        queued_jobs=pong.queued_jobs,
        oldest_job_seconds=pong.oldest_job_ns / 1e9,
        bytes_in_flight=pong.bytes_in_flight,
        workers=pong.workers,
        pool_bytes=state.pool_bytes or 0,
        usable_bytes=min(lane.usable_bytes, state.allocated) if lane.up else 0,
        pins=lane.pins,
        pin_error=lane.pool_error,
        counters=lane.counters,
    )


def _broker(state: BrokerState, usage: ProcessUsage, now: float) -> schema.Broker:
    return schema.Broker(
        **{each.name: getattr(state.counts, each.name) for each in fields(BrokerCounts)},
        loop_lag_max_seconds=state.recent_lag.get(now),
        cpu_seconds=usage.cpu_seconds,
        rss_bytes=usage.rss_bytes,
        open_fds=usage.open_fds,
        max_fds=usage.max_fds,
    )


def _totals(state: BrokerState, namespaces: list[Namespace]) -> dict[str, Any]:
    lanes, chunks = LaneCounts(), ChunkCounts()
    lanes.add(state.gone_lanes)
    for lane in state.lanes.values():
        lanes.add(lane.counters)
    if state.namespaces is not None:
        chunks.add(state.namespaces.closed_counts)
    for namespace in namespaces:
        chunks.add(namespace.table.counts)
    totals: dict[str, Any] = {}
    for counts in (chunks, state.lookups, lanes):
        totals |= msgspec.to_builtins(counts)
    return totals
