"""The report: the source of `kvd status --json`, /status, the page and /metrics.

docs/status.md is generated from here. Times are in seconds; those called `time` or `started` count
from 1970. Sizes are in bytes. The classes are not frozen: that would double the time that a
daemon's start takes to create them, and their instances are written out at once.
"""

from dataclasses import dataclass
from typing import Any

from kvd.metrics.counts import (
    BrokerCounts,
    ChunkCounts,
    EventCounts,
    LaneCounts,
    LookupCounts,
    TierCounts,
)
from kvd.metrics.declare import (
    ItemLabels,
    counter,
    counters,
    gauge,
    info,
    listed,
    part,
    plain,
    report_fields,
    sums,
)

MAX_ENGINES = 64
"""Engines that have metrics of their own."""


@dataclass(slots=True)
class DrainStatus:
    """An operator's drain."""

    uid: int = plain("User that ordered it")
    pid: int = plain("Process that ordered it")
    seconds: float = plain("Since when")
    stores_in_flight: int = plain("Chunks being written that began before it")
    leases_in_flight: int = plain("Leases that began before it and have not ended")


@dataclass(slots=True)
class CheckStatus:
    """One condition of readiness."""

    name: str = plain("`pool`; `lane` and the device, for each lane; `drain`")
    ok: bool = gauge(
        "1 if it holds. An engine that is absent fails nothing: with `cpu_bytes = auto` the"
        " daemon is ready before the first engine decides the pool's size",
        "kvd_check_ok",
    )
    text: str = plain(
        "What holds, or what is wrong; while the pool is made, how far it is and how long it takes"
        " by the rate of the last ten seconds"
    )
    percent: float | None = plain(
        "Of `pool`: how much is allocated, and pinned by every lane with workers that has to pin;"
        " null where it does not apply",
        default=None,
    )

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


@dataclass(slots=True)
class Condition:
    """Something that is wrong."""

    name: str = plain("Which condition, such as `lane down`")
    level: str = plain(
        "`error` costs engines their cache now, `warning` will or may, `hint` could go better"
    )
    text: str = plain("What is wrong, over the last minute")
    remedy: str = plain("What to do")


@dataclass(slots=True)
class QuotaStatus:
    """What a model with a quota may hold."""

    model: str = plain("The model's name, as the setting `quota` has it")
    floor_bytes: int = gauge("Bytes that others leave to the model", "kvd_quota_floor_bytes")
    cap_bytes: int | None = gauge(
        "Most bytes that the model may hold; null where there is no cap", "kvd_quota_cap_bytes"
    )
    held_bytes: int = gauge("Bytes that all its namespaces hold now", "kvd_quota_held_bytes")


@dataclass(slots=True)
class PoolStatus:
    """The memory that holds chunks."""

    cpu_bytes: int = gauge("Size of the pool; 0 while it is not decided", "kvd_pool_bytes")
    free_bytes: int = gauge(
        "Bytes of the pool that no namespace holds. Those that a namespace holds for no chunk are"
        " free, too, and not counted here",
        "kvd_pool_free_bytes",
    )
    allocated_bytes: int = gauge("Bytes of the pool that are allocated", "kvd_pool_allocated_bytes")
    quotas: list[QuotaStatus] = listed(ItemLabels(("model",), lambda quota: (quota["model"],)))


@dataclass(slots=True)
class ChunksStatus:
    """Chunks of a namespace by state."""

    ready: int = gauge("Chunks that can be found", "kvd_namespace_chunks", state="ready")
    lent: int = gauge(
        "Slots on loan: engines give them to new chunks by themselves. Each is free, or holds a"
        " chunk of `ready` until then",
        "kvd_namespace_lent_slots",
    )
    writing: int = gauge("Chunks being written", "kvd_namespace_chunks", state="writing")
    draining: int = gauge(
        "Chunks given up, while a lane may still write there",
        "kvd_namespace_chunks",
        state="draining",
    )
    pinned: int = gauge("Of `ready`: chunks under a lease", "kvd_namespace_pinned_chunks")
    doomed: int = plain("Of `ready`: dropped by a reset, gone when the last lease ends")


@dataclass(slots=True, kw_only=True)
class ForecastSize:
    """What a pool of another size would find."""

    pool: str = plain("`-50%`, `-25%`, `now`, `+25%`, `+50%`, `+100%`, `+200%` or `unlimited`")
    bytes: int | None = plain("Bytes of such a pool; null without limit")
    hit_ratio: float = gauge(
        "Share of looked-up tokens that a pool of this size would find, 0 to 1",
        "kvd_would_hit_ratio",
    )
    prefill_seconds_per_hour: float | None = plain(
        "Seconds an hour in which engines would compute what it misses, all of them together; null"
        " where no engine reports its prefill rate"
    )


