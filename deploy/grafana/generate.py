"""Write kvd.json, the Grafana dashboard: run it after a change here.

A test compares the file with what this module would write, and every metric in
it with what a daemon serves.
"""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("kvd.json")
_WIDE, _HEIGHT = 24, 8
_HERE = 'instance=~"$instance"'
_SOURCE = {"type": "prometheus", "uid": "$datasource"}

Panel = dict[str, Any]


def graph(
    title: str, unit: str, text: str, *queries: tuple[str, str], stack: bool = False
) -> Panel:
    """Lines over time; each query with the legend of its lines."""
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
    if stack:
        custom |= {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 40}
    return {
        "type": "timeseries",
        "title": title,
        "description": text,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": _targets(queries),
    }


def figure(
    title: str, unit: str, text: str, query: str, *, red_below: float | None = None
) -> Panel:
    """One number, the latest; red below a bound."""
    steps: list[dict[str, Any]] = [{"color": "text", "value": None}]
    if red_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": red_below}]
    defaults = {"unit": unit, "thresholds": {"mode": "absolute", "steps": steps}}
    return {
        "type": "stat",
        "title": title,
        "description": text,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"},
        "targets": _targets([(query, "{{instance}}")]),
    }


def _targets(queries: Any) -> list[dict[str, Any]]:
    return [
        {
            "refId": chr(ord("A") + number),
            "expr": query.replace("HERE", _HERE),
            "legendFormat": legend,
        }
        for number, (query, legend) in enumerate(queries)
    ]


def _rate(metric: str, *by: str, where: str = "") -> str:
    """Per second, summed but for some labels."""
    labels = f" by ({', '.join(by)})" if by else ""
    return f"sum{labels} (rate({metric}{{HERE{where}}}[$__rate_interval]))"


def _quantile(quantile: float, metric: str, *by: str) -> str:
    """Of a histogram, over half an hour."""
    summed = f"sum by (le, {', '.join(by)}) (rate({metric}{{HERE}}[30m]))"
    return f"histogram_quantile({quantile}, {summed})"


def _p(quantile: float, stage: str) -> str:
    return (
        f"histogram_quantile({quantile}, sum by (le, direction) (rate("
        f'kvd_job_stage_seconds_bucket{{HERE, stage="{stage}"}}[$__rate_interval])))'
    )


