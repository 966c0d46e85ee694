"""Everything that is counted, by the part of the daemon that counts it.

Increments are plain, `counts.stored += 1`, and stand where the event happens: jobs' stages in the
lane, lookups in the engines. Engines report totals of their session; the broker adds differences,
so nothing counts twice. The report's `counters` add up the counts of lanes, namespaces and engines,
including those that are gone.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvd.errors import IntegrityError
from kvd.metrics.declare import Counts, Histogram, counter, counters, histogram, histograms
from kvd_proto.messages import JobStatus

DIRECTIONS = ("store", "load")
STAGES = ("queued", "stream_wait", "copied", "reported")
# Upper bounds in seconds.
STAGE_BOUNDS = (
    *(20e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0),
)
AGE_BOUNDS = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86400, 3 * 86400, 7 * 86400)
LAG_BOUNDS = (
    *(100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3),
    *(0.1, 0.25, 0.5, 1.0, 5.0),
)
CONNECTION_LIMITS = (
    "message_bytes",
    "message_parts",
    "kept_bytes",
    "connections",
    "open_files",
)
"""Limits above which connections to the broker and to lanes are closed."""
LIMITS = (
    "max_sessions",
    "max_sessions_per_user",
    "max_namespaces",
    "max_leases",
    "cuda_lanes",
    "sweeps",
    *CONNECTION_LIMITS,
)
"""Settings and limits at which the broker refuses."""
PUT_OUTCOMES = ("ok", "full", "failed", "late", "gone")
GET_OUTCOMES = ("ok", "absent", "corrupt", "failed", "late", "gone")
ASK_OUTCOMES = ("ok", "absent", "failed", "late")
"""Outcomes of chunks in a tier's batches: names of `kvd.outcomes.Outcome` in lower case."""
BREAKER_REASONS = ("late", "failed", "corrupt", "lost", "wrong")
"""Why a tier is set aside."""


class MissReason(StrEnum):
    """Why a key was missed when a request asked for it."""

    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    BEING_STORED = "being_stored"
    READY = "ready"
    REFUSED = "refused"
    QUOTA = "quota"
    RESET = "reset"
    REMOVED = "removed"
    OTHER_LAYOUT = "other_layout"