@dataclass(slots=True, kw_only=True)
class ForecastStatus:
    """What the namespace's engines would find in a pool of another size."""

    requests: int = plain(
        "Finished requests that it is based on; as all its sums, halved after each hour with"
        " lookups"
    )
    first_time: float = plain("Share of prompts' chunks that no request had before, 0 to 1")
    ceiling: float = plain("Share of looked-up tokens that a pool without limit would find, 0 to 1")
    hit_ratio: float = plain(
        "Share of looked-up tokens that were found; where engines count no tokens, that of chunks"
        " by the miss-ratio curve"
    )
    prefill_seconds_per_token: float | None = plain(
        "Time in which an engine computes a token of a prompt, as measured by the engines; null"
        " where none reports it"
    )
    sizes: list[ForecastSize] = listed(ItemLabels(("pool",), lambda size: (size["pool"],)))


@dataclass(slots=True, kw_only=True)
class NamespaceStatus:
    """Chunks that may be shared."""

    id: str = plain("32 hex digits, from the fingerprint and the layout")
    model: str = plain("The model's name")
    engines: int = gauge("Engines attached to the namespace now", "kvd_namespace_engines")
    world_size: int = plain("Ranks that hold shares of one chunk")
    replicated: bool = plain("All ranks hold the same bytes, stored once")
    bytes_per_chunk: int = gauge(
        "Bytes of one chunk, all ranks together", "kvd_namespace_chunk_bytes"
    )
    tokens_per_chunk: int | None = plain(
        "null where groups' blocks hold different numbers of tokens"
    )
    num_chunks: int = gauge(
        "Chunks that the namespace could hold if it had the whole pool",
        "kvd_namespace_capacity_chunks",
    )
    held_bytes: int = gauge(
        "Bytes of the pool that the namespace holds, used or not", "kvd_namespace_held_bytes"
    )
    tier_chunks: int = gauge(
        "Chunks of the namespace that tiers are known to have, without those of shared tiers",
        "kvd_namespace_tier_chunks",
    )
    directory_bytes: int = plain("Bytes of its directory, which is not part of the pool")
    ready_bytes: int = gauge("Bytes of `chunks.ready`", "kvd_namespace_bytes", state="ready")
    writing_bytes: int = gauge("Bytes of `chunks.writing`", "kvd_namespace_bytes", state="writing")
    draining_bytes: int = gauge(
        "Bytes of `chunks.draining`", "kvd_namespace_bytes", state="draining"
    )
    chunks: ChunksStatus = part()
    missed_tokens: dict[str, int] = counters(
        "Tokens of `counters.missed`, by the same reasons; empty where `tokens_per_chunk` is null",
        "kvd_namespace_missed_tokens_total",
        "reason",
    )
    forecast: ForecastStatus | None = part(
        "Hits by the size of the pool; null before 50 requests have finished, and for a namespace"
        " of a self-test"
    )
    advice: str | None = plain(
        "What to buy by the forecast: memory, a tier or neither; null without a forecast"
    )
    counters: ChunkCounts = part(prefix="kvd_namespace_")
    changes: int = counter(
        "Changes written to the ring that engines read for KV events: chunks that became READY,"
        " ceased to be there, or were cleared",
        "kvd_namespace_changes_total",
    )


@dataclass(slots=True, kw_only=True)
class SessionStatus:
    """A connection of an engine's process."""

    kind: str = plain("`scheduler` or `worker`")
    rank: int | None = plain("Of a registered worker, else null", default=None)
    device: str | None = plain("Of a registered worker, else null", default=None)
    state: str = plain("See the life cycles in `docs/protocol.md`")
    pid: int = plain("As the kernel reports it")
    uid: int = plain("As the kernel reports it")
    seconds: float = plain("Since its HELLO")


@dataclass(slots=True, kw_only=True)
class PublishedStatus(EventCounts):
    """What an engine publishes as KV events."""

    lag_max_seconds: float = gauge(
        "The longest time from a change to its publication, as reported in the last minute; an"
        " idle engine publishes about once a second",
        "kv_events_lag_max_seconds",
    )


