"""The report as tables, for people who ask once; `kvd top` shows it live."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvd.metrics.history import quantile
from kvd.metrics.words import NOTHING, duration, number, percent, several, size

_REFUSED = ("present", "pending", "full", "quota", "not_yet", "bad_key", "draining")


def print_tables(report: dict[str, Any]) -> None:
    """Print everything that matters at a glance."""
    console = Console()
    state = "[green]ready[/]" if report["ready"] else "[red]not ready[/]"
    up = duration(report["time"] - report["started"])
    console.print(f"{report['version']}  pid {report['pid']}  {state}  up {up}")
    console.print(f"boot id {report['boot_id']}  {report['runtime_dir']}")
    for condition in report["conditions"]:
        console.print(f"{escape(condition['text'])} {escape(condition['remedy'])}", style="yellow")
    for table in (_checks, _lanes, _namespaces, _engines, _totals):
        console.print(table(report))


def _checks(report: dict[str, Any]) -> Table:
    table = Table("check", "", "", "", title="Checks")
    for check in report["checks"]:
        left = check["seconds_left"]
        table.add_row(
            check["name"],
            "[green]ok[/]" if check["ok"] else "[red]not ok[/]",
            "" if check["percent"] is None else f"{check['percent']:.0f} %",
            escape(check["text"]) + (f"; about {duration(left)} left" if left else ""),
        )
    return table


def _lanes(report: dict[str, Any]) -> Table:
    columns = ("lane", "state", "usable", "queued jobs", "in flight", "workers", "restarts")
    table = Table(*columns, title="Lanes")
    for lane in report["lanes"]:
        error = lane["pin_error"] or ("" if lane["up"] else lane["last_error"])
        table.add_row(
            lane["device"],
            lane["state"] + (f": {escape(error)}" if error else ""),
            f"{size(lane['usable_bytes'])} of {size(lane['pool_bytes'])}",
            str(lane["queued_jobs"]),
            size(lane["bytes_in_flight"]),
            str(lane["workers"]),
            str(lane["counters"]["restarts"]),
        )
    return table


def _namespaces(report: dict[str, Any]) -> Table:
    columns = ("namespace", "model", "engines", "chunk", "chunks", "held", "age when evicted")
    table = Table(*columns, title="Namespaces")
    for space in report["namespaces"]:
        chunks = ", ".join(f"{value} {name}" for name, value in space["chunks"].items() if value)
        age = quantile(space["counters"]["eviction_age"], 0.5)
        table.add_row(
            space["id"][:8],
            escape(space["model"]),
            str(space["engines"]),
            size(space["bytes_per_chunk"]),
            f"{chunks or 'empty'} of {space['num_chunks']}",
            size(space["held_bytes"]),
            NOTHING if age is None else f"median {duration(age)}",
        )
    return table


def _engines(report: dict[str, Any]) -> Table:
    table = Table("engine", "state", "ranks", "tokens found", "pids", title="Engines")
    for engine in report["engines"]:
        lookups, missing = engine["counters"], engine["missing_ranks"]
        waiting = f"waiting for ranks {missing}" if missing else "no rank is registered"
        table.add_row(
            escape(engine["name"]),
            "attached" if engine["attached"] else escape(waiting),
            str(engine["world_size"]),
            _share(lookups["hit_tokens"], lookups["lookup_tokens"]),
            " ".join(str(session["pid"]) for session in engine["sessions"]),
        )
    return table


def _totals(report: dict[str, Any]) -> Table:
    counters = report["counters"]
    table = Table("total", "", title="Since the start", show_header=False)
    for way, name in (("store", "stored"), ("load", "loaded")):
        jobs = {
            key.partition("_")[2]: count
            for key, count in counters["jobs"].items()
            if key.startswith(way) and count
        }
        outcomes = ", ".join(f"{number(count)} {key}" for key, count in jobs.items())
        table.add_row(name, f"{size(counters[f'{way}_bytes'])}; jobs: {outcomes or 'none'}")
    refused = [
        f", {number(counters[key])} {key.replace('_', ' ')}" for key in _REFUSED if counters[key]
    ]
    table.add_row(
        "chunks offered",
        f"{number(counters['offered'])}: {number(counters['accepted'])} accepted{''.join(refused)}",
    )
    table.add_row("chunks evicted", number(counters["evicted"] + counters["yielded"]))
    tokens, chunks = counters["lookup_tokens"], counters["lookup_chunks"]
    found = _share(counters["hit_tokens"], tokens)
    table.add_row("looked up", f"{several(tokens, 'token')}, {several(chunks, 'chunk')}")
    table.add_row("hit rate", found)
    table.add_row("leases", number(report["leases"]))
    return table


def _share(found: int, asked: int) -> str:
    return percent(found / asked) if asked else NOTHING
