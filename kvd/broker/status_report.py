"""The status report: the daemon's state as one plain dictionary, for every view of it.

`kvd.metrics.schema` declares every field; docs/status.md is generated from it.
"""

from dataclasses import asdict
from statistics import mean
from typing import Any

import msgspec

from kvd.broker.children import Lane
from kvd.broker.forecast import advice, forecast
from kvd.broker.operations import in_flight, peer_text
from kvd.broker.sessions import Engine
from kvd.broker.state import BrokerState, OperatorDrain
from kvd.broker.tiers.tier import TierProcess
from kvd.cache.namespaces import Namespace
from kvd.metrics import schema
from kvd.metrics.conditions import conditions
from kvd.metrics.counts import ChunkCounts
from kvd.metrics.declare import report_of
from kvd.metrics.reading import Report, Span, duration
from kvd.metrics.schema import CheckStatus
from kvd_proto.text import format_size


def status_report(
    state: BrokerState, pid: int, version: str, now: float, before: Report | None = None
) -> dict[str, Any]:
    """Return the report as `kvd status --json` prints it.

    `report_of` takes a field from the argument of its name, else from the first owner that has an
    attribute of its name. Conditions count what has risen since `before`, an earlier report of this
    boot; None: nothing has.
    """
    namespaces, usage = state.open_namespaces, state.usage()
    report = report_of(
        schema.Report,
        state,
        usage,
        state.settings,
        version=version,
        boot_id=state.boot_id.hex(),
        pid=pid,
        drain=None if state.drain is None else _drain(state, state.drain, now),
        checks=readiness_checks(state, now),
        conditions=[],
        pool=_pool(state),
        namespaces=[_namespace(state, namespace) for namespace in namespaces],
        engines=[_engine(engine, now) for engine in state.registry.engines.values()],
        lanes=[_lane(state, lane, now) for lane in state.lanes.values()],
        tiers=[_tier(tier, now) for tier in state.tiers],
        broker=report_of(
            schema.BrokerStatus,
            state.counts,
            usage,
            loop_lag_max_seconds=state.recent_lag.get(now),
        ),
        sessions={"open": len(state.registry.sessions), "limit": state.registry.max_sessions},
        leases=sum(len(namespace.table.slots.leases) for namespace in namespaces),
        counters=_totals(state),
        events=list(state.events),
    )
    report["conditions"] = msgspec.to_builtins(conditions(Span(report, before)))
    return report


def _drain(state: BrokerState, drain: OperatorDrain, now: float) -> dict[str, Any]:
    stores, leases = in_flight(state, drain.since)
    return report_of(
        schema.DrainStatus,
        drain.by,
        seconds=round(now - drain.since, 3),
        stores_in_flight=stores,
        leases_in_flight=leases,
    )


def _pool(state: BrokerState) -> dict[str, Any]:
    if state.namespaces is None:
        return asdict(schema.PoolStatus(0, 0, state.allocated_bytes, []))
    pool = state.namespaces.pool
    quotas = [
        report_of(
            schema.QuotaStatus,
            group,
            group.quota,
            held_bytes=sum(map(pool.held_bytes, group.spaces)),
        )
        for group in pool.quotas
    ]
    return report_of(schema.PoolStatus, pool, allocated_bytes=state.allocated_bytes, quotas=quotas)


def _namespace(state: BrokerState, namespace: Namespace) -> dict[str, Any]:
    """Return the report's entry of a namespace."""
    table, directory, geometry = namespace.table, namespace.directory, namespace.geometry
    chunks_by_state, tokens_per_chunk = table.slots.stats(), namespace.tokens_per_chunk
    states = ("ready", "writing", "draining")
    forecast_status = _forecast(state, namespace)
    return report_of(
        schema.NamespaceStatus,
        namespace,
        geometry,
        table,
        id=namespace.id.hex(),
        model=namespace.model,
        num_chunks=geometry.num_slots,
        tier_chunks=0 if directory.tiers is None else len(directory.tiers),
        directory_bytes=directory.header.total_bytes,
        **{f"{name}_bytes": chunks_by_state[name] * geometry.bytes_per_chunk for name in states},
        changes=directory.changes.head,
        chunks=chunks_by_state,
        forecast=forecast_status,
        advice=None if forecast_status is None else advice(forecast_status),
        counters=table.counts,
        missed_tokens={}
        if tokens_per_chunk is None
        else {reason: count * tokens_per_chunk for reason, count in table.counts.missed.items()},
    )


def _forecast(state: BrokerState, namespace: Namespace) -> schema.ForecastStatus | None:
    if state.namespaces is None:
        return None
    engines = [e for e in state.registry.engines.values() if e.namespace is namespace]
    seconds = [e.prefill_seconds for e in engines if e.prefill_seconds is not None]
    return forecast(namespace, state.namespaces.pool, mean(seconds) if seconds else None)


def _engine(engine: Engine, now: float) -> dict[str, Any]:
    return report_of(
        schema.EngineStatus,
        engine,
        namespace=engine.namespace.id.hex() if engine.namespace else None,
        missing_ranks=list(engine.missing_ranks),
        sessions=[
            report_of(
                schema.SessionStatus,
                session,
                session.peer,
                session.registration,
                seconds=round(now - session.hello_at, 3),
            )
            for session in engine.sessions.values()
        ],
        counters=engine.lookups,
        published=report_of(
            schema.PublishedStatus, engine.published, lag_max_seconds=engine.publish_lag.get(now)
        ),
    )


