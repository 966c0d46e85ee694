"""Measures the CUDA backend: prints one table, writes bench/out/gpu.json.

Each figure of kvd stands beside one large pinned `cudaMemcpyAsync` and beside
`cuMemcpyBatchAsync` called directly, measured in turn in every round of the same
run; figures are medians of the rounds.
"""

import argparse
import datetime as dt
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_interference
import gpu_lane
from gpu_device import Gpu, Reference
from gpu_engine import Engine, pool_bytes
from harness import MIB, Daemon, median
from rich.console import Console
from rich.table import Table

from kvd.errors import LaneError
from kvd.lane.device import Direction

KIB = 1024
FRAGMENTS = tuple(4 * KIB * 2**i for i in range(10))  # to 2 MiB
DIRECTIONS = {
    "store": (Direction.STORE,),
    "load": (Direction.LOAD,),
    "both": (Direction.LOAD, Direction.STORE),
}
# What counts, from this length of fragment on, and the least ratio to the raw copy.
RATIO_GOALS = {"store": (64 * KIB, 0.95), "load": (64 * KIB, 0.95), "both": (64 * KIB, 0.9)}
SHORT_LOADS = (8 * KIB, 0.6)
MOST_LOSS_PERCENT = 2.0


def main() -> None:
    """Run all sections."""
    options = _options()
    console = Console()
    try:
        gpu = Gpu()
    except LaneError as error:
        sys.exit(f"gpu_transfer: {error}")
    nbytes = options.mib * MIB
    skipped = []
    with console.status("measuring") as status:
        sections: dict[str, Any] = {}
        status.update("measuring: registration")
        sections["registration"] = gpu_lane.registration(gpu, 2 * nbytes, 3)
        status.update("measuring: latency")
        sections["latency"] = gpu_lane.latency(gpu, options.jobs)
        fragments = []
        lane: dict[str, str | int] = {}
        for fragment in options.fragments:
            status.update(f"measuring: {_short(fragment)}")
            figures, lane = measure(gpu, fragment, nbytes, options.rounds)
            fragments.append({"bytes": fragment} | figures)
        status.update("measuring: interference")
        sections["interference"] = None
        if not gpu_interference.torch_sees_a_gpu():
            skipped.append("interference: torch sees no GPU")
        elif not lane:
            skipped.append("interference: the kernel does not work on this device")
        else:
            sections["interference"] = gpu_interference.measure(gpu, lane, nbytes, 3)
    result = {
        **gpu.describe(),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "bytes": nbytes,
        "rounds": options.rounds,
        "lane": {
            name: value for name, value in lane.items() if name in {"engine", "load", "store"}
        },
        "fragments": fragments,
        **sections,
        "skipped": skipped,
    }
    console.print(table(result))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"written to {options.out}")


def measure(
    gpu: Gpu, fragment: int, nbytes: int, rounds: int
) -> tuple[dict[str, dict[str, float | None]], dict[str, str | int]]:
    """By direction: GB/s of kvd, of the raw copy, of batches; and what the lane chose.

    Args:
        gpu: where.
        fragment: bytes that lie in one place.
        nbytes: to move at a time, about.
        rounds: all in turn; a first one does not count.
    """
    rates: dict[str, dict[str, list[float]]] = {
        name: {"kvd": [], "raw": [], "batch": []} for name in DIRECTIONS
    }
    with Daemon(pool_bytes(fragment, nbytes)) as daemon:
        with Engine(gpu, daemon, fragment, nbytes) as engine:
            reference = Reference(gpu, engine.nbytes)
            for number in range(rounds + 1):
                keys, store = engine.store()
                load = engine.load(keys)
                if not number:
                    engine.check()
                _, both = engine.both(keys)
                for name, kvd in (("store", store), ("load", load), ("both", both)):
                    ways: dict[str, Callable[[], float]] = _reference(
                        reference, engine.nbytes, fragment, DIRECTIONS[name]
                    )
                    found = {"kvd": kvd} | {way: work() for way, work in ways.items()}
                    if number:
                        for way, value in found.items():
                            rates[name][way].append(value)
            reference.close()
        lane = gpu_lane.thresholds(daemon)
    return {
        name: {way: median(values) if values else None for way, values in by_way.items()}
        for name, by_way in rates.items()
    }, lane


def _reference(
    reference: Reference, nbytes: int, fragment: int, directions: tuple[Direction, ...]
) -> dict[str, Callable[[], float]]:
    ways = {"raw": lambda: reference.raw(nbytes, *directions)}
    if reference.has_batches:
        ways["batch"] = lambda: reference.batched(nbytes, fragment, *directions)
    return ways


def table(result: dict[str, Any]) -> Table:
    """All of it, each figure beside its goal."""
    shown = Table(
        *("figure", "kvd", "raw", "batch", "kvd / raw", "goal"),
        title=f"{result['device']}, driver {result['driver']}, {result['date']}",
    )
    for column in shown.columns[1:]:
        column.justify = "right"
    for name in DIRECTIONS:
        for row in result["fragments"]:
            rates = row[name]
            ratio = rates["kvd"] / rates["raw"]
            shown.add_row(
                f"{name}, {_short(row['bytes'])}, GB/s",
                *(_number(rates[way]) for way in ("kvd", "raw", "batch")),
                f"{ratio:.2f}",
                _goal(name, row["bytes"], ratio),
            )
    for section in ("latency", "registration"):
        for name, value in result[section].items():
            shown.add_row(name.replace("_", " "), _number(value), "", "", "", "")
    for way, figures in (result["interference"] or {}).items():
        met = figures["loss_percent"] <= MOST_LOSS_PERCENT
        goal = f"at most {MOST_LOSS_PERCENT:g}: {_met(met)}" if way == "dma" else ""
        for name, value in figures.items():
            last = goal if name == "loss_percent" else ""
            shown.add_row(f"beside {way}: {name}", _number(value), "", "", "", last)
    for line in result["skipped"]:
        shown.add_row(line, "", "", "", "", "")
    return shown


def _goal(name: str, fragment: int, ratio: float) -> str:
    longest, least = RATIO_GOALS[name]
    if name == "load" and fragment == SHORT_LOADS[0]:
        least = SHORT_LOADS[1]
    elif fragment < longest:
        return ""
    return f"at least {least}: {_met(ratio >= least)}"


def _met(met: bool) -> str:
    return "met" if met else "missed"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:,.2f}"


def _short(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def _options() -> argparse.Namespace:
    def sizes(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(","))

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "gpu.json")
    parser.add_argument("--mib", type=int, default=512, help="moved at a time and direction")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--jobs", type=int, default=500, help="of one chunk, for the latency")
    parser.add_argument("--fragments", type=sizes, default=FRAGMENTS, help="bytes, with commas")
    return parser.parse_args()


if __name__ == "__main__":
    main()
