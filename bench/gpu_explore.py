"""Sweeps what a CUDA lane can be told, and prints what its defaults should be.

Writes bench/out/gpu-explore.json after each part, with a log for each in a folder beside it.
`make gpu-explore` runs it; by itself it asks tests/gpu/run.py for what it needs.
"""

import argparse
import datetime as dt
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_advice import advice, facts
from gpu_parts import Part, noted, run_parts, write
from gpu_report import DOUBLE, columns, missing, short

MIB = 2**20
FRAGMENTS = (64 * 1024, 8 * 1024, 640 * 1024)
KERNEL_FRAGMENTS = (8 * 1024, 32 * 1024)
# The cheapest first: what comes later in a hurry waits for what is in flight.
PIECES = (
    "bulk=8MiB,flight=32MiB",
    "bulk=16MiB,flight=32MiB",
    "bulk=16MiB,flight=64MiB",
    "bulk=32MiB,flight=64MiB",
    "bulk=32MiB,flight=128MiB",
)
SWEEPS = ("batch", "kernel")
CHOICES = ("number", "overlap", "any_order", "blocks")


def main() -> None:
    """Run all parts, or show what an earlier run has found."""
    options = _options()
    if options.show:
        show(json.loads(options.show.read_text(encoding="utf-8")))
        return
    if importlib.util.find_spec("kvd") is None or importlib.util.find_spec("msgspec") is None:
        run = Path(__file__).resolve().parents[1] / "tests" / "gpu" / "run.py"
        told = ["--out", str(options.out.parent), "--mib", f"{options.mib}"]
        told += ["--rounds", f"{options.rounds}"]
        told += [word for name in options.only or [] for word in ("--only", name)]
        os.execv(sys.executable, [sys.executable, str(run), "--explore", *told])  # noqa: S606
    logs = options.out.with_suffix("")
    result = run_all(options, logs)
    show(result)
    for line in noted(logs):
        print(f"noted: {line}")
    print(f"written to {options.out}, what each part said to {logs}/*.log")
    if result["missing"]:
        sys.exit(1)


def show(result: Mapping[str, Any]) -> None:
    """Tables of the sweeps, what is missing, and at the end the advice."""
    device = result.get("device", "unknown device")
    print(f"{device}, driver {result.get('driver', 'unknown')}, {result['date']}")
    if machine := result.get("machine"):
        print(", ".join(f"{name} {found}" for name, found in machine.items()))
    print(f"{result['bytes'] // MIB} MiB a measurement, GB/s, medians")
    if "test double" in device:
        print(DOUBLE)
    for kind in SWEEPS:
        for line in columns(list(_table(result[kind], kind))) if kind in result else ():
            print(line)
    for line in facts(result):
        print(line)
    for name, why in result.get("skipped", {}).items():
        print(f"skipped: {name}: {why}")
    for line in (*missing(result), *(f"advice: {line}" for line in advice(result))):
        print(line)


def _table(rows: Sequence[Mapping[str, Any]], kind: str) -> Iterator[tuple[str, ...]]:
    """A line for each choice, a column for each length and direction."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        chosen = [
            f"{key}={row[key]}"
            for key in ("number", "overlap", "any_order", "blocks")
            if key in row
        ]
        found = cells.setdefault(" ".join(chosen), {})
        found[f"{row['direction']} {short(row['fragment'])}"] = (
            "refused" if "refused" in row else f"{row['median']:.1f} ({row['n']})"
        )
    heads = list(dict.fromkeys(head for found in cells.values() for head in found))
    yield (f"{kind}, GB/s (n)", *heads)
    for choice, found in cells.items():
        yield (choice, *(found.get(head, "") for head in heads))


def run_all(options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """All parts, one after the other; what was measured is in the file at any time."""
    result: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "bytes": options.mib * MIB,
        "missing": {},
    }
    measure = Path(__file__).with_name("gpu_explore_part.py")
    command = [sys.executable, str(measure), "--mib", str(options.mib)]
    command += ["--rounds", str(options.rounds)]

    def keep(name: str, figures: dict[str, Any]) -> None:
        kind, _, which = name.partition(" ")
        if why := figures.get("error") or figures.get("skipped"):
            listed = "missing" if "error" in figures else "skipped"
            result.setdefault(listed, {})[name] = why
        elif kind == "device":
            result.update(figures)
        elif kind in SWEEPS:
            result.setdefault(kind, []).extend(figures["rows"])
        elif kind == "pieces":
            result.setdefault(kind, {})[which] = figures["rows"]
        elif which:
            result.setdefault(kind, {})[which] = figures
        else:
            result[kind] = figures
        write(result, options.out)

    wanted = [part for part in _parts() if part.name.startswith(tuple(options.only or [""]))]
    run_parts(wanted, command, logs, options.seconds, keep)
    return result


def _parts() -> list[Part]:
    """In order of worth, and the seconds that each may take."""
    first, second, *others = FRAGMENTS
    return [
        Part("device", 30.0),
        Part(f"batch {first}", 60.0),
        Part(f"batch {second}", 60.0),
        Part(f"kernel {KERNEL_FRAGMENTS[0]}", 60.0),
        # From a cold disk torch takes 20 s and more to import.
        Part("beside kernel", 90.0),
        Part("beside kernel mps", 90.0),
        *(Part(f"pieces {options}", 60.0) for options in PIECES),
        Part("layouts", 60.0),
        Part("users", 100.0),
        *(Part(f"batch {fragment}", 60.0) for fragment in others),
        *(Part(f"kernel {fragment}", 60.0) for fragment in KERNEL_FRAGMENTS[1:]),
        Part("beside dma mps", 90.0),
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    out = Path(__file__).parent / "out" / "gpu-explore.json"
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--show", type=Path, help="print what is in a file and measure nothing")
    parser.add_argument("--seconds", type=float, default=500.0, help="for everything")
    parser.add_argument("--mib", type=int, default=2048, help="moved at a time and direction")
    parser.add_argument("--rounds", type=int, default=15, help="at most, as many as time allows")
    parser.add_argument("--only", action="append", help="parts that begin so; repeat it for more")
    return parser.parse_args()


if __name__ == "__main__":
    main()
