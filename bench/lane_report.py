"""What lane.py has measured, as tables and as a file: figures in, text out."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

KIB, MIB = 1024, 2**20
MOVES = ("load", "store", "both")
KINDS = {"": "", "_calls": "driver's calls", "_bulk": "256 MiB jobs"}
COMPARED = {"allowed", KINDS["_calls"], KINDS["_bulk"]}
BOTH_FRAGMENTS = (8 * KIB, 64 * KIB)
BOTH_RATIO = 1.8
MOST = {"job_us": 150.0, "idle_percent": 1.0}
OTHERS = {
    "job_us": "a job of one chunk, lane and client, µs",
    "load_job_lane_us": "of a load: the lane",
    "load_job_client_us": "of a load: the client",
    "store_job_lane_us": "of a store: the lane",
    "store_job_client_us": "of a store: the client",
    "idle_percent": "an idle lane, % of a core",
}


def write(result: dict[str, Any], path: Path) -> None:
    """Write all of it; a reader never sees half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """All of it: speeds, everything else with the goals, the stages of a piece."""
    yield _speeds(result)
    yield _others(result)
    yield _stages(result)


def short(nbytes: int) -> str:
    """4 KiB, 2 MiB."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def _speeds(result: dict[str, Any]) -> Table:
    """A row for each length and direction; a column for each way to load the lane."""
    workers = {int(found[1]) for found in _matches(result, r"load_GBps_\d+_workers_(\d+)")}
    # Heading, and the figure's name for a direction and a length of fragments.
    named = [(words or "allowed", f"{{}}{kind}_GBps_{{}}") for kind, words in KINDS.items()]
    named.insert(1, ("wall", "{}_wall_GBps_{}"))
    named += [(f"{n} workers", f"{{}}_GBps_{{}}_workers_{n}") for n in sorted(workers)]
    fragments = _fragments(result)
    columns: list[tuple[str, list[str]]] = []
    for heading, name in named:
        names = [name.format(move, fragment) for fragment in fragments for move in MOVES]
        columns.append((heading, [_number(result.get(which)) for which in names]))
        if heading in COMPARED:
            beside = [_beside(result, which) for which in names]
            columns.append(("before", [before for before, _ in beside]))
            columns.append(("ratio", [ratio for _, ratio in beside]))
    columns = [column for column in columns if any(column[1])]
    shown = _table(
        "GB/s",
        *(heading for heading, _ in columns),
        title=f"GB/s that a lane's processor time allows on the test driver: commit"
        f" {result['commit'] or 'unknown'}, before {result.get('before_commit', 'none')};"
        f" {result['cpus']} CPUs ({result['cpu']}), Python {result['python']}",
    )
    rows = [f"{short(fragment)} {move}" for fragment in fragments for move in MOVES]
    for row, values in zip(rows, zip(*(column for _, column in columns), strict=True), strict=True):
        shown.add_row(row, *values)
    return shown


def _others(result: dict[str, Any]) -> Table:
    shown = _table("figure", "now", "before", "ratio", "goal", title="Costs and goals")
    shown.columns[-1].justify = "left"
    for fragment in _fragments(result):
        name = f"cpu_ms_per_GB_{fragment}"
        text = f"{short(fragment)}: processor milliseconds a GB"
        shown.add_row(text, _number(result.get(name)), *_beside(result, name), "")
    for name, text in OTHERS.items():
        value = result.get(name)
        goal = ""
        if name in MOST and value is not None:
            goal = f"at most {MOST[name]:g}: {_met(value <= MOST[name])}"
        shown.add_row(text, _number(value), *_beside(result, name), goal)
    for kind in ("", "_calls"):
        for fragment in BOTH_FRAGMENTS:
            load, store, both = (result.get(f"{move}{kind}_GBps_{fragment}") for move in MOVES)
            if load and store and both:
                ratio = 2 * both / (load + store)
                words = f", {KINDS[kind]}" if kind else ""
                goal = f"at least {BOTH_RATIO}: {_met(ratio >= BOTH_RATIO)}"
                text = f"{short(fragment)}: both, of one direction{words}"
                shown.add_row(text, _number(ratio), "", "", goal)
    return shown


def _stages(result: dict[str, Any]) -> Table:
    shown = _table(
        *("stage", "µs a piece", "before", "ms a GB", "before"),
        title="Stages of a piece with the driver's calls; what the timers cost is in the rest",
    )
    for found in _matches(result, r"stage_(load|store)_(\w+)_(?:us|MiB)_(\d+)"):
        name = found[0]
        gb = name.replace("_us_", "_ms_per_GB_")
        names = (name, f"before_{name}", *((gb, f"before_{gb}") if gb != name else ()))
        stage = found[2].replace("_", " ") + (", MiB" if "_MiB_" in name else "")
        values = [_number(result.get(which)) for which in names]
        shown.add_row(f"{short(int(found[3]))} {found[1]}: {stage}", *values)
    return shown


def _table(*columns: str, title: str) -> Table:
    table = Table(*columns, title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _fragments(result: dict[str, Any]) -> list[int]:
    return sorted(int(found[1]) for found in _matches(result, r"load_GBps_(\d+)"))


def _matches(result: dict[str, Any], pattern: str) -> list[re.Match[str]]:
    return [found for name in result if (found := re.fullmatch(pattern, name))]


def _beside(result: dict[str, Any], name: str) -> tuple[str, str]:
    """The pinned commit's, and by how much this is more."""
    value, before = result.get(name), result.get(f"before_{name}")
    return _number(before), f"{value / before:.2f}" if value and before else ""


def _met(met: bool) -> str:
    return "met" if met else "missed"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}" if value < 10 else f"{value:,.1f}"
