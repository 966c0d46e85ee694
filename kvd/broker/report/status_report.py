"""The daemon's state as one plain dictionary: the model of everything that shows it.

`kvd.metrics.schema` declares every field; docs/status.md is generated from that.
"""

from dataclasses import fields
from statistics import mean
from typing import Any

import msgspec

from kvd.broker.engines.lanes import Lane
from kvd.broker.engines.sessions import Engine
from kvd.broker.report.forecast import forecast
from kvd.broker.report.kv_events import Published
from kvd.broker.requests.operations import by, drain_report
from kvd.broker.state import BrokerState
from kvd.broker.tiers.tier import Tier
from kvd.cache.namespaces import Namespace
from kvd.machine.process import ProcessUsage
from kvd.metrics import schema
from kvd.metrics.advice import advice
from kvd.metrics.conditions import conditions
from kvd.metrics.counts import BrokerCounts, ChunkCounts, EventCounts, LaneCounts
from kvd.metrics.history import Report, Span
from kvd.metrics.schema import Check
from kvd.metrics.words import duration
from kvd_proto.sizes import format_size


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
        namespaces=[_namespace(state, namespace) for namespace in namespaces],
        engines=[_engine(engine, now) for engine in state.registry.engines.values()],
        lanes=[_lane(state, lane, now) for lane in state.lanes.values()],
        tiers=[_tier(tier, now) for tier in state.tiers],
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


def _namespace(state: BrokerState, namespace: Namespace) -> schema.Namespace:
    geometry, chunks = namespace.geometry, namespace.table.slots.stats()
    nbytes, tiers = geometry.bytes_per_chunk, namespace.directory.tiers
    foreseen = _forecast(state, namespace)
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
        tier_chunks=0 if tiers is None else len(tiers),
        directory_bytes=namespace.directory.header.total_bytes,
        ready_bytes=chunks["ready"] * nbytes,
        writing_bytes=chunks["writing"] * nbytes,
        draining_bytes=chunks["draining"] * nbytes,
        changes=namespace.directory.changes.head,
        chunks=schema.Chunks(**chunks),
        forecast=foreseen,
        advice=None if foreseen is None else advice(foreseen),
        counters=namespace.table.counts,
        missed_tokens=_missed_tokens(namespace),
    )


def _forecast(state: BrokerState, namespace: Namespace) -> schema.Forecast | None:
    if state.namespaces is None:
        return None
    engines = [one for one in state.registry.engines.values() if one.namespace is namespace]
    seconds = [one.prefill_seconds for one in engines if one.prefill_seconds is not None]
    return forecast(namespace, state.namespaces.pool, mean(seconds) if seconds else None)


def _missed_tokens(namespace: Namespace) -> dict[str, int]:
    tokens = namespace.tokens_per_chunk
    if tokens is None:
        return {}
    return {reason: count * tokens for reason, count in namespace.table.counts.missed.items()}


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
        published=_published(engine.published, now),
    )


def _published(published: Published, now: float) -> schema.Published:
    counts = {each.name: getattr(published.counts, each.name) for each in fields(EventCounts)}
    return schema.Published(**counts, lag_max_seconds=published.lag.get(now))


def _lane(state: BrokerState, lane: Lane, now: float) -> schema.Lane:
    pong = lane.pong
    return schema.Lane(
        device=lane.device,
        up=lane.up,
        state=lane.state,
        pid=lane.child.pid,
        incarnation=lane.incarnation,
        last_error=lane.child.last_error,
        seconds_since_heard=round(now - lane.child.heard_at, 3) if lane.up else None,
        queued_jobs=pong.queued_jobs,
        oldest_job_seconds=pong.oldest_job_ns / 1e9,
        bytes_in_flight=pong.bytes_in_flight,
        workers=pong.workers,
        pool_bytes=state.pool_bytes or 0,
        usable_bytes=min(lane.usable_bytes, state.allocated) if lane.up else 0,
        pins=lane.pins,
        pin_error=lane.pool_error,
        pinned_bytes=pong.pinned_bytes,
        counters=lane.counters,
    )