@dataclass(slots=True)
class EngineStatus:
    """An inference server instance.

    Engines look up in shared memory, so the daemon knows what their schedulers report: once a
    second at most, and before they leave. What was looked up in the last second before an
    engine or the daemon dies is not counted; nothing counts twice.
    """

    name: str = plain("As it calls itself")
    attached: bool = gauge("1 if every rank of the engine is registered", "kvd_engine_attached")
    namespace: str | None = plain("id of its namespace, or null")
    world_size: int = plain("Ranks; 0 before the first has registered")
    missing_ranks: list[int] = gauge(
        "Ranks of the engine that are not registered; their number", "kvd_engine_missing_ranks"
    )
    sessions: list[SessionStatus] = listed()
    counters: LookupCounts = part(prefix="kvd_engine_")
    published: PublishedStatus = part(prefix="kvd_engine_")


@dataclass(slots=True)
class LaneStatus:
    """The process of one device. Its own figures are up to half a second old."""

    device: str = plain(
        "`host`, or `cuda:` and the device's UUID. CUDA devices appear when workers register on"
        " them; a lane that cannot start is not listed"
    )
    up: bool = gauge("1 if the lane serves or is ending", "kvd_lane_up")
    state: str = plain(
        "`up`, `ending` (told to finish its jobs, unpin and exit), `starting` (it never was up) or"
        " `down` (lost, and started again)"
    )
    pid: int = plain("Of its process")
    stopped: str = plain(
        "`pid 12 is stopped (state T)` where a signal has stopped its process; else empty"
    )
    incarnation: int = plain("Number of its process")
    last_error: str = plain("How its last process ended")
    seconds_since_heard: float | None = gauge(
        "Time since the lane was heard of; null where it is down", "kvd_lane_silent_seconds"
    )
    queued_jobs: int = gauge("Jobs that have not started", "kvd_lane_queued_jobs")
    oldest_job_seconds: float = gauge(
        "How long the oldest of them has waited", "kvd_lane_oldest_job_seconds"
    )
    bytes_in_flight: int = gauge(
        "Bytes given to the device and not reported", "kvd_lane_in_flight_bytes"
    )
    workers: int = gauge("Ranks whose memory it has mapped", "kvd_lane_workers")
    pool_bytes: int = plain("Size of the pool")
    usable_bytes: int = gauge(
        "Longest part of the pool, in the order of filling, where all that the lane's ranks use"
        " can be copied; the whole pool where no rank is bound",
        "kvd_lane_pool_usable_bytes",
    )
    pins: bool = plain("It can use only memory that it has pinned")
    pin_error: str = plain("Why it cannot pin all of the pool; empty while there is hope")
    pinned_bytes: int = gauge("Bytes of the pool that the lane has pinned", "kvd_lane_pinned_bytes")
    counters: LaneCounts = part(prefix="kvd_")


@dataclass(slots=True, kw_only=True)
class TierStatus:
    """What keeps chunks below memory, in the order of the setting `tier`."""

    name: str = plain("Its kind, such as `disk`; the second of one kind is `disk-2`")
    setting: str = plain("As the operator wrote it")
    keep: str = plain("Which chunks go down: `asked`, `all` or `never`")
    medium: str = plain("What engines and routers call it: `disk`, `remote`, `memory`")
    shared: bool = plain("Other daemons put and remove chunks there, too")
    described: str = plain("How it works, as its process says; empty until one serves")
    state: str = plain("`up`, `starting` (it never was up) or `down` (lost, and started again)")
    up: bool = gauge("1 if the tier's process serves", "kvd_tier_up")
    pid: int = plain("Of its process; 0 where none serves")
    stopped: str = plain(
        "`pid 12 is stopped (state T)` where a signal has stopped its process; else empty"
    )
    breaker: str = plain(
        "`closed` (used), `open` (set aside: lookups miss what only it has) or `probing` (whether"
        " it works again is tried)"
    )
    state_seconds: float = gauge(
        "How long the tier has been in use, or has not been: set aside, starting or down",
        "kvd_tier_state_seconds",
    )
    usable: bool = gauge("1 if chunks are put to it and got from it now", "kvd_tier_usable")
    set_aside_seconds: float = gauge(
        "How long the tier has been set aside; 0 where it is not", "kvd_tier_set_aside_seconds"
    )
    unopened_seconds: float = gauge(
        "How long the tier has not opened a namespace that is in use, so that none of its chunks"
        " are kept there: the longest; 0 where all are open",
        "kvd_tier_unopened_seconds",
    )
    full: bool = gauge("1 while puts rest, because it has no room", "kvd_tier_full")
    last_error: str = plain("The last error of its medium or process; empty where there was none")
    total_bytes: int = gauge("Its budget; 0 where it is unknown", "kvd_tier_budget_bytes")
    used_bytes: int = gauge("Bytes that it takes of its medium", "kvd_tier_used_bytes")
    chunks: int = gauge("Chunks that it keeps, all namespaces together", "kvd_tier_chunks")
    queued_put_bytes: int = gauge(
        "Bytes of chunks on their way down", "kvd_tier_queued_bytes", direction="put"
    )
    queued_get_bytes: int = gauge(
        "Bytes of chunks on their way up", "kvd_tier_queued_bytes", direction="get"
    )
    latency_seconds: float = gauge(
        "Time of a get before its bytes move, from the latest gets", "kvd_tier_latency_seconds"
    )
    bytes_per_second: float = gauge(
        "How fast gets are, from the latest gets; 0 before the first", "kvd_tier_bytes_per_second"
    )
    counters: TierCounts = part(prefix="kvd_tier_")


