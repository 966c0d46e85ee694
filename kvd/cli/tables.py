"""The status report as tables and texts, for `kvd status`, `kvd engines` and `kvd top`."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvd.config.sources import DEFAULT
from kvd.metrics.counts import MissReason
from kvd.metrics.declare import Histogram
from kvd.metrics.reading import (
    NAME_LENGTH,
    NOTHING,
    Report,
    duration,
    latency,
    number,
    percent,
    several,
    shorten,
    size,
)

_UNLIMITED_COLUMNS = 10_000
_CHUNK_STATES = ("ready", "lent", "writing", "pinned")
_UNREPORTED = "not known: keys were not found, and no engine has reported why (report_missed)"
_REFUSED = ("present", "pending", "full", "quota", "not_yet", "draining")
MAX_MISS_REASONS = 3  # why chunks were missed
POOL_STATES = (("ready", "█"), ("writing", "▓"), ("draining", "▒"))
_MARKS = {"error": ("✖", "bold red"), "warning": ("▲", "yellow"), "hint": ("●", "blue")}


class Name:
    """A name in a cell of a table: its middle is left out where the column is too narrow for it.

    Args:
        name: the whole name.
        wide: never shorten it.
    """

    def __init__(self, name: str, *, wide: bool) -> None:
        self._name = name if wide else shorten(name, len(name))
        self._min_length = len(name) if wide else min(NAME_LENGTH, len(self._name))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the fewest and the most cells that it may take."""
        return Measurement(self._min_length, len(self._name))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield it in the cells that there are."""
        name = shorten(self._name, max(self._min_length, options.max_width))
        yield Text(name, no_wrap=True, overflow="ellipsis")


def print_report(report: dict[str, Any], *, wide: bool = False) -> None:
    """Print an overview of the report.

    On a terminal names are shortened unless `wide`; other output has full names.
    """
    console = _console(wide=wide)
    console.print(header(report), problems(report), sep="\n")
    _print_table(
        console,
        "Checks",
        ("check", "", ""),
        (
            (
                check["name"],
                Text("ok", "green") if check["ok"] else Text("not ok", "red"),
                check["text"],
            )
            for check in report["checks"]
        ),
    )
    lanes = lanes_table(report["lanes"], wide=_full_names(wide=wide))
    console.print(lanes if report["lanes"] else "Lanes: none")
    if report["tiers"]:
        _print_tiers(console, report["tiers"])
    console.print(f"Pool: {pool_use_text(report)}")
    print_namespaces(report["namespaces"], wide=wide)
    print_engines(report["engines"], wide=wide)
    _print_table(console, "Since the start", (), _totals(report))


def _print_tiers(console: Console, tiers: list[dict[str, Any]]) -> None:
    rows = []
    for tier in tiers:
        counts = tier["counters"]
        gets = Histogram(**counts["get_latency"])
        low, high = (latency(gets.quantile(q)) for q in (0.5, 0.99))
        rows.append(
            (
                tier["name"],
                tier_state(tier),
                f"{size(tier['used_bytes'])} of {size(tier['total_bytes'] or None)}",
                number(tier["chunks"]),
                f"{number(counts['puts']['ok'])}, {size(counts['put_bytes'])}",
                f"{number(counts['gets']['ok'])}, {size(counts['get_bytes'])}",
                f"{low} / {high}",
                several(sum(counts["opened"].values()), "time"),
                tier["last_error"] or NOTHING,
            )
        )
    columns = ("used", "chunks", "kept", "hits", "get p50 / p99", "set aside", "last error")
    _print_table(console, "Tiers", ("tier", "state", *columns), rows)
    for tier in tiers:
        description = f": {tier['described']}" if tier["described"] else ""
        pid = f", pid {tier['pid']}" if tier["pid"] else ""
        console.print(Text(f"{tier['name']} is {tier['setting']}{pid}{description}", "dim"))


def print_namespaces(namespaces: list[dict[str, Any]], *, wide: bool = False) -> None:
    """Print a line for each namespace; names as in `print_report`."""
    rows = []
    for namespace in namespaces:
        eviction_age = Histogram(**namespace["counters"]["eviction_age"]).quantile(0.5)
        rows.append(
            (
                namespace["id"][:8],
                Name(namespace["model"], wide=_full_names(wide=wide)),
                str(namespace["engines"]),
                *(number(namespace["chunks"][state]) for state in _CHUNK_STATES),
                number(namespace["num_chunks"]),
                size(namespace["bytes_per_chunk"]),
                size(namespace["held_bytes"]),
                NOTHING if eviction_age is None else f"median {duration(eviction_age)}",
            )
        )
    chunk_columns = ("ready", "on loan", "writing", "pinned", "most", "chunk")
    columns = ("namespace", "model", "engines", *chunk_columns, "holds", "age when evicted")
    _print_table(_console(wide=wide), "Namespaces", columns, rows)


def print_engines(engines: list[dict[str, Any]], *, wide: bool = False) -> None:
    """Print a line for each session of each engine; names as in `print_report`."""
    full_names = _full_names(wide=wide)
    rows = []
    for engine in engines:
        lookups, missing = engine["counters"], engine["missing_ranks"]
        waits = f"waits for ranks {missing}" if missing else "no rank registered"
        engine_cells: tuple[str | Name, ...] = (
            Name(engine["name"], wide=full_names),
            "attached" if engine["attached"] else waits,
            (engine["namespace"] or "")[:8],
            hit_share_text(
                _ratio(lookups["hit_tokens"], lookups["lookup_tokens"]),
                _ratio(lookups["hit_chunks"], lookups["lookup_chunks"]),
            ),
        )
        for session in engine["sessions"]:
            rows.append(
                (
                    *engine_cells,
                    session["kind"],
                    "" if session["rank"] is None else str(session["rank"]),
                    device_text(session["device"] or "", wide=full_names),
                    str(session["pid"]),
                    str(session["uid"]),
                    duration(session["seconds"]),
                )
            )
            engine_cells = ("", "", "", "")
    session = ("session", "rank", "device", "pid", "uid", "since")
    columns = ("engine", "state", "namespace", "tokens found", *session)
    _print_table(_console(wide=wide), "Engines", columns, rows)


def print_settings(settings: dict[str, dict[str, Any]]) -> None:
    """Print a line for each setting: its value and origin."""
    table = Table("SETTING", "VALUE", "FROM", box=None, pad_edge=False)
    for key, entry in settings.items():
        origin, pending = entry["from"], entry.get("after_restart")
        if pending:
            origin += f"; after a restart {pending['value']} from {pending['from']}"
        row = (key, str(entry["value"]), origin)
        table.add_row(*map(Text, row), style="dim" if origin == DEFAULT else "")
    _console().print(table)


def _totals(report: dict[str, Any]) -> list[tuple[str, str]]:
    counters = report["counters"]
    rows = []
    for direction, label in (("store", "stored"), ("load", "loaded")):
        jobs = {
            key.partition("_")[2]: count
            for key, count in counters["jobs"].items()
            if key.startswith(direction) and count
        }
        outcomes = ", ".join(f"{number(count)} {key}" for key, count in jobs.items())
        rows.append((label, f"{size(counters[f'{direction}_bytes'])}; jobs: {outcomes or 'none'}"))
    refused = [
        f", {number(counters[key])} {key.replace('_', ' ')}" for key in _REFUSED if counters[key]
    ]
    offered = f"{number(counters['offered'])}: {number(counters['accepted'])} accepted"
    tokens, chunks = counters["lookup_tokens"], counters["lookup_chunks"]
    token_share = percent(_ratio(counters["hit_tokens"], tokens))
    key_share = percent(_ratio(counters["hit_chunks"], chunks))
    return [
        *rows,
        ("chunks offered", offered + "".join(refused)),
        ("chunks evicted", number(counters["evicted"] + counters["yielded"])),
        ("chunks missed", misses_text(counters)),
        ("looked up", f"{several(tokens, 'prompt token')}, {several(chunks, 'key')}"),
        ("found", f"{token_share} of prompt tokens, {key_share} of keys looked up"),
        ("leases", number(report["leases"])),
        *_kv_event_rows(report),
    ]


def _kv_event_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    lateness = kv_event_text(report)
    published = number(report["counters"]["kv_events"])
    return [("KV events", f"{published} published; {lateness}")] if lateness else []


def _ratio(hits: int, lookups: int) -> float | None:
    return hits / lookups if lookups else None


def _print_table(
    console: Console,
    title: str,
    columns: tuple[str, ...],
    rows: Iterable[tuple[str | Text | Name, ...]],
) -> None:
    table = Table(*columns, title=title, show_header=bool(columns))
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    console.print(table if table.rows else f"{title}: none")


def _full_names(*, wide: bool) -> bool:
    return wide or not sys.stdout.isatty()


def _console(*, wide: bool = False) -> Console:
    return Console(width=_UNLIMITED_COLUMNS if _full_names(wide=wide) else None)


# Reasons whose names alone would mislead.
_REASON_TEXTS = {
    MissReason.READY: "ready too late or behind a miss",
    MissReason.QUOTA: "refused by quota",
    MissReason.RESET: "dropped by a reset",
    MissReason.REMOVED: "dropped by kvd evict",
    MissReason.OTHER_LAYOUT: "in another namespace",
}


def misses_text(counters: Mapping[str, Any]) -> str:
    """Return how many chunks were missed, and the most frequent reasons.

    For example ``1,200: 60 % never seen, 30 % evicted (median 12 min before), 10 % being stored``.
    Engines report misses apart from lookups, and some do not.
    """
    missed = counters["missed"]
    total = sum(missed.values())
    if not total:
        return _UNREPORTED if _has_unreported_misses(counters) else "0"
    median_age = Histogram(**counters["missed_age"]).quantile(0.5)
    parts = []
    for reason, count in sorted(missed.items(), key=lambda item: -item[1])[:MAX_MISS_REASONS]:
        if count:
            median = (
                f" (median {duration(median_age)} before)" if reason == MissReason.EVICTED else ""
            )
            text = _REASON_TEXTS.get(MissReason(reason), reason.replace("_", " "))
            parts.append(f"{percent(count / total)} {text}{median}")
    return f"{number(total)}: {', '.join(parts)}"


def _has_unreported_misses(counters: Mapping[str, Any]) -> bool:
    """Return whether lookups while attached missed, by keys, and by tokens if these are counted.

    The page decides the same in `memory.js`. For counters without a reported miss.
    """
    num_attached = counters["lookup_tokens"] - counters["detached_tokens"]
    misses_keys = counters["lookup_chunks"] > counters["hit_chunks"]
    return misses_keys and (not counters["lookup_tokens"] or num_attached > counters["hit_tokens"])


def header(report: Report, restarts: int = 0) -> Text:
    """Return the headline: version, readiness, uptime, pid and directory."""
    state, style = ("ready", "bold green") if report["ready"] else ("not ready", "bold red")
    text = Text.assemble(
        (report["version"], "bold"),
        "  ",
        (state, style),
        f"  up {duration(report['time'] - report['started'])}  pid {report['pid']}",
        f"  {report['host']}:{report['runtime_dir']}",
    )
    if restarts:
        text.append(f"  restarted {several(restarts, 'time')}", "yellow")
    return text


def problems(report: Report, max_shown: int | None = None) -> RenderableType:
    """Return the conditions with remedies, at most `max_shown`, and the number of the others."""
    conditions = report["conditions"]
    if not conditions:
        if not any(engine["attached"] for engine in report["engines"]):
            return Text("● Nothing is wrong, but no engine is attached.", "blue")
        return Text("✔ All is well.", "green")
    table = Table.grid(padding=(0, 1))
    for condition in conditions[:max_shown]:
        mark, style = _MARKS[condition["level"]]
        table.add_row(Text(mark, style), Text(condition["text"], style))
        table.add_row("", Text(condition["remedy"]))
    if max_shown is not None and max_shown < len(conditions):
        table.add_row(
            "", Text(f"and {len(conditions) - max_shown} more: kvd top --once shows all", "dim")
        )
    return table


def pool_use_text(report: Report) -> str:
    """`40 GiB ready, 24 GiB free of 64 GiB`.

    Free includes slots of namespaces that hold no chunk.
    """
    total = report["pool"]["cpu_bytes"]
    if not total:
        return "sized when the first engine comes"
    taken = {
        state: sum(namespace[f"{state}_bytes"] for namespace in report["namespaces"])
        for state, _ in POOL_STATES
    }
    free = total - sum(taken.values())
    return f"{size(taken['ready'])} ready, {size(free)} free of {size(total)}"


def kv_event_text(report: Report) -> str:
    """Return latency, snapshots and overruns of KV events; empty if there are none."""
    counters = report["counters"]
    if not counters["kv_events"]:
        return ""
    lags = [engine["published"]["lag_max_seconds"] for engine in report["engines"]]
    max_lag = max(lags, default=0.0)
    snapshots, overruns = counters["kv_event_snapshots"], counters["kv_event_overruns"]
    return (
        f"{latency(max_lag)} late at most; {several(snapshots, 'snapshot')},"
        f" {several(overruns, 'overrun')}"
    )


def lanes_table(lanes: Sequence[Report], rows: int | None = None, *, wide: bool = False) -> Table:
    """Return a table with a line for each lane, or for the first `rows`."""
    table = plain_table("lane", "state", "queue", "oldest", "usable", "restarts")
    for index, lane in enumerate(lanes[:rows]):
        state = "stopped" if lane["stopped"] else lane["state"]
        style = {"up": "green", "ending": "yellow"}.get(state, "red")
        table.add_row(
            device_text(lane["device"], wide=wide),
            Text(state, style),
            number(lane["queued_jobs"]),
            latency(lane["oldest_job_seconds"]),
            f"{size(lane['usable_bytes'])} of {size(lane['pool_bytes'])}",
            f"{lane['counters']['restarts']}{more_text(lanes, rows, index)}",
        )
    return table


def plain_table(*columns: str) -> Table:
    """Return a table without rules, whose cells are never wrapped; a `Name` may head its row."""
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index > 0)
    return table


def more_text(items: Sequence[Any], rows: int | None, index: int) -> str:
    """Return "and N more" for the last of `rows` lines if items are hidden, else empty."""
    if rows is None:
        return ""
    num_hidden = len(items) - rows
    return f" and {num_hidden} more" if num_hidden > 0 and index == rows - 1 else ""


def device_text(device: str, *, wide: bool) -> str:
    """Return a device's name; of a GPU's 32 UUID digits only eight unless `wide`."""
    return device if wide else device[: len("cuda:") + 8]


def tier_state(tier: Report) -> Text:
    """Return a tier's state: its process's, its breaker's, or full; and its duration."""
    if tier["stopped"]:
        return Text("stopped", "red")
    since = duration(tier["state_seconds"], units=1)
    if tier["state"] != "up":
        return Text(f"{tier['state']} {since}", "red" if tier["state"] == "down" else "yellow")
    if tier["breaker"] != "closed":
        word = "set aside" if tier["breaker"] == "open" else "probing"
        return Text(f"{word} {since}", "red")
    return Text("full", "yellow") if tier["full"] else Text(f"up {since}", "green")


def hit_share_text(tokens: float | None, keys: float | None) -> str:
    """Return the hit share of prompt tokens; that of keys if no tokens are counted."""
    if tokens is None and keys is not None:
        return f"{percent(keys)} of keys"
    return percent(tokens)
