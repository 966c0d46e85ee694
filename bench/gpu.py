"""Measures kvd on a GPU: prints one table, writes bench/out/gpu.json.

Each part runs in a process of its own with a limit of its own, and the file is written after each:
a part that fails or hangs costs its own figures. What a part, its daemon and its lanes say is in a
log of its own. This process loads no driver and uses the standard library alone.
"""

import argparse
import contextlib
import ctypes
import datetime as dt
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

KIB, MIB = 1024, 2**20
# 640 KiB: a block of 80 layers of 8 KiB, where the engine's layout keeps a block together. The
# first lengths matter most: time may run out.
FRAGMENTS = tuple(n * KIB for n in (64, 8, 640, 1024, 16, 32, 128, 256, 512))
NUM_FIRST = 4
POOLS = (1, 3)  # sizes of pools to pin, in units of --mib
GOAL, GOAL_FRAGMENT = 0.97, 64 * KIB  # kvd to the raw batch, from this length of fragment on
LEAST_SAMPLES = 5  # of fewer, quartiles say little
DIRECTIONS = ("store", "load", "both")
HEAD = ("figure", "kvd", "batch", "kvd / batch", "lane ms/GB", "n", "goal")
DOUBLE = "this is a test double of CUDA's driver: no figure here says anything about a GPU"

SHARED_MEMORY = Path("/dev/shm")
LAST_WORDS_SECONDS, SHORTEST_SECONDS = 8.0, 5.0
PR_SET_CHILD_SUBREAPER = 36
TAIL_LINES, TAIL_LETTERS = 8, 900


class Part(NamedTuple):
    """seconds: the longest that it may take."""

    name: str
    seconds: float


def parts(fragments: Sequence[int], mib: int) -> list[Part]:
    """All parts, in order of worth; see gpu_measure.py."""
    lengths = [Part(f"fragments {nbytes}", 75.0) for nbytes in fragments]
    return [
        Part("device", 30.0),
        *lengths[:NUM_FIRST],
        # From a cold disk torch takes 20 s and more to import.
        Part("beside", 100.0),
        *(Part(f"pins {times * mib}", 45.0) for times in POOLS),
        Part("exporter", 30.0),
        Part("lanes", 75.0),
        Part("users", 45.0),
        *lengths[NUM_FIRST:],
    ]


def main() -> int:
    """Run all parts, or print an earlier run's table; the exit status: 1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "gpu.json")
    parser.add_argument("--show", type=Path, help="print the table of a file and measure nothing")
    parser.add_argument("--seconds", type=float, default=400.0, help="for everything")
    parser.add_argument("--mib", type=int, default=2048, help="moved at a time and direction")
    parser.add_argument("--rounds", type=int, default=25, help="at most, as many as time allows")
    parser.add_argument(
        "--fragments",
        type=lambda text: tuple(int(word) for word in text.split(",")),
        default=FRAGMENTS,
        help="bytes, with commas",
    )
    options = parser.parse_args()
    if options.show:
        print_table(json.loads(options.show.read_text(encoding="utf-8")))
        return 0
    logs = options.out.with_suffix("")
    result = run(options, logs)
    print_table(result)
    print(f"written to {options.out}, what each part said to {logs}/*.log")
    return int(bool(result["missing"]))


def run(options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Run all parts, one after another, each within what is left of the time; the result."""
    result: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "bytes": options.mib * MIB,
        "fragments": [],
        "missing": {},
        "skipped": {},
    }
    measure = Path(__file__).with_name("gpu_measure.py")
    command = [sys.executable, str(measure), "--mib", str(options.mib)]
    command += ["--rounds", str(options.rounds)]
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    # What a part started becomes a child of this process when the part is killed.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    end = time.monotonic() + options.seconds
    for name, limit in parts(options.fragments, options.mib):
        log = logs / f"{name.replace(' ', '-')}.log"
        started = time.monotonic()
        print(f"measuring: {name}", end="", flush=True)
        seconds = min(limit, end - started - LAST_WORDS_SECONDS)
        figures = run_part(command, name, seconds, log)
        print(f", {time.monotonic() - started:.0f} s", flush=True)
        if "error" in figures:
            print(f"  not measured: {figures['error']}")
            for line in _tail(log):
                print(f"  | {line}", flush=True)
        _add(result, name, figures)
        _write(result, options.out)
    return result