def _lane(state: BrokerState, lane: Lane, now: float) -> dict[str, Any]:
    return report_of(
        schema.LaneStatus,
        lane,
        lane.child,
        lane.pong,
        seconds_since_heard=round(now - lane.child.heard_at, 3) if lane.up else None,
        oldest_job_seconds=lane.pong.oldest_job_ns / 1e9,
        pool_bytes=state.pool_bytes or 0,
        usable_bytes=min(lane.usable_bytes, state.allocated_bytes) if lane.up else 0,
        pin_error=lane.pool_error,
    )


def _tier(tier: TierProcess, now: float) -> dict[str, Any]:
    breaker = tier.breaker
    return report_of(
        schema.TierStatus,
        tier,
        tier.setting,
        tier.info,
        setting=tier.setting.text,
        state="up" if tier.up else "down" if tier.child.pid else "starting",
        pid=tier.child.pid if tier.child.up else 0,
        stopped=tier.child.stopped,
        breaker=breaker.state.value,
        state_seconds=round(now - breaker.since, 3),
        usable=tier.in_use,
        unopened_seconds=round(tier.unopened_seconds(now), 3),
        set_aside_seconds=0.0 if breaker.closed else round(now - breaker.since, 3),
        full=now < tier.full_until,
        last_error=tier.child.last_error or breaker.reason,
        queued_put_bytes=tier.put_bytes,
        queued_get_bytes=tier.get_bytes,
        latency_seconds=tier.speed.latency_us / 1e6,
        bytes_per_second=float(tier.speed.bytes_per_second),
        counters=tier.counts,
    )


def _totals(state: BrokerState) -> dict[str, Any]:
    lanes = sum((lane.counters for lane in state.lanes.values()), state.gone_lanes)
    chunks = ChunkCounts() if state.namespaces is None else state.namespaces.closed_counts
    chunks = sum((namespace.table.counts for namespace in state.open_namespaces), chunks)
    totals: dict[str, Any] = {}
    for counts in (chunks, state.lookups, state.kv_events, lanes):
        totals |= msgspec.to_builtins(counts)
    return totals


# ----------------------------------------------------------------- readiness

_UNSIZED = "its size is decided by the first engine (cpu_bytes = auto)"


def readiness_checks(state: BrokerState, now: float) -> list[CheckStatus]:
    """Return the readiness checks, in the order in which they become ok.

    All are ok exactly if `BrokerState.ready`. A missing engine fails none: a pool whose size the
    first engine decides is ok, and so is a lane that starts with its first worker.
    """
    return [
        _pool_check(state),
        *(_lane_check(state, lane, now) for lane in state.lanes.values()),
        CheckStatus("drain", not state.draining, _drain_text(state)),
    ]


def _pool_check(state: BrokerState) -> CheckStatus:
    total = state.pool_bytes
    if total is None:
        return CheckStatus("pool", ok=True, text=_UNSIZED)
    pinning = state.pinning
    pinned = f" and pinned by {len(pinning)} lanes" if len(pinning) > 1 else " and pinned"
    if state.pool_usable:
        text = f"{format_size(total)} are allocated{pinned if pinning else ''}"
        return CheckStatus("pool", ok=True, text=text, percent=100.0)
    percent = min(100.0 * state.pinned_bytes / total, 99.9)
    failed = [lane for lane in pinning if lane.pool_error]
    if failed:
        text = f"lane {failed[0].device}: {failed[0].pool_error}"
        return CheckStatus("pool", ok=False, text=text, percent=percent)
    if not state.pool_ready:
        text = f"{format_size(state.allocated_bytes)} of {format_size(total)} are allocated"
    else:
        slowest = min(pinning, key=lambda lane: lane.usable_bytes)
        text = (
            f"lane {slowest.device} has pinned {format_size(slowest.usable_bytes)} of"
            f" {format_size(total)}"
        )
    seconds_left = state.progress.seconds_left(total)
    estimate = f", about {duration(seconds_left)} left" if seconds_left else ""
    return CheckStatus(
        "pool", ok=False, text=f"{text} ({percent:.0f} %{estimate})", percent=percent
    )


def _drain_text(state: BrokerState) -> str:
    if state.stopping:
        return "stopping"
    if state.drain is not None:
        return f"drained by {peer_text(state.drain.by)}; kvd resume undoes that"
    return "not draining"


def _lane_check(state: BrokerState, lane: Lane, now: float) -> CheckStatus:
    return CheckStatus(
        f"lane {lane.device}", not state.is_missing(lane), _lane_text(state, lane, now)
    )


def _lane_text(state: BrokerState, lane: Lane, now: float) -> str:
    if lane.ending:
        return "ending"
    if lane.child.stopped:
        return lane.child.stopped
    if lane.up:
        jobs = lane.pong.queued_jobs
        text = f"up, last heard {max(0.0, now - lane.child.heard_at):.1f} s ago, {jobs} jobs queued"
        if jobs:
            text += f", the oldest for {lane.pong.oldest_job_ns / 1e9:.1f} s"
        return text
    if state.pool_bytes is None:
        return "starts when the pool's size is known"
    if lane.child.last_error:
        return f"lost ({lane.child.last_error}); it is started again"
    return "starting"
