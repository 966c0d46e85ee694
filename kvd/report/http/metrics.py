"""The report as Prometheus metrics. Pure: a report in, metric families out.

Names follow Prometheus's conventions: base units, ``_total`` for what only
grows. Totals of the daemon and those of its parts have names of their own, so
that a sum never counts twice and a total never falls when a part leaves. Labels
are few: namespaces by short id and model, devices, engines by name up to
`MAX_ENGINES`; never keys, never process ids. docs/http.md lists every name.
"""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import InfoMetricFamily, Metric

from kvd.report.http.families import Report, counter, gauge, histogram, one
from kvd.report.http.lane_metrics import lane_families

MAX_ENGINES = 64
ANSWERS = ("accepted", "present", "pending", "full", "quota", "not_yet", "bad_key", "draining")
STATES = ("ready", "writing", "draining")


def families(report: Report) -> Iterator[Metric]:
    """Every family that is computed from the report."""
    yield from _daemon(report)
    yield from _pool(report)
    yield from _totals(report["counters"])
    yield from _namespaces(report["namespaces"], report["pool"]["namespaces"])
    yield from _engines(report["engines"])
    yield from lane_families(report["lanes"])
    yield from _broker(report["broker"])
    yield from _process(report)


def _daemon(report: Report) -> Iterator[Metric]:
    version = report["version"].removeprefix("kvd ")
    build = InfoMetricFamily("kvd_build", "The daemon that runs.")
    build.add_metric((), {"version": version})
    yield build
    yield gauge("kvd_ready", "1 if engines can store and load now.", one(report["ready"]))
    yield gauge("kvd_draining", "1 if no new chunks are taken.", one(report["draining"]))
    checks = [((check["name"],), check["ok"]) for check in report["checks"]]
    yield gauge("kvd_check_ok", "1 if the check of readiness passes.", checks, ["check"])
    sessions, text = report["sessions"], "Open connections of engines' processes and tools."
    yield gauge("kvd_sessions", text, one(sessions["open"]))
    yield gauge("kvd_sessions_limit", "Most connections at one time.", one(sessions["limit"]))
    yield gauge("kvd_leases", "Leases: groups of chunks pinned for loads.", one(report["leases"]))


def _pool(report: Report) -> Iterator[Metric]:
    pool = report["pool"]
    yield gauge("kvd_pool_bytes", "The pool's size.", one(pool["cpu_bytes"]))
    text = "Bytes of the pool whose memory is there."
    yield gauge("kvd_pool_allocated_bytes", text, one(pool["allocated_bytes"]))
    yield gauge("kvd_pool_free_bytes", "Bytes that no namespace holds.", one(pool["free_bytes"]))
    quotas = [((quota["model"],), quota) for quota in pool["quotas"]]
    for name, text in (
        ("held", "Bytes of the pool that a model with a quota holds."),
        ("floor", "Bytes that others leave to the model."),
        ("cap", "Most bytes that the model may hold; nothing where there is no cap."),
    ):
        values = [(where, quota[f"{name}_bytes"]) for where, quota in quotas]
        known = [(where, value) for where, value in values if value is not None]
        yield gauge(f"kvd_quota_{name}_bytes", text, known, ["model"])