@dataclass(slots=True)
class ChunkCounts(Counts):
    """What happened to the chunks of a namespace since it was opened."""

    offered: int = counter(
        "Chunks that engines asked to store: `accepted` + `present` +"
        " `pending` + `full` + `quota` + `not_yet` + `draining`",
        "store_offered_chunks_total",
    )
    accepted: int = counter("Got a slot", "store_answered_chunks_total", answer="accepted")
    present: int = counter("Were stored already", "store_answered_chunks_total", answer="present")
    pending: int = counter(
        "Were being written already", "store_answered_chunks_total", answer="pending"
    )
    full: int = counter(
        "Found no slot at hand: the engine had used what was lent to it. It offers them again;"
        " beside other engines in a small pool that is usual",
        "store_answered_chunks_total",
        answer="full",
    )
    quota: int = counter(
        "Found no slot at hand, and the model holds what its cap allows",
        "store_answered_chunks_total",
        answer="quota",
    )
    unstored: int = counter(
        "Found no slot at hand, and were not offered again: they are not stored",
        "unstored_chunks_total",
    )
    not_yet: int = counter(
        "Were not offered often enough (`reuse_threshold`)",
        "store_answered_chunks_total",
        answer="not_yet",
    )
    draining: int = counter(
        "Were offered while the daemon took none", "store_answered_chunks_total", answer="draining"
    )
    index_full: int = counter("Of `stores_raced`: no room in the directory near the key's place")
    stores_lost: int = counter(
        "Of `accepted`: the slot was no longer lent to the engine when the broker learned of the"
        " store",
        "stores_lost_total",
    )
    stores_raced: int = counter(
        "Of `accepted`: another engine was first to store the same chunk, or the directory had no"
        " room for it (`index_full`)",
        "stores_raced_total",
    )
    stored: int = counter("Chunks that became READY", "stored_chunks_total")
    restored: int = counter(
        "Chunks of the daemon before this one that could be found again", "restored_chunks_total"
    )
    replaced: int = counter(
        "Chunks that held a part of their blocks and whose place a fuller store took"
    )
    descriptions: int = counter("Descriptions of chunks that were kept")
    descriptions_too_long: int = counter(
        "Descriptions that were not kept: they have more bytes than a chunk of this layout may",
        "descriptions_dropped_total",
        reason="too_long",
    )
    descriptions_no_room: int = counter(
        "Descriptions that were not kept: their file could not be made or written, as where its"
        " filesystem is full",
        "descriptions_dropped_total",
        reason="no_room",
    )
    dropped: int = counter(
        "Accepted chunks that were given up before they were READY", "store_dropped_chunks_total"
    )
    tickets_expired: int = counter("Of `dropped`: they ran out of time")
    stale_reports: int = counter("Lanes' reports about slots that had moved on")
    evicted: int = counter("Chunks evicted to make room for this namespace", "evicted_chunks_total")
    yielded: int = counter(
        "Chunks evicted to make room for another namespace, or to come down to a lowered cap."
        " With `evicted` the count of `eviction_age`",
        "evicted_chunks_total",
    )
    reset: int = counter("Chunks dropped by a reset", "removed_chunks_total", by="engine")
    removed: int = counter(
        "Chunks dropped by an operator, as `kvd evict` and `kvd clear` do; later misses of the"
        " latter count as `missed.reset`",
        "removed_chunks_total",
        by="operator",
    )
    asked: int = counter(
        "Chunks that engines asked to load: `hits` + `pins_late` + `pins_refused`",
        "load_asked_chunks_total",
    )
    hits: int = counter("Were pinned", "load_answered_chunks_total", answer="found")
    pins_late: int = counter(
        "Had gone before they could be pinned",
        "load_answered_chunks_total",
        answer="late",
    )
    pins_refused: int = counter(
        "Were not pinned, because the engine had `max_leases` leases",
        "load_answered_chunks_total",
        answer="refused",
    )
    leases: int = counter("Leases given", "leases_total")
    leases_expired: int = counter(
        "Leases that ran out before their loads had ended", "leases_expired_total"
    )
    promoted: int = counter(
        "Chunks that came up from a tier and became READY", "promoted_chunks_total"
    )
    not_promoted: int = counter(
        "Chunks that were to come up from a tier and did not: its get failed, came late, or was"
        " given up when the tier was set aside",
        "not_promoted_chunks_total",
    )
    sought_dropped: int = counter(
        "Chunks that engines sought in tiers and that no tier was asked for: there was no room"
        " within two seconds, too many waited, or the daemon drained",
        "sought_dropped_chunks_total",
    )
    eviction_age: Histogram = histogram(
        "Seconds since a chunk was stored or last of use (pinned for a load, or named by a"
        " request that finished), when it was evicted; exact to a quarter of a second",
        "eviction_age_seconds",
        AGE_BOUNDS,
    )
    missed: dict[str, int] = counters(
        "Chunks of prompts that lookups did not find, by reason: `never_seen` (as far back as kvd"
        " remembers: twice as many keys as the pool has chunks, since the daemon's start),"
        " `evicted`, `being_stored` (or brought up from a tier), `ready` (READY behind a chunk"
        " that was missed, or too late for the lookup), `refused` (no slot was at hand when it"
        " was to be stored), `quota` (the same, and the model held what its cap allows), `reset`"
        " (or `kvd clear`), `removed` (`kvd evict`), `other_layout` (another namespace has it)",
        "missed_chunks_total",
        "reason",
        keys=[reason.value for reason in MissReason],
    )
    missed_age: Histogram = histogram(
        "Seconds since a chunk was evicted, when it was missed: the count is `missed.evicted`",
        "missed_age_seconds",
        AGE_BOUNDS,
    )

    def check_integrity(self) -> None:
        """Check that every key that was offered or asked for has been answered once.

        Raises:
            IntegrityError: a key was not, or an eviction has no age.
        """
        refused = self.full + self.quota + self.not_yet + self.draining
        answered = self.accepted + self.present + self.pending + refused
        unpinned = self.pins_late + self.pins_refused
        if self.offered != answered or self.asked != self.hits + unpinned:
            raise IntegrityError(f"keys that were offered or asked for and not answered: {self}")
        if self.eviction_age.count != self.evicted + self.yielded:
            raise IntegrityError(f"chunks evicted without an age: {self}")
        if self.missed_age.count != self.missed[MissReason.EVICTED]:
            raise IntegrityError(f"evicted chunks missed without an age: {self}")


