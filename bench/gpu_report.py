"""What was measured on a GPU, as a table and as a file; parts that are missing say why.

No driver, no daemon: figures in, text out.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

KIB, MIB = 1024, 2**20
DIRECTIONS = ("store", "load", "both")
WAYS = ("dma", "kernel")
# What counts, from this length of fragment on, and the least ratio to the raw copy.
RATIO_GOALS = {"store": (64 * KIB, 0.95), "load": (64 * KIB, 0.95), "both": (64 * KIB, 0.9)}
SHORT_LOADS = (8 * KIB, 0.6)
MOST_LOSS_PERCENT = 2.0


def write(result: dict[str, Any], path: Path) -> None:
    """Write all that is there until now; a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)


def table(result: dict[str, Any]) -> Table:
    """All of it, each figure beside its goal."""
    device, driver = result.get("device", "unknown device"), result.get("driver", "unknown")
    shown = Table(
        *("figure", "kvd", "raw", "batch", "kvd / raw", "goal"),
        title=f"{device}, driver {driver}, {result.get('date', 'unknown date')}",
    )
    for column in shown.columns[1:]:
        column.justify = "right"
    for row in _rows(result):
        shown.add_row(*row)
    return shown


def missing(result: dict[str, Any]) -> list[str]:
    """A line for each part that has no figures."""
    return [f"not measured: {part}: {why}" for part, why in result.get("missing", {}).items()]


def _rows(result: dict[str, Any]) -> Iterator[tuple[str, str, str, str, str, str]]:
    fragments = sorted(result.get("fragments", []), key=lambda row: int(row["bytes"]))
    for name in DIRECTIONS:
        for row in fragments:
            rates = row[name]
            ratio = rates["kvd"] / rates["raw"]
            yield (
                f"{name}, {short(row['bytes'])}, GB/s",
                *(_number(rates[way]) for way in ("kvd", "raw", "batch")),  # type: ignore[misc]
                f"{ratio:.2f}",
                ratio_goal(name, row["bytes"], ratio),
            )
    for section in ("latency", "registration"):
        for name, value in (result.get(section) or {}).items():
            yield name.replace("_", " "), _number(value), "", "", "", ""
    interference = result.get("interference") or {}
    for way in WAYS:
        for name, value in (interference.get(way) or {}).items():
            last = loss_goal(way, value) if name == "loss_percent" else ""
            yield f"beside {way}: {name.replace('_', ' ')}", _number(value), "", "", "", last


def ratio_goal(name: str, fragment: int, ratio: float) -> str:
    """The goal of a direction for this length, and whether it is met; empty where there is none."""
    shortest, least = RATIO_GOALS[name]
    if name == "load" and fragment == SHORT_LOADS[0]:
        least = SHORT_LOADS[1]
    elif fragment < shortest:
        return ""
    return f"at least {least}: {_met(ratio >= least)}"


def loss_goal(way: str, percent: float) -> str:
    """The same for what another process loses."""
    if way != "dma":
        return ""
    return f"at most {MOST_LOSS_PERCENT:g}: {_met(percent <= MOST_LOSS_PERCENT)}"


def short(nbytes: int) -> str:
    """4 KiB, 2 MiB."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def _met(met: bool) -> str:
    return "met" if met else "missed"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:,.2f}"
