"""Measures the CUDA backend: prints one table, writes bench/out/gpu.json.

Each figure of kvd stands beside one large pinned `cudaMemcpyAsync`, beside
`cuMemcpyBatchAsync` and beside the lane's kernel, both called directly between scattered
places, measured in turn in every round of the same run. Every part runs in a process of its
own, and the file is written after each: one that fails or hangs costs its own figures.
"""

import argparse
import datetime as dt
import json
import sys
from pathlib import Path
from typing import Any

import gpu_report
from gpu_parts import Part, noted, run_parts, write
from gpu_report import KIB, MIB

# 640 KiB: a block of 80 layers of 8 KiB, where the engine's layout keeps a block together.
FRAGMENTS = tuple(n * KIB for n in (4, 8, 16, 32, 64, 128, 640, 2048))
# The lengths that goals are set for come first: time may run out.
FIRST = (64 * KIB, 8 * KIB, 640 * KIB)
# From a cold disk torch takes 20 s and more to import.
INTERFERENCE_SECONDS = 120.0


def main() -> None:
    """Run all parts, or show what an earlier run has found."""
    options = _options()
    if options.show:
        show(json.loads(options.show.read_text(encoding="utf-8")))
        return
    logs = options.out.with_suffix("")
    result = run(options, logs)
    show(result)
    for line in noted(logs):
        print(f"noted: {line}")
    print(f"written to {options.out}, what each part said to {logs}/*.log")
    if result["missing"]:
        sys.exit(1)


def show(result: dict[str, Any]) -> None:
    """The table, and what is missing in it."""
    for line in (*gpu_report.table(result), *gpu_report.missing(result)):
        print(line)


def run(options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """All parts, one after the other; what was measured is in the file at any time."""
    result: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "bytes": options.mib * MIB,
        "fragments": [],
        "missing": {},
    }
    measure = Path(__file__).with_name("gpu_measure.py")
    command = [sys.executable, str(measure), "--mib", str(options.mib)]
    command += ["--rounds", str(options.rounds), "--jobs", str(options.jobs)]

    def keep(name: str, figures: dict[str, Any]) -> None:
        _keep(result, name, figures)
        if name == "ways":
            failed = [way for way, why in figures.items() if why and way != "error"]
            command.extend(word for way in failed for word in ("--without", way))
        write(result, options.out)

    run_parts(_parts(options.fragments), command, logs, options.seconds, keep)
    return result


def _parts(fragments: tuple[int, ...]) -> list[Part]:
    """In order of worth, and the seconds that each may take."""
    ordered = sorted(fragments, key=lambda n: (FIRST.index(n) if n in FIRST else len(FIRST), n))
    lengths = [Part(f"fragments {n}", 75.0) for n in ordered]
    count = sum(n in FIRST for n in fragments)
    return [
        Part("device", 30.0),
        Part("ways", 30.0),
        *lengths[:count],
        Part("latency", 45.0),
        Part("interference dma", INTERFERENCE_SECONDS),
        Part("interference kernel", INTERFERENCE_SECONDS),
        Part("registration", 60.0),
        *lengths[count:],
    ]


def _keep(result: dict[str, Any], name: str, figures: dict[str, Any]) -> None:
    kind, _, which = name.partition(" ")
    if "error" in figures:
        result["missing"][name] = figures["error"]
    elif kind == "device":
        result.update(figures)
    elif kind == "fragments":
        result["fragments"].append(figures)
    elif kind == "interference":
        result.setdefault(kind, {})[which] = figures
    else:
        result[kind] = figures


def _options() -> argparse.Namespace:
    def sizes(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(","))

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "gpu.json")
    parser.add_argument("--show", type=Path, help="print the table of a file and measure nothing")
    parser.add_argument("--seconds", type=float, default=400.0, help="for everything")
    parser.add_argument("--mib", type=int, default=2048, help="moved at a time and direction")
    parser.add_argument("--rounds", type=int, default=25, help="at most, as many as time allows")
    parser.add_argument("--jobs", type=int, default=500, help="of one chunk, for the latency")
    parser.add_argument("--fragments", type=sizes, default=FRAGMENTS, help="bytes, with commas")
    return parser.parse_args()


if __name__ == "__main__":
    main()
