"""What was measured on a GPU, as a table of plain text; parts that are missing say why.

No driver, no daemon, no package: figures in, text out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

KIB, MIB = 1024, 2**20
DOUBLE = "this is a test double of CUDA's driver: no figure here says anything about a GPU"
DIRECTIONS = ("store", "load", "both")
WAYS = ("dma", "kernel")
HEAD = ("figure", "kvd", "raw", "batch", "kernel", "kvd / raw", "lane ms/GB", "n", "goal")
# What counts, from this length of fragment on, and the least ratio to the raw copy.
RATIO_GOALS = {"store": (64 * KIB, 0.95), "load": (64 * KIB, 0.95), "both": (64 * KIB, 0.9)}
SHORT_LOADS = (8 * KIB, 0.6)
MOST_LOSS_PERCENT = 2.0
LEAST_SAMPLES = 5  # of fewer, quartiles say little


def table(result: Mapping[str, Any]) -> Iterator[str]:
    """All of it, each figure beside its goal.

    ± is how far a median can be trusted (gpu_figures.spread). A goal counts as met or missed
    where the figure is further from it than that, and of enough samples.
    """
    device, driver = result.get("device", "unknown device"), result.get("driver", "unknown")
    moved = result.get("bytes", 0) // MIB
    yield (
        f"{device}, driver {driver}, {result.get('date', 'unknown date')},"
        f" {moved} MiB a measurement and direction; GB/s, medians"
    )
    if machine := result.get("machine"):
        yield ", ".join(f"{name} {found}" for name, found in machine.items())
    if "test double" in device:
        yield DOUBLE
    yield from columns([HEAD, *_rows(result)])
    for way, why in (result.get("ways") or {}).items():
        if why:
            yield f"{way}, called directly, cannot be used here: {why}"


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines whose words stand under each other, the first ones to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (word.rjust(width) for word, width in zip(others, widths[1:], strict=True))
        yield "  ".join((first.ljust(widths[0]), *cells)).rstrip()


def missing(result: Mapping[str, Any]) -> list[str]:
    """A line for each part that has no figures."""
    return [f"not measured: {part}: {why}" for part, why in result.get("missing", {}).items()]


def _rows(result: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    fragments = sorted(result.get("fragments", []), key=lambda row: int(row["bytes"]))
    for name in DIRECTIONS:
        for row in fragments:
            found = row[name]
            yield (
                f"{name}, {short(row['bytes'])}",
                *(middle(found.get(way)) for way in ("kvd", "raw", "batch", "kernel")),
                trusted(found["ratio"]),
                middle(found.get("cpu_ms_per_GB")),
                str(found["kvd"]["n"]),
                ratio_goal(name, row["bytes"], found["ratio"]),
            )
    for section in ("latency", "registration"):
        for name, value in (result.get(section) or {}).items():
            yield _row(name.replace("_", " "), f"{value:,.2f}")
    interference = result.get("interference") or {}
    for way in WAYS:
        for name, value in (interference.get(way) or {}).items():
            last = loss_goal(way, value) if name == "loss_percent" else ""
            text = f"beside {way}: {name.replace('_', ' ')}"
            yield _row(text, trusted(value), n=str(value["n"]), goal=last)


def _row(name: str, value: str, *, n: str = "", goal: str = "") -> tuple[str, ...]:
    return (name, value, *[""] * (len(HEAD) - 4), n, goal)


def ratio_goal(name: str, fragment: int, ratio: Mapping[str, float]) -> str:
    """The goal of a direction for this length, and whether it is met; empty where there is none."""
    shortest, least = RATIO_GOALS[name]
    if name == "load" and fragment == SHORT_LOADS[0]:
        least = SHORT_LOADS[1]
    elif fragment < shortest:
        return ""
    return f"at least {least}: {_met(ratio['median'] - least, ratio)}"


def loss_goal(way: str, percent: Mapping[str, float]) -> str:
    """The same for what another process loses."""
    if way != "dma":
        return ""
    met = _met(MOST_LOSS_PERCENT - percent["median"], percent)
    return f"at most {MOST_LOSS_PERCENT:g}: {met}"


def short(nbytes: int) -> str:
    """4 KiB, 2 MiB."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def middle(found: Mapping[str, float] | None) -> str:
    """The median, or that there is none."""
    return "none" if found is None else f"{found['median']:,.2f}"


def trusted(found: Mapping[str, float]) -> str:
    """The median and its margin."""
    return f"{found['median']:,.2f} ±{found['margin']:.2f}"


def _met(better_by: float, found: Mapping[str, float]) -> str:
    if found["n"] < LEAST_SAMPLES or abs(better_by) < found["margin"]:
        return "open"
    return "met" if better_by >= 0 else "missed"