@dataclass(slots=True)
class LookupCounts(Counts):
    """What an engine has looked up in the directory."""

    lookup_chunks: int = counter(
        "Keys looked up in the directory. An engine that stops at the first miss looks up no key"
        " behind it, so `hit_chunks` of these is not the share of the prompts that was found",
        "lookup_chunks_total",
    )
    hit_chunks: int = counter("Of these, keys whose chunks were READY", "lookup_hit_chunks_total")
    lookup_tokens: int = counter(
        "Prompt tokens asked for, as the engine counts them (vLLM: of each request when it is"
        " admitted); 0 where it does not",
        "lookup_tokens_total",
    )
    hit_tokens: int = counter("Of these, tokens that were found", "lookup_hit_tokens_total")
    aborted_requests: int = counter(
        "Requests that the engine gave up because a load had failed (SGLang with `layerwise`;"
        " others compute them)",
        "aborted_requests_total",
    )
    detached_tokens: int = counter(
        "Of `lookup_tokens`: asked for while no daemon served the engine, so none was found",
        "lookup_detached_tokens_total",
    )
    hints: int = counter(
        "Requests that came with a hint of when they are continued, or got one later",
        "hinted_requests_total",
    )
    hints_ignored: int = counter(
        "Fields and actions of hints that were ignored: they, or their version, are not known",
        "ignored_hint_fields_total",
    )
    hints_cut: int = counter(
        "Numbers of hints that were out of range and were cut", "cut_hint_numbers_total"
    )


@dataclass(slots=True)
class EventCounts(Counts):
    """What engines have published as KV events."""

    kv_events: int = counter(
        "Changes of chunks that were published as KV events, stored and removed ones",
        "kv_events_total",
    )
    kv_event_snapshots: int = counter(
        "How often an engine read a whole directory for them: at the start, and when the ring of"
        " changes had overrun it",
        "kv_event_snapshots_total",
    )
    kv_event_overruns: int = counter(
        "Of `kv_event_snapshots`: the ring of changes (`change_ring`) had overrun it",
        "kv_event_overruns_total",
    )


@dataclass(slots=True)
class LaneCounts(Counts):
    """What a lane has done."""

    store_bytes: int = counter("Bytes stored", "copied_bytes_total", direction="store")
    load_bytes: int = counter("Bytes loaded", "copied_bytes_total", direction="load")
    store_seconds: float = counter(
        "Time of stores: from submission, or the end of the previous one, until the end is seen",
        "copy_seconds_total",
        start=0.0,
        direction="store",
    )
    load_seconds: float = counter(
        "Time of loads: from submission, or the end of the previous one, until the end is seen",
        "copy_seconds_total",
        start=0.0,
        direction="load",
    )
    jobs: dict[str, int] = counters(
        "Jobs that have ended, by direction and outcome: `store_ok`, `load_stale`, `store_shed`"
        " (the engine had `max_queued_jobs` or `max_queued_bytes` waiting), …",
        "jobs_total",
        "direction",
        "outcome",
        keys=[f"{way}_{status}" for way in DIRECTIONS for status in JobStatus],
    )
    stages: dict[str, Histogram] = histograms(
        "Seconds that jobs that ended ok spent in each stage, by direction and stage. `queued`:"
        " from acceptance to the start, without `stream_wait`; `stream_wait`: its turn had come,"
        " and the engine's stream was not as far as the job's number on the worker's timeline;"
        " `copied`: from the first to the last byte; `reported`: until Done was sent",
        "job_stage_seconds",
        "direction",
        "stage",
        keys=[f"{way}_{stage}" for way in DIRECTIONS for stage in STAGES],
        bounds=STAGE_BOUNDS,
    )
    dropped_frames: int = counter(
        "Frames of workers that were no messages", "lane_dropped_messages_total", kind="frames"
    )
    dropped_replies: int = counter(
        "Replies to workers that do not read", "lane_dropped_messages_total", kind="replies"
    )
    limits: dict[str, int] = counters(
        "Connections to the lane that were closed, by bound, as those of `broker.limits`",
        "lane_limits_reached_total",
        "limit",
        keys=CONNECTION_LIMITS,
    )
    restarts: int = counter("Processes that were lost and replaced", "lane_restarts_total")