def _totals(counters: Report) -> Iterator[Metric]:
    """Sums over all namespaces and engines, those that are gone included."""
    get = counters.get  # a daemon without a namespace has not counted yet
    yield counter(
        "kvd_lookup_chunks_total",
        "Chunks that engines looked up.",
        one(counters["lookup_chunks"]),
    )
    yield counter(
        "kvd_lookup_hit_chunks_total",
        "Chunks that engines looked up and found.",
        one(counters["hit_chunks"]),
    )
    yield counter(
        "kvd_lookup_tokens_total",
        "Tokens that engines looked up.",
        one(counters["lookup_tokens"]),
    )
    yield counter(
        "kvd_lookup_hit_tokens_total",
        "Tokens that engines looked up and found.",
        one(counters["hit_tokens"]),
    )
    yield counter(
        "kvd_store_offered_chunks_total",
        "Chunks that engines asked to store.",
        one(get("offered", 0)),
    )
    yield counter(
        "kvd_store_answered_chunks_total",
        "Chunks that engines asked to store, by the answer: accepted, there already (present),"
        " being written (pending), or refused.",
        [((answer,), get(answer, 0)) for answer in ANSWERS],
        ["answer"],
    )
    yield counter(
        "kvd_stored_chunks_total", "Chunks that were stored whole.", one(get("stored", 0))
    )
    yield counter(
        "kvd_restored_chunks_total",
        "Chunks of the daemon before this one that could be found again.",
        one(get("restored", 0)),
    )
    yield counter(
        "kvd_store_dropped_chunks_total",
        "Accepted chunks that were given up before they were whole.",
        one(get("dropped", 0)),
    )
    yield counter(
        "kvd_load_asked_chunks_total",
        "Chunks that engines asked to load.",
        one(get("asked", 0)),
    )
    yield counter(
        "kvd_load_answered_chunks_total",
        "Chunks that engines asked to load, by whether they were found.",
        [(("found",), get("hits", 0)), (("missed",), get("misses", 0))],
        ["answer"],
    )
    yield counter(
        "kvd_evicted_chunks_total",
        "Chunks evicted to make room for others.",
        one(get("evicted", 0) + get("yielded", 0)),
    )
    yield counter(
        "kvd_removed_chunks_total",
        "Stored chunks dropped because an engine reset them or an operator cleared them.",
        [(("engine",), get("reset", 0)), (("operator",), get("removed", 0))],
        ["by"],
    )
    yield counter("kvd_leases_total", "Leases given.", one(get("leases", 0)))
    yield counter(
        "kvd_leases_expired_total",
        "Leases that ran out before their loads had ended.",
        one(get("leases_expired", 0)),
    )


def _namespaces(namespaces: Sequence[Report], pools: Mapping[str, Report]) -> Iterator[Metric]:
    labels = ["namespace", "model"]
    named = [((_short(n), n["model"]), n) for n in namespaces]

    yield gauge(
        "kvd_namespace_held_bytes",
        "Bytes of the pool that the namespace holds, used or not.",
        [(where, pools[n["id"]]["held_bytes"]) for where, n in named],
        labels,
    )
    yield gauge(
        "kvd_namespace_bytes",
        "Bytes of the namespace's chunks, by state.",
        [
            ((*where, state), pools[n["id"]][f"{state}_bytes"])
            for where, n in named
            for state in STATES
        ],
        [*labels, "state"],
    )
    yield gauge(
        "kvd_namespace_chunks",
        "The namespace's chunks, by state.",
        [((*where, state), n["chunks"][state]) for where, n in named for state in STATES],
        [*labels, "state"],
    )
    yield gauge(
        "kvd_namespace_pinned_chunks",
        "Chunks that leases keep from being evicted.",
        [(where, n["chunks"]["pinned"]) for where, n in named],
        labels,
    )
    yield gauge(
        "kvd_namespace_capacity_chunks",
        "Chunks that the namespace could hold if it had the whole pool.",
        [(where, n["num_chunks"]) for where, n in named],
        labels,
    )
    yield gauge(
        "kvd_namespace_chunk_bytes",
        "Bytes of one chunk, all ranks together.",
        [(where, n["bytes_per_chunk"]) for where, n in named],
        labels,
    )
    yield gauge(
        "kvd_namespace_engines",
        "Engines that use the namespace now.",
        [(where, n["engines"]) for where, n in named],
        labels,
    )
    yield counter(
        "kvd_namespace_store_answered_chunks_total",
        "As kvd_store_answered_chunks_total, of one namespace since it was opened.",
        [((*where, a), n["counters"][a]) for where, n in named for a in ANSWERS],
        [*labels, "answer"],
    )
    yield counter(
        "kvd_namespace_load_answered_chunks_total",
        "As kvd_load_answered_chunks_total, of one namespace since it was opened.",
        [
            ((*where, answer), n["counters"][name])
            for where, n in named
            for answer, name in (("found", "hits"), ("missed", "misses"))
        ],
        [*labels, "answer"],
    )
    yield counter(
        "kvd_namespace_evicted_chunks_total",
        "Chunks of the namespace evicted, to make room for its own or for another's.",
        [(where, n["counters"]["evicted"] + n["counters"]["yielded"]) for where, n in named],
        labels,
    )
    yield histogram(
        "kvd_namespace_eviction_age_seconds",
        "Time from the last use of a chunk to its eviction.",
        [(where, n["eviction_age"]) for where, n in named],
        labels,
    )