@dataclass(slots=True, kw_only=True)
class BrokerStatus(BrokerCounts):
    """The process that decides."""

    loop_lag_max_seconds: float = gauge(
        "The longest of `loop_lag` in the last minute", "kvd_broker_loop_lag_max_seconds"
    )
    cpu_seconds: float = counter("CPU time of the broker", "process_cpu_seconds_total", start=0.0)
    rss_bytes: int = gauge(
        "Memory of the broker, without the pool", "process_resident_memory_bytes"
    )
    open_fds: int = gauge("Descriptors of the broker", "process_open_fds")
    max_fds: int = gauge("Most of them at one time; 0 where there is no limit", "process_max_fds")


@dataclass(slots=True)
class SessionLimit:
    """Sessions: connections to the broker's socket."""

    open: int = gauge("Open connections of engines' processes and tools", "kvd_sessions")
    limit: int = gauge("Most of them at one time", "kvd_sessions_limit")


@dataclass(slots=True)
class EventStatus:
    """Something that happened; the last 200, oldest first."""

    number: int = plain("From 1 since the start")
    time: float = plain("When")
    level: str = plain("`info`, `warning` or `error`")
    text: str = plain("For people")


@dataclass(slots=True)
class Report:
    """The daemon."""

    version: str = info("Name and version of the daemon", "kvd_build_info")
    boot_id: str = plain("32 hex digits, new at every start")
    pid: int = plain("The broker's process id")
    host: str = plain("The machine's name, as the kernel reports it")
    time: float = plain("When this report was made")
    started: float = gauge("When the daemon started", "process_start_time_seconds")
    runtime_dir: str = plain("Where its sockets are")
    ready: bool = gauge(
        "1 if engines can store and load now: every check is ok; the exit status of `kvd status`"
        " is 0 only then",
        "kvd_ready",
    )
    draining: bool = gauge(
        "1 if no new chunks are taken: an operator drained the daemon, it stops, or it hands over"
        " to another",
        "kvd_draining",
    )
    drain: DrainStatus | None = part("The operator's drain; null where there is none")
    checks: list[CheckStatus] = listed(ItemLabels(("check",), lambda check: (check["name"],)))
    conditions: list[Condition] = listed()
    pool: PoolStatus = part()
    namespaces: list[NamespaceStatus] = listed(
        ItemLabels(("namespace", "model"), lambda space: (space["id"][:12], space["model"]))
    )
    engines: list[EngineStatus] = listed(
        ItemLabels(("engine",), lambda engine: (engine["name"],), MAX_ENGINES),
        "Engines that are here",
        "kvd_engines",
    )
    lanes: list[LaneStatus] = listed(ItemLabels(("device",), lambda lane: (lane["device"],)))
    tiers: list[TierStatus] = listed(ItemLabels(("tier",), lambda tier: (tier["name"],)))
    broker: BrokerStatus = part()
    sessions: SessionLimit = part()
    leases: int = gauge("Leases that have not ended: groups of chunks pinned", "kvd_leases")
    counters: dict[str, Any] = sums(
        *(("kvd_", ChunkCounts), ("kvd_", LookupCounts)),
        *(("kvd_", EventCounts), (None, LaneCounts)),
    )
    events: list[EventStatus] = listed()


REPORT_FIELDS = tuple(report_fields(Report))
"""Every field of the report."""