def run_part(command: Sequence[str], name: str, seconds: float, log: Path) -> dict[str, Any]:
    """A part's figures, or as `error` why there are none. No process that it started is left."""
    if seconds < SHORTEST_SECONDS:
        return {"error": "no time was left"}
    with tempfile.TemporaryDirectory(prefix="kvd-part-") as folder, log.open("ab") as sink:
        out = Path(folder) / "figures.json"
        arguments = ["--part", name, "--part-out", str(out), "--log", str(log)]
        process = subprocess.Popen([*command, *arguments], stdout=sink, stderr=sink)
        reason = f"it took more than {seconds:.0f} s"
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                reason = f"it ended with exit status {process.wait(seconds)}"
        finally:
            _end(process)
            for left in SHARED_MEMORY.glob(f"kvd-bench-{process.pid}-*"):
                shutil.rmtree(left, ignore_errors=True)
        try:
            figures: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # killed before it wrote, or while it did
            return {"error": reason}
        return figures


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt it, so that it ends its daemon; then kill what is left of it."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LAST_WORDS_SECONDS)
        process.kill()
        process.wait()
    end = time.monotonic() + LAST_WORDS_SECONDS
    while (left := _children()) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _children() -> list[int]:
    """Of this process: also what a dead child had started, and zombies."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name before may have anything in it.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                children.append(int(stat.parent.name))
    return children


def _add(result: dict[str, Any], name: str, figures: dict[str, Any]) -> None:
    """Put a part's figures where they belong in the result."""
    for instead in ("error", "skipped"):
        if instead in figures:
            result["missing" if instead == "error" else instead][name] = figures[instead]
            return
    if name == "device":
        result.update(figures)
    elif name.startswith("fragments "):
        result["fragments"].append(figures)
    else:
        result[name] = figures


def _write(result: dict[str, Any], path: Path) -> None:
    """Write all of it; a reader never sees half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)


def _tail(log: Path) -> list[str]:
    """The last lines of a log, not too many; a part for which no time was left has none."""
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join(lines)[-TAIL_LETTERS:].splitlines()


# ------------------------------------------------------------------------- table


def print_table(result: Mapping[str, Any]) -> None:
    """Print every figure, those of transfers beside their goal, and what is missing.

    ± is the margin of gpu_figures.Spread. A goal is met or missed where the figure is further from
    it than its margin, and of enough samples; else it is open.
    """
    device = result.get("device", "unknown device")
    print(
        f"{device}, {result.get('date', 'unknown date')}, {result.get('bytes', 0) // MIB} MiB a"
        " measurement and direction; transfers in GB/s, medians"
    )
    if machine := result.get("machine"):
        print(", ".join(f"{name} {value}" for name, value in machine.items()))
    if "test double" in device:
        print(DOUBLE)
    for line in _aligned([HEAD, *_transfers(result)]):
        print(line)
    for line in _aligned([("figure", "value", "n"), *_others(result)]):
        print(line)
    for name, reason in result.get("skipped", {}).items():
        print(f"skipped: {name}: {reason}")
    for name, reason in result.get("missing", {}).items():
        print(f"not measured: {name}: {reason}")


def _transfers(result: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    rows = sorted(result.get("fragments", []), key=lambda row: int(row["bytes"]))
    for direction in DIRECTIONS:
        for row in rows:
            figures = row[direction]
            medians = [f"{figures[way]['median']:,.2f}" for way in ("kvd", "batch")]
            yield (
                f"{direction}, {row['bytes'] / KIB:g} KiB",
                *medians,
                _value(figures["ratio"]),
                f"{figures['cpu_ms_per_GB']['median']:,.2f}",
                str(figures["ratio"]["n"]),
                _goal(row["bytes"], figures["ratio"]),
            )


def _goal(fragment: int, ratio: Mapping[str, float]) -> str:
    if fragment < GOAL_FRAGMENT:
        return ""
    better_by = ratio["median"] - GOAL
    if ratio["n"] < LEAST_SAMPLES or abs(better_by) < ratio["margin"]:
        return f"at least {GOAL}: open"
    return f"at least {GOAL}: {'met' if better_by >= 0 else 'missed'}"


def _others(result: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each figure of the parts that measure no transfers."""
    for part, _ in parts((), result.get("bytes", 0) // MIB):
        if part == "device":
            continue
        for name, value in result.get(part, {}).items():
            num_samples = str(value["n"]) if isinstance(value, dict) else ""
            yield f"{part}: {name.replace('_', ' ')}", _value(value), num_samples


def _value(value: Mapping[str, float] | float | str) -> str:
    if isinstance(value, Mapping):
        return f"{value['median']:,.2f} ±{value['margin']:.2f}"
    return value if isinstance(value, str) else f"{value:,.3f}"


def _aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines whose words stand under each other, the first ones to the left."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for first, *others in table:
        cells = (word.rjust(width) for word, width in zip(others, widths[1:], strict=True))
        yield "  ".join((first.ljust(widths[0]), *cells)).rstrip()


if __name__ == "__main__":
    sys.exit(main())