ROWS: dict[str, list[Panel]] = {
    "Now": [
        figure("Ready", "bool_yes_no", "See /readyz?verbose.", "min(kvd_ready{HERE})", red_below=1),
        figure(
            "Lanes up",
            "percentunit",
            "Lanes that serve, of all.",
            "avg(kvd_lane_up{HERE})",
            red_below=1,
        ),
        figure("Engines", "short", "Engines that are here.", "sum(kvd_engines{HERE})"),
        figure("Pool", "bytes", "The pools' sizes.", "sum(kvd_pool_bytes{HERE})"),
        figure(
            "Pool in use",
            "percentunit",
            "Chunks that can be found, of the pools' sizes.",
            'sum(kvd_namespace_bytes{HERE, state="ready"}) / sum(kvd_pool_bytes{HERE})',
        ),
        figure(
            "Tokens found",
            "percentunit",
            "Of the tokens that engines looked up in the last hour.",
            "sum(rate(kvd_lookup_hit_tokens_total{HERE}[1h]))"
            " / sum(rate(kvd_lookup_tokens_total{HERE}[1h]))",
        ),
    ],
    "Cache": [
        graph(
            "Tokens found",
            "percentunit",
            "Of those that engines looked up.",
            (
                _rate("kvd_lookup_hit_tokens_total", "instance")
                + " / "
                + _rate("kvd_lookup_tokens_total", "instance"),
                "{{instance}}",
            ),
        ),
        graph(
            "Tokens looked up",
            "short",
            "Per second, by engine.",
            (
                _rate("kvd_engine_lookup_tokens_total", "engine"),
                "{{engine}}",
            ),
            stack=True,
        ),
        graph(
            "Chunks offered, by the answer",
            "short",
            "Per second. full: no room; not_yet: to be offered again; present: there already.",
            (
                _rate("kvd_store_answered_chunks_total", "answer"),
                "{{answer}}",
            ),
            stack=True,
        ),
        graph(
            "Chunks evicted",
            "short",
            "Per second, by model.",
            (
                _rate("kvd_namespace_evicted_chunks_total", "model"),
                "{{model}}",
            ),
            stack=True,
        ),
        graph(
            "Chunks missed, by reason",
            "short",
            "Per second. evicted: a larger pool may have kept them; never_seen: nothing can.",
            (
                _rate("kvd_missed_chunks_total", "reason"),
                "{{reason}}",
            ),
            stack=True,
        ),
        graph(
            "Tokens that other pools would find",
            "percentunit",
            "A forecast, by the pool's size beside today's; now: what was found.",
            *(
                (
                    f'avg by (model) (kvd_would_hit_ratio{{HERE, pool="{pool}"}})',
                    f"{{{{model}}}} {pool}",
                )
                for pool in ("-50%", "now", "+100%", "unlimited")
            ),
        ),
        graph(
            "Age at eviction",
            "s",
            "Time since the last use. Minutes or less: the pool is small.",
            *(
                (
                    _quantile(quantile, "kvd_namespace_eviction_age_seconds_bucket", "model"),
                    f"{{{{model}}}} p{quantile * 100:.0f}",
                )
                for quantile in (0.1, 0.5)
            ),
        ),
        graph(
            "Chunks asked for loads",
            "short",
            "Per second. Missed: evicted between lookup and load.",
            (
                _rate("kvd_load_answered_chunks_total", "answer"),
                "{{answer}}",
            ),
            stack=True,
        ),
    ],
    "Pool": [
        graph(
            "Bytes, by model and state",
            "bytes",
            "ready: can be found; writing: under way; draining: given up, not yet free.",
            ("sum by (model, state) (kvd_namespace_bytes{HERE})", "{{model}} {{state}}"),
            ("sum(kvd_pool_free_bytes{HERE})", "free"),
            stack=True,
        ),
        graph(
            "Pinned",
            "bytes",
            "Chunks that loads keep from being evicted.",
            (
                "sum by (model) (kvd_namespace_pinned_chunks{HERE} * kvd_namespace_chunk_bytes)",
                "{{model}}",
            ),
            stack=True,
        ),
        graph(
            "On its way",
            "bytes",
            "Memory that is allocated, and what each lane can use of it.",
            ("sum by (instance) (kvd_pool_allocated_bytes{HERE})", "{{instance}} allocated"),
            ("kvd_lane_pool_usable_bytes{HERE}", "{{instance}} {{device}}"),
        ),
    ],
    "Copying": [
        graph(
            "Bytes per second",
            "Bps",
            "By direction and device.",
            (
                _rate("kvd_copied_bytes_total", "direction", "device"),
                "{{direction}} {{device}}",
            ),
        ),
        graph(
            "Speed while copying",
            "Bps",
            "Bytes over the time in which bytes were copied: what the device does at best.",
            (
                _rate("kvd_copied_bytes_total", "direction", "device")
                + " / "
                + _rate("kvd_copy_seconds_total", "direction", "device"),
                "{{direction}} {{device}}",
            ),
        ),
        graph(
            "Jobs that did not end well",
            "short",
            "Per second, by outcome. stale: evicted meanwhile, an ordinary miss.",
            (
                _rate("kvd_jobs_total", "direction", "outcome", where=', outcome!="ok"'),
                "{{direction}} {{outcome}}",
            ),
        ),
        *(
            graph(
                f"Jobs: {stage}",
                "s",
                text,
                (_p(0.5, stage), "{{direction}} p50"),
                (_p(0.99, stage), "{{direction}} p99"),
            )
            for stage, text in (
                ("queued", "From arrival to the start, without stream_wait."),
                ("stream_wait", "Waiting for the engine's stream."),
                ("copied", "From the first to the last byte."),
                ("reported", "From the last byte to the answer."),
            )
        ),
        graph(
            "Queue",
            "short",
            "Jobs that wait in the lanes.",
            ("kvd_lane_queued_jobs{HERE}", "{{instance}} {{device}}"),
        ),
        graph(
            "Oldest job",
            "s",
            "How long it has waited.",
            ("kvd_lane_oldest_job_seconds{HERE}", "{{instance}} {{device}}"),
        ),
    ],
    "Tiers": [
        graph(
            "Bytes per second",
            "Bps",
            "put: chunks that go down to a tier; get: chunks that come up.",
            (_rate("kvd_tier_bytes_total", "tier", "direction"), "{{tier}} {{direction}}"),
        ),
        graph(
            "Chunks got, by outcome",
            "short",
            "Per second. ok: a hit; corrupt: not what was kept, found by its checksum.",
            (_rate("kvd_tier_get_chunks_total", "tier", "outcome"), "{{tier}} {{outcome}}"),
            stack=True,
        ),
        graph(
            "A batch of gets",
            "s",
            "From the broker's order to the tier's answer, over half an hour.",
            *(
                (_quantile(quantile, "kvd_tier_get_seconds_bucket", "tier"), f"{{{{tier}}}} {name}")
                for quantile, name in ((0.5, "p50"), (0.99, "p99"))
            ),
        ),
        graph(
            "Room",
            "bytes",
            "What each tier takes of its medium, and its budget.",
            ("kvd_tier_used_bytes{HERE}", "{{instance}} {{tier}} used"),
            ("kvd_tier_budget_bytes{HERE}", "{{instance}} {{tier}} budget"),
        ),
        graph(
            "Set aside",
            "short",
            "How often the breaker opened, per second and by reason, and whether a tier is usable.",
            (_rate("kvd_tier_breaker_opened_total", "tier", "reason"), "{{tier}} {{reason}}"),
            ("kvd_tier_usable{HERE}", "{{instance}} {{tier}} usable"),
        ),
        graph(
            "Not kept in time",
            "short",
            "Per second: chunks that a tier was to keep and that left memory first; and chunks that"
            " were to come up and did not.",
            (_rate("kvd_tier_unkept_chunks_total", "tier"), "{{instance}} {{tier}} not kept"),
            (_rate("kvd_not_promoted_chunks_total", "instance"), "{{instance}} not come up"),
            (_rate("kvd_sought_dropped_chunks_total", "instance"), "{{instance}} not asked for"),
        ),
    ],
    "KV events": [
        graph(
            "Changes",
            "short",
            "Per second, by model: chunks that can be found from then on, or no more.",
            (_rate("kvd_namespace_changes_total", "model"), "{{model}}"),
            stack=True,
        ),
        graph(
            "Changes published",
            "short",
            "Per second, by engine.",
            (_rate("kvd_engine_kv_events_total", "engine"), "{{engine}}"),
        ),
        graph(
            "Lag",
            "s",
            "From a change to its publication, the longest within a minute. An idle engine"
            " publishes about once a second.",
            ("kvd_engine_kv_events_lag_max_seconds{HERE}", "{{engine}}"),
        ),
        graph(
            "Snapshots",
            "short",
            "Per second: looks through a whole directory, and those after an overrun.",
            (_rate("kvd_kv_event_snapshots_total", "instance"), "{{instance}}"),
            (_rate("kvd_kv_event_overruns_total", "instance"), "{{instance}} overrun"),
        ),
    ],
    "Daemon": [
        graph(
            "Loop",
            "s",
            "The longest turn of the broker's loop within a minute.",
            ("kvd_broker_loop_lag_max_seconds{HERE}", "{{instance}}"),
        ),
        graph(
            "Requests",
            "reqps",
            "By type.",
            (_rate("kvd_broker_requests_total", "type"), "{{type}}"),
            stack=True,
        ),
        graph(
            "Refusals",
            "reqps",
            "By code.",
            (_rate("kvd_broker_refusals_total", "code"), "{{code}}"),
            stack=True,
        ),
        graph(
            "Processor time",
            "percentunit",
            "Of one core: the broker.",
            ('rate(process_cpu_seconds_total{job="kvd", HERE}[$__rate_interval])', "{{instance}}"),
        ),
        graph(
            "Memory of the broker",
            "bytes",
            "Without the pool.",
            ('process_resident_memory_bytes{job="kvd", HERE}', "{{instance}}"),
        ),
        graph(
            "Sessions, leases",
            "short",
            "Open connections, and groups of chunks pinned for loads.",
            ("sum(kvd_sessions{HERE})", "sessions"),
            ("sum(kvd_leases{HERE})", "leases"),
        ),
    ],
}


