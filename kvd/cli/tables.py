"""The report as tables, for people who ask once; `kvd top` shows it live."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvd.cli import top_view
from kvd.config.sources import DEFAULT
from kvd.metrics.counts import MissReason
from kvd.metrics.declare import Histogram
from kvd.metrics.reading import NOTHING, duration, latency, number, percent, several, shorten, size

_UNLIMITED_COLUMNS = 10_000
_CHUNK_STATES = ("ready", "lent", "writing", "pinned")
_REFUSED = ("present", "pending", "full", "quota", "not_yet", "draining")
MOST_REASONS = 3  # why chunks were missed


def print_report(report: dict[str, Any], *, wide: bool = False) -> None:
    """Print everything that matters at a glance; on a terminal names are shortened, unless `wide`.

    What another program reads has whole names.
    """
    console = _console(wide=wide)
    console.print(top_view.header(report), top_view.problems(report), sep="\n")
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
    lanes = top_view.lanes(report["lanes"], wide=_whole_names(wide=wide))
    console.print(lanes if report["lanes"] else "Lanes: none")
    if report["tiers"]:
        _print_tiers(console, report["tiers"])
    console.print(f"Pool: {top_view.pool_use(report)}")
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
                top_view.tier_state(tier),
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
        how = f": {tier['described']}" if tier["described"] else ""
        pid = f", pid {tier['pid']}" if tier["pid"] else ""
        console.print(Text(f"{tier['name']} is {tier['setting']}{pid}{how}", "dim"))


def print_namespaces(namespaces: list[dict[str, Any]], *, wide: bool = False) -> None:
    """Print a line for each namespace; names as `print_report` does."""
    whole = _whole_names(wide=wide)
    rows = []
    for space in namespaces:
        age = Histogram(**space["counters"]["eviction_age"]).quantile(0.5)
        rows.append(
            (
                space["id"][:8],
                space["model"] if whole else shorten(space["model"]),
                str(space["engines"]),
                *(number(space["chunks"][state]) for state in _CHUNK_STATES),
                number(space["num_chunks"]),
                size(space["bytes_per_chunk"]),
                size(space["held_bytes"]),
                NOTHING if age is None else f"median {duration(age)}",
            )
        )
    chunks = ("ready", "on loan", "writing", "pinned", "most", "chunk")
    columns = ("namespace", "model", "engines", *chunks, "holds", "age when evicted")
    _print_table(_console(wide=wide), "Namespaces", columns, rows)


def print_engines(engines: list[dict[str, Any]], *, wide: bool = False) -> None:
    """Print a line for each session of each engine; names as `print_report` does."""
    whole = _whole_names(wide=wide)
    rows = []
    for engine in engines:
        lookups, missing = engine["counters"], engine["missing_ranks"]
        waits = f"waits for ranks {missing}" if missing else "no rank registered"
        about = (
            engine["name"] if whole else shorten(engine["name"]),
            "attached" if engine["attached"] else waits,
            (engine["namespace"] or "")[:8],
            top_view.found_share(
                _share(lookups["hit_tokens"], lookups["lookup_tokens"]),
                _share(lookups["hit_chunks"], lookups["lookup_chunks"]),
            ),
        )
        for session in engine["sessions"]:
            rows.append(
                (
                    *about,
                    session["kind"],
                    "" if session["rank"] is None else str(session["rank"]),
                    top_view.device_name(session["device"] or "", wide=whole),
                    str(session["pid"]),
                    str(session["uid"]),
                    duration(session["seconds"]),
                )
            )
            about = ("", "", "", "")
    session = ("session", "rank", "device", "pid", "uid", "since")
    columns = ("engine", "state", "namespace", "tokens found", *session)
    _print_table(_console(wide=wide), "Engines", columns, rows)


def print_settings(settings: dict[str, dict[str, Any]]) -> None:
    """Print a line for each setting: its value, and where that comes from."""
    table = Table("SETTING", "VALUE", "FROM", box=None, pad_edge=False)
    for key, entry in settings.items():
        origin, later = entry["from"], entry.get("after_restart")
        if later:
            origin += f"; after a restart {later['value']} from {later['from']}"
        row = (key, str(entry["value"]), origin)
        table.add_row(*map(Text, row), style="dim" if origin == DEFAULT else "")
    _console().print(table)


def _totals(report: dict[str, Any]) -> list[tuple[str, str]]:
    counters = report["counters"]
    rows = []
    for way, name in (("store", "stored"), ("load", "loaded")):
        jobs = {
            key.partition("_")[2]: count
            for key, count in counters["jobs"].items()
            if key.startswith(way) and count
        }
        outcomes = ", ".join(f"{number(count)} {key}" for key, count in jobs.items())
        rows.append((name, f"{size(counters[f'{way}_bytes'])}; jobs: {outcomes or 'none'}"))
    refused = [
        f", {number(counters[key])} {key.replace('_', ' ')}" for key in _REFUSED if counters[key]
    ]
    offered = f"{number(counters['offered'])}: {number(counters['accepted'])} accepted"
    tokens, chunks = counters["lookup_tokens"], counters["lookup_chunks"]
    found_tokens = percent(_share(counters["hit_tokens"], tokens))
    found_keys = percent(_share(counters["hit_chunks"], chunks))
    return [
        *rows,
        ("chunks offered", offered + "".join(refused)),
        ("chunks evicted", number(counters["evicted"] + counters["yielded"])),
        ("chunks missed", misses_in_words(counters) or "0"),
        ("looked up", f"{several(tokens, 'prompt token')}, {several(chunks, 'key')}"),
        ("found", f"{found_tokens} of prompt tokens, {found_keys} of keys looked up"),
        ("leases", number(report["leases"])),
        *_kv_events(report),
    ]


def _kv_events(report: dict[str, Any]) -> list[tuple[str, str]]:
    lateness = top_view.kv_events(report)
    published = number(report["counters"]["kv_events"])
    return [("KV events", f"{published} published; {lateness}")] if lateness else []


def _share(found: int, asked: int) -> float | None:
    return found / asked if asked else None


def _print_table(
    console: Console,
    title: str,
    columns: tuple[str, ...],
    rows: Iterable[tuple[str | Text, ...]],
) -> None:
    table = Table(*columns, title=title, show_header=bool(columns))
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    console.print(table if table.rows else f"{title}: none")


def _whole_names(*, wide: bool) -> bool:
    return wide or not sys.stdout.isatty()


def _console(*, wide: bool = False) -> Console:
    return Console(width=_UNLIMITED_COLUMNS if _whole_names(wide=wide) else None)


def misses_in_words(counters: Mapping[str, Any]) -> str:
    """`1,200: 60 % never seen, 30 % evicted (median 12 min before), 10 % being stored`.

    The most frequent reasons, of `counters` in the report; empty where nothing was missed.
    """
    missed = counters["missed"]
    total = sum(missed.values())
    if not total:
        return ""
    age = Histogram(**counters["missed_age"]).quantile(0.5)
    told = []
    for reason, count in sorted(missed.items(), key=lambda item: -item[1])[:MOST_REASONS]:
        if count:
            median = f" (median {duration(age)} before)" if reason == MissReason.EVICTED else ""
            told.append(f"{percent(count / total)} {reason.replace('_', ' ')}{median}")
    return f"{number(total)}: {', '.join(told)}"