@dataclass(slots=True)
class BrokerCounts(Counts):
    """What the broker counts about itself."""

    loop_lag: Histogram = histogram(
        "Seconds for which one turn of the broker's loop kept it from looking at its sockets",
        "kvd_broker_loop_lag_seconds",
        LAG_BOUNDS,
    )
    requests: dict[str, int] = counters(
        "Requests by type, refused ones too", "kvd_broker_requests_total", "type"
    )
    refusals: dict[str, int] = counters(
        "ERROR replies by code", "kvd_broker_refusals_total", "code"
    )
    limits: dict[str, int] = counters(
        "Requests and connections refused or ended because a limit was reached, by limit: the"
        " settings `max_sessions`, `max_sessions_per_user`, `max_namespaces`, `max_leases`;"
        " `cuda_lanes`, `sweeps` (evictions under way); and connections that were closed:"
        " `message_bytes` (above 16 MiB), `message_parts`, `kept_bytes` (all together"
        " kept more than 256 MiB), `connections` (too many), `open_files`",
        "kvd_limits_reached_total",
        "limit",
        keys=LIMITS,
    )
    dropped_frames: int = counter(
        "Frames that were no messages; the log says who sent them",
        "kvd_broker_dropped_frames_total",
    )
    dropped_replies: int = counter(
        "Replies to clients that do not read, or that were gone before they were sent",
        "kvd_broker_dropped_replies_total",
    )


@dataclass(slots=True)
class TierCounts(Counts):
    """What a tier has done, in all its processes."""

    puts: dict[str, int] = counters(
        "Chunks that were given to the tier to keep, by outcome: `ok` (kept), `full`, `failed` (an"
        " error of the medium), `late` (the deadline passed), `gone` (the chunk had left the pool)",
        "put_chunks_total",
        "outcome",
        keys=PUT_OUTCOMES,
    )
    gets: dict[str, int] = counters(
        "Chunks that were asked of the tier, by outcome: `ok` (its hits: they became READY in the"
        " pool), `absent`, `corrupt` (not what was kept, and dropped), `failed`, `late`, `gone`"
        " (not wanted any more)",
        "get_chunks_total",
        "outcome",
        keys=GET_OUTCOMES,
    )
    asks: dict[str, int] = counters(
        "Chunks of which a shared tier was asked whether it has them, by answer",
        "asked_chunks_total",
        "outcome",
        keys=ASK_OUTCOMES,
    )
    put_bytes: int = counter("Bytes of chunks that it kept", "bytes_total", direction="put")
    get_bytes: int = counter("Bytes of chunks that it gave back", "bytes_total", direction="get")
    put_seconds: float = counter(
        "Time in which puts were under way, one or several: `put_bytes` by this is its rate",
        "busy_seconds_total",
        start=0.0,
        direction="put",
    )
    get_seconds: float = counter(
        "Time in which gets were under way, one or several: `get_bytes` by this is its rate",
        "busy_seconds_total",
        start=0.0,
        direction="get",
    )
    put_latency: Histogram = histogram(
        "Seconds from the broker's order to the tier's answer, for each batch of puts",
        "put_seconds",
        STAGE_BOUNDS,
    )
    get_latency: Histogram = histogram(
        "Seconds from the broker's order to the tier's answer, for each batch of gets",
        "get_seconds",
        STAGE_BOUNDS,
    )
    opened: dict[str, int] = counters(
        "How often the breaker has set the tier aside, by reason: `late` (no progress), `failed`"
        " (half of the last batches), `corrupt`, `lost` (its process ended), `wrong` (the broker"
        " could not handle it: a bug in kvd, the log has it)",
        "breaker_opened_total",
        "reason",
        keys=BREAKER_REASONS,
    )
    unkept: int = counter(
        "Chunks that `keep` names and that left memory before the tier had taken them, or came"
        " late: stores are faster than the tier",
        "unkept_chunks_total",
    )
    dropped: int = counter(
        "Chunks that the tier dropped by itself to make room for others", "dropped_chunks_total"
    )
    damaged_records: int = counter(
        "Records of its index that were damaged when one of its processes began, and were dropped"
        " with their chunks",
        "damaged_records_total",
    )
    restarts: int = counter("Processes that were lost and replaced", "restarts_total")
