"""What lane.py has measured, as a table and as a file: figures in, text out."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

KIB, MIB = 1024, 2**20
MOVES = ("load", "store", "both")
KINDS = {
    "": "",
    "_calls": ", with the driver's calls",
    "_kernel": ", by the kernel",
    "_bulk": ", jobs of 256 MiB",
}
FASTER, FASTER_FRAGMENTS = 4.0, (8 * KIB, 64 * KIB)
BOTH_RATIO = 1.8
MOST = {"job_us": 150.0, "idle_percent": 1.0}
MEANING = {
    "job_us": "a job of one chunk, lane and client, µs",
    "load_job_lane_us": "of a load: the lane, µs",
    "load_job_client_us": "of a load: the client, µs",
    "store_job_lane_us": "of a store: the lane, µs",
    "store_job_client_us": "of a store: the client, µs",
    "idle_percent": "an idle lane, % of a core",
}


def write(result: dict[str, Any], path: Path) -> None:
    """Write all of it; a reader never sees half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)


def table(result: dict[str, Any]) -> Table:
    """Each figure beside the pinned commit's and its goal."""
    shown = Table(
        *("figure", "now", "wall", "before", "ratio", "goal"),
        title=f"CUDA lane on the test driver, {result['cpus']} CPUs ({result['cpu']}),"
        f" Python {result['python']}, commit {result['commit'] or 'unknown'},"
        f" before {result.get('before_commit', 'none')}",
        caption="GB/s that the lane's processor time allows; wall: bytes by wall time",
    )
    for column in shown.columns[1:5]:
        column.justify = "right"
    for row in _rows(result):
        shown.add_row(*row)
    return shown


def stages(result: dict[str, Any]) -> Table:
    """Where the lane's time goes, in a run of its own."""
    shown = Table(
        *("stage, with the driver's calls", "µs a piece", "before", "ms a GB", "before"),
        title="Stages of a piece; what the timers cost is in the rest",
    )
    for column in shown.columns[1:]:
        column.justify = "right"
    for name in result:
        if found := re.fullmatch(r"stage_(load|store)_(\w+)_us_(\d+)", name):
            move, stage, fragment = found[1], found[2], int(found[3])
            gb = name.replace("_us_", "_ms_per_GB_")
            names = (name, f"before_{name}", gb, f"before_{gb}")
            shown.add_row(
                f"{short(fragment)}: {move}, {stage.replace('_', ' ')}",
                *(_number(result.get(which)) for which in names),
            )
        elif found := re.fullmatch(r"stage_(load|store)_piece_MiB_(\d+)", name):
            pieces = (_number(result.get(which)) for which in (name, f"before_{name}"))
            shown.add_row(f"{short(int(found[2]))}: {found[1]}, MiB of a piece", *pieces)
    return shown


def _rows(result: dict[str, Any]) -> Iterator[tuple[str, str, str, str, str, str]]:
    found = (re.fullmatch(r"load_GBps_(\d+)", name) for name in result)
    fragments = sorted(int(name[1]) for name in found if name)
    for kind, words in KINDS.items():
        for fragment in fragments:
            for move in MOVES:
                yield from _rates(result, f"{move}{kind}", fragment, words)
    for fragment in fragments:
        name = f"cpu_ms_per_GB_{fragment}"
        yield _row(result, name, f"{short(fragment)}: processor ms a GB")
    for name, words in MEANING.items():
        yield _row(result, name, words)


def _rates(
    result: dict[str, Any], which: str, fragment: int, words: str
) -> Iterator[tuple[str, str, str, str, str, str]]:
    names = [name for name in result if re.match(rf"{which}_GBps_{fragment}(_workers_\d+)?$", name)]
    for name in names:
        _, _, workers = name.partition("_workers_")
        of = f", {workers} workers" if workers else ""
        text = f"{short(fragment)}: {which.partition('_')[0]}{words}{of}, GB/s"
        goal = "" if workers else _goal(result, which, fragment)
        yield _row(result, name, text, name.replace("_GBps", "_wall_GBps"), goal)


def _row(
    result: dict[str, Any], name: str, text: str, wall: str = "", goal: str = ""
) -> tuple[str, str, str, str, str, str]:
    value, before = result.get(name), result.get(f"before_{name}")
    ratio = f"{value / before:.2f}" if value and before else ""
    if name in MOST and value is not None:
        goal = f"at most {MOST[name]:g}: {_met(value <= MOST[name])}"
    return text, _number(value), _number(result.get(wall)), _number(before), ratio, goal


def _goal(result: dict[str, Any], which: str, fragment: int) -> str:
    """The goal of a figure, and whether it is met; empty where there is none."""
    move, _, kind = which.partition("_")
    value = result[f"{which}_GBps_{fragment}"]
    if move == "both" and kind != "bulk":
        ones = [result[f"{which.replace('both', one)}_GBps_{fragment}"] for one in MOVES[:2]]
        ratio = 2 * value / sum(ones)
        return f"{BOTH_RATIO} times one: {ratio:.2f}, {_met(ratio >= BOTH_RATIO)}"
    before = result.get(f"before_{which}_GBps_{fragment}")
    if kind or move == "both" or before is None or fragment not in FASTER_FRAGMENTS:
        return ""
    return f"{FASTER:g} times before: {_met(value >= FASTER * before)}"


def short(nbytes: int) -> str:
    """4 KiB, 2 MiB."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def _met(met: bool) -> str:
    return "met" if met else "missed"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"