def panels() -> list[Panel]:
    """Every panel, numbered and placed: figures six a row, graphs three."""
    placed: list[Panel] = []
    y = 0
    for title, row in ROWS.items():
        placed.append(
            {"type": "row", "title": title, "collapsed": False, "gridPos": _at(0, y, _WIDE, 1)}
        )
        y += 1
        width, height = (4, 4) if row[0]["type"] == "stat" else (8, _HEIGHT)
        for number, panel in enumerate(row):
            line, column = divmod(number, _WIDE // width)
            where = _at(column * width, y + line * height, width, height)
            placed.append(panel | {"gridPos": where, "datasource": _SOURCE})
        y += -(-len(row) * width // _WIDE) * height
    return [{"id": number, **panel} for number, panel in enumerate(placed, 1)]


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def dashboard() -> dict[str, Any]:
    """The whole dashboard."""
    return {
        "title": "kvd",
        "uid": "kvd",
        "description": "The KV-cache offload daemon: what it finds, stores, copies.",
        "tags": ["kvd"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                },
                {
                    "name": "instance",
                    "label": "Instance",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": "label_values(kvd_up, instance)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "annotations": {
            "list": [
                {
                    "name": "Starts",
                    "enable": True,
                    "iconColor": "blue",
                    "datasource": _SOURCE,
                    "expr": 'changes(process_start_time_seconds{job="kvd", '
                    f"{_HERE}}}[$__interval]) > 0",
                    "titleFormat": "{{instance}} was started",
                }
            ]
        },
        "panels": panels(),
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
