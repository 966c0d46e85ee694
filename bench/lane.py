"""Measures what a CUDA lane's processor time allows: a table, and bench/out/lane.json.

A real daemon, lane and engines on the test driver (tests/fakecuda), whose copies and events end
at once and move nothing: what is left is the lane's own work. It says nothing about a
GPU.

GB/s allowed are the bytes moved by processor time of the lane's busiest thread, from
/proc/PID/task/TID/schedstat; with one thread, the lane's. More than that no machine like this one
can do; it may do less, because the threads share the interpreter's lock. Beside it are

- `*_wall_*`: bytes by wall time, in which client, broker and the machine's other work have a part;
- `cpu_ms_per_GB_*`: processor milliseconds a GB of all threads, loads and stores at once;
- `*_calls_*`: the driver's calls take CALL_NS of processor time for each fragment, without the
  interpreter's lock, as a real driver is reported to (0.5 to 0.6 µs);
- `*_bulk_*`: jobs of 256 MiB in place of 32 MiB, one at a time and direction;
- `*_workers_*`: so many engines at once;
- `before_*`: of a pinned commit, taken in turns in the same run.

Figures are medians of the rounds.
"""

import argparse
import datetime as dt
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lane_report
from harness import MIB
from lane_cases import BEFORE, CALL_NS, FRAGMENTS, NOW, WORKERS, Sides
from lane_sides import PINNED, ROOT, NoTree, commit, machine, unpack
from rich import box
from rich.console import Console

from tests.fakecuda.build import NoCompiler, build
from tests.fakecuda.harness import FakeCuda

# A lane can be told from the figures of these two.
SHORT, LONG = 8192, 65536
USUAL = {
    "fragments": FRAGMENTS,
    "workers": WORKERS,
    "rounds": 5,
    "mib": 512,
    "jobs": 200,
    "idle_seconds": 5.0,
}
QUICK = {
    "fragments": (SHORT, LONG, 2**20),
    "workers": (1,),
    "rounds": 5,
    "mib": 256,
    "jobs": 60,
    "idle_seconds": 1.0,
}


def main() -> None:
    """Measure, print, write."""
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 150)
    if options.show:
        for table in lane_report.tables(json.loads(options.show.read_text(encoding="utf-8"))):
            table.box = box.MARKDOWN
            console.print(table)
        return
    try:
        result = measure(options, console)
    except NoCompiler as error:
        sys.exit(f"bench/lane.py: {error}")
    for table in lane_report.tables(result):
        console.print(table)
    lane_report.write(result, options.out)
    console.print(f"written to {options.out}")


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All figures.

    Raises:
        NoCompiler: the test driver cannot be built.
    """
    result: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "commit": commit(),
        **machine(),
        "rounds": options.rounds,
        "call_ns": CALL_NS,
        "job_bytes": options.job_mib * MIB,
    }
    with tempfile.TemporaryDirectory(prefix="kvd-lane-") as folder:
        place = Path(folder)
        driver = FakeCuda(build(place / "driver"))
        trees = {NOW: ROOT}
        try:
            trees[BEFORE] = unpack(place)
            result["before_commit"] = PINNED
        except NoTree as why:
            console.print(f"without figures of the commit before: {why}", markup=False)
        sides = Sides(trees, driver, place, options)
        parts = [(sides.fragments, fragment, "fragments") for fragment in options.fragments]
        staged = {LONG} if options.quick else {SHORT, LONG}
        chosen = sorted(staged.intersection(options.fragments))
        parts += [(sides.stages, fragment, "stages, fragments") for fragment in chosen]
        for part, fragment, what in parts:
            with console.status(f"measuring: {what} of {lane_report.short(fragment)}"):
                result |= part(fragment)
        with console.status("measuring: jobs of one chunk, an idle lane"):
            result |= sides.one_chunk()
    return result


def _options() -> argparse.Namespace:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(","))

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything, in 40 seconds")
    parser.add_argument("--fragments", type=numbers, help="bytes, with commas")
    parser.add_argument("--workers", type=numbers, help="engines at a time, with commas")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--mib", type=int, help="moved in a round, at least")
    parser.add_argument("--job-mib", type=int, default=32, help="of a job, but for the bulk ones")
    parser.add_argument("--jobs", type=int, help="of one chunk, in a round")
    parser.add_argument("--idle-seconds", type=float)
    parser.add_argument("--show", type=Path, help="print a file's tables as Markdown, no more")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "lane.json")
    options = parser.parse_args()
    for name, value in (QUICK if options.quick else USUAL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


if __name__ == "__main__":
    main()