def _tier(tier: Tier, now: float) -> schema.Tier:
    return schema.Tier(
        name=tier.name,
        setting=tier.setting.text,
        keep=tier.setting.keep,
        medium=tier.info.medium,
        shared=tier.info.shared,
        described=tier.described,
        state="up" if tier.up else "down" if tier.child.pid else "starting",
        up=tier.up,
        pid=tier.child.pid if tier.child.up else 0,
        breaker=tier.breaker.state.value,
        state_seconds=round(now - tier.breaker.changed_at, 3),
        usable=tier.in_use,
        unopened_seconds=round(tier.unopened_seconds(now), 3),
        set_aside_seconds=0.0 if tier.breaker.closed else round(now - tier.breaker.opened_at, 3),
        full=now < tier.full_until,
        last_error=tier.child.last_error or tier.breaker.why,
        total_bytes=tier.total_bytes,
        used_bytes=tier.used_bytes,
        chunks=tier.chunks,
        queued_put_bytes=tier.put_bytes,
        queued_get_bytes=tier.get_bytes,
        latency_seconds=tier.pace.latency_us / 1e6,
        bytes_per_second=float(tier.pace.bytes_per_second),
        counters=tier.counts,
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
    for counts in (chunks, state.lookups, state.kv_events, lanes):
        totals |= msgspec.to_builtins(counts)
    return totals


# ----------------------------------------------------------------- readiness

_UNSIZED = "its size is decided by the first engine (cpu_bytes = auto)"


def checks(state: BrokerState, now: float) -> list[Check]:
    """What must hold for the daemon to be ready, in the order in which it comes to hold.

    All are ok exactly where `BrokerState.ready`. An engine that is absent fails nothing: neither
    a pool whose size the first engine decides, nor a lane that starts with its first worker.
    """
    return [
        _pool_check(state),
        *(_lane_check(state, lane, now) for lane in state.lanes.values()),
        Check("drain", not state.draining, _drain_text(state)),
    ]


def _pool_check(state: BrokerState) -> Check:
    total = state.pool_bytes
    if total is None:
        return Check("pool", ok=True, text=_UNSIZED)
    pinning = state.pinning
    pinned = f" and pinned by {len(pinning)} lanes" if len(pinning) > 1 else " and pinned"
    if state.pool_usable:
        text = f"{format_size(total)} are allocated{pinned if pinning else ''}"
        return Check("pool", ok=True, text=text, percent=100.0)
    percent = min(100.0 * state.pinned_bytes / total, 99.9)
    failed = [lane for lane in pinning if lane.pool_error]
    if failed:
        text = f"lane {failed[0].device}: {failed[0].pool_error}"
        return Check("pool", ok=False, text=text, percent=percent)
    if not state.pool_ready:
        text = f"{format_size(state.allocated)} of {format_size(total)} are allocated"
    else:
        slowest = min(pinning, key=lambda lane: lane.usable_bytes)
        text = (
            f"lane {slowest.device} has pinned {format_size(slowest.usable_bytes)} of"
            f" {format_size(total)}"
        )
    left = state.progress.seconds_left(total)
    estimate = f", about {duration(left)} left" if left else ""
    return Check("pool", ok=False, text=f"{text} ({percent:.0f} %{estimate})", percent=percent)


def _drain_text(state: BrokerState) -> str:
    if state.stopping:
        return "stopping"
    if state.drain is not None:
        return f"drained by {by(state.drain.by)}; kvd resume undoes that"
    return "not draining"


def _lane_check(state: BrokerState, lane: Lane, now: float) -> Check:
    return Check(f"lane {lane.device}", not state.is_missing(lane), _lane_text(state, lane, now))


def _lane_text(state: BrokerState, lane: Lane, now: float) -> str:
    if lane.ending:
        return "ending"
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
