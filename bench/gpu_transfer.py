"""Measures the CUDA backend: prints one table, writes bench/out/gpu.json.

Each figure of kvd stands beside one large pinned `cudaMemcpyAsync` and beside
`cuMemcpyBatchAsync` called directly, measured in turn in every round of the same
run; figures are medians of the rounds. Every part runs in a process of its own, and
the file is written after each: one that fails or hangs costs its own figures.
"""

import argparse
import contextlib
import ctypes
import datetime as dt
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_report
import psutil
from gpu_report import KIB, MIB
from harness import SHARED_MEMORY
from rich.console import Console

FRAGMENTS = tuple(4 * KIB * 2**i for i in range(10))  # to 2 MiB
# The lengths that goals are set for come first: time may run out.
FIRST = (64 * KIB, 8 * KIB, 2 * MIB)
# From a cold disk torch takes 20 s and more to import.
INTERFERENCE_SECONDS = 120.0
LAST_WORDS_SECONDS, SHORTEST = 8.0, 5.0
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Run all parts, or show what an earlier run has found."""
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 120)
    if options.show:
        show(json.loads(options.show.read_text(encoding="utf-8")), console)
        return
    result = run(options, console)
    show(result, console)
    console.print(f"written to {options.out}, the daemons' lines to {options.out.stem}.log beside")
    if result["missing"]:
        sys.exit(1)


def show(result: dict[str, Any], console: Console) -> None:
    """The table, and what is missing in it."""
    console.print(gpu_report.table(result))
    for line in gpu_report.missing(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All parts, one after the other; what was measured is in the file at any time."""
    result: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "bytes": options.mib * MIB,
        "rounds": options.rounds,
        "fragments": [],
        "missing": {},
    }
    measure = Path(__file__).with_name("gpu_measure.py")
    log = options.out.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    command = [sys.executable, str(measure), "--log", str(log), "--mib", str(options.mib)]
    command += ["--rounds", str(options.rounds), "--jobs", str(options.jobs)]
    # What a part started comes to this process when the part is killed.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    end = time.monotonic() + options.seconds
    for name, seconds in _parts(options.fragments):
        console.print(f"measuring: {name}")
        with log.open("a", encoding="utf-8") as file:
            file.write(f"== {name}\n")
        try:
            left = end - time.monotonic() - LAST_WORDS_SECONDS
            figures = run_part(command, name, min(seconds, left))
        except KeyboardInterrupt:
            result["missing"][name] = "the benchmark was told to end here"
            break
        else:
            _keep(result, name, figures)
            if "error" in figures:
                console.print(f"  not measured: {figures['error']}", markup=False, soft_wrap=True)
        finally:
            gpu_report.write(result, options.out)
    return result


def run_part(command: Sequence[str], name: str, seconds: float) -> dict[str, Any]:
    """A part's figures, or as `error` why there are none. Nothing that it started is left.

    Args:
        command: what runs it; `--part NAME --part-out FILE` is added.
        name: the part's.
        seconds: the longest that it may take.
    """
    if seconds < SHORTEST:
        return {"error": "no time was left"}
    with tempfile.TemporaryDirectory(prefix="kvd-part-") as folder:
        out = Path(folder) / "figures.json"
        process = subprocess.Popen([*command, "--part", name, "--part-out", str(out)])
        why = f"it took more than {seconds:.0f} s"
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                why = f"it ended with exit status {process.wait(seconds)}"
        finally:
            _end(process)
            for left in SHARED_MEMORY.glob(f"kvd-bench-{process.pid}-*"):
                shutil.rmtree(left, ignore_errors=True)
        try:
            found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # killed before it wrote, or while it did
            return {"error": why}
        return found


def _end(process: "subprocess.Popen[bytes]") -> None:
    """In order if it can, then it ends its daemon; and kill what it has left behind."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(LAST_WORDS_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    left = psutil.Process().children(recursive=True)
    for orphan in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            orphan.kill()
    psutil.wait_procs(left, timeout=LAST_WORDS_SECONDS)


def _parts(fragments: tuple[int, ...]) -> list[tuple[str, float]]:
    """Their names, and the seconds that each may take."""
    ordered = sorted(fragments, key=lambda n: (FIRST.index(n) if n in FIRST else len(FIRST), n))
    lengths = [(f"fragments {n}", 90.0) for n in ordered]
    count = sum(n in FIRST for n in fragments)
    return [
        ("device", 30.0),
        ("latency", 45.0),
        *lengths[:count],
        ("interference dma", INTERFERENCE_SECONDS),
        ("registration", 60.0),
        ("interference kernel", INTERFERENCE_SECONDS),
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
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--jobs", type=int, default=500, help="of one chunk, for the latency")
    parser.add_argument("--fragments", type=sizes, default=FRAGMENTS, help="bytes, with commas")
    return parser.parse_args()


if __name__ == "__main__":
    main()