def _short(namespace: Report) -> str:
    return str(namespace["id"][:12])


def _engines(engines: Sequence[Report]) -> Iterator[Metric]:
    shown = [((engine["name"],), engine) for engine in engines[:MAX_ENGINES]]
    yield gauge("kvd_engines", "Engines that are here.", one(len(engines)))
    yield gauge(
        "kvd_engine_attached",
        "1 if every rank of the engine is registered.",
        [(where, e["attached"]) for where, e in shown],
        ["engine"],
    )
    yield gauge(
        "kvd_engine_missing_ranks",
        "Ranks of the engine that are not registered.",
        [(where, len(e["missing_ranks"])) for where, e in shown],
        ["engine"],
    )
    for name, unit, words in (
        ("lookup_chunks", "chunks", "Chunks that the engine looked up."),
        ("lookup_hit_chunks", "hit_chunks", "Chunks that the engine looked up and found."),
        ("lookup_tokens", "tokens", "Tokens that the engine looked up."),
        ("lookup_hit_tokens", "hit_tokens", "Tokens that the engine looked up and found."),
    ):
        yield counter(
            f"kvd_engine_{name}_total",
            words,
            [(where, e["lookups"][unit]) for where, e in shown],
            ["engine"],
        )


def _broker(broker: Report) -> Iterator[Metric]:
    yield histogram(
        "kvd_broker_loop_lag_seconds",
        "Time for which one turn of the broker's loop kept it from listening.",
        [((), broker["loop_lag"])],
    )
    yield gauge(
        "kvd_broker_loop_lag_max_seconds",
        "The longest such time of the last minute.",
        one(broker["loop_lag_max_seconds"]),
    )
    yield counter(
        "kvd_broker_requests_total",
        "Requests to the broker, by type.",
        [((name,), count) for name, count in broker["requests"].items()],
        ["type"],
    )
    yield counter(
        "kvd_broker_refusals_total",
        "Requests that the broker answered with an error, by its code.",
        [((code,), count) for code, count in broker["refusals"].items()],
        ["code"],
    )
    yield counter(
        "kvd_limits_reached_total",
        "Requests and connections turned away because a limit was reached, by the limit.",
        [((name,), count) for name, count in broker["limits"].items()],
        ["limit"],
    )
    yield counter(
        "kvd_broker_dropped_frames_total",
        "Frames that were no messages, and replies that nobody read.",
        one(broker["dropped_frames"]),
    )


def _process(report: Report) -> Iterator[Metric]:
    """The broker's process, under the names that every dashboard knows."""
    broker = report["broker"]
    yield counter(
        "process_cpu_seconds_total", "CPU time of the broker.", one(broker["cpu_seconds"])
    )
    yield gauge(
        "process_resident_memory_bytes",
        "Memory of the broker, without the pool.",
        one(broker["rss_bytes"]),
    )
    yield gauge("process_open_fds", "Descriptors of the broker.", one(broker["open_fds"]))
    yield gauge("process_max_fds", "Most of them at one time.", one(broker["max_fds"]))
    yield gauge("process_start_time_seconds", "Unix time of its start.", one(report["started"]))
