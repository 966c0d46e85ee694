"""Measures what a CUDA lane's processor time allows: a table, and bench/out/lane.json.

A real daemon, lane and engines on the test driver (tests/fakecuda), whose copies, kernels and
events end at once and move nothing: what is left is the lane's own work. It says nothing about a
GPU.

GB/s allowed are bytes moved by the processor time of the lane's busiest thread, from
/proc/PID/task/TID/schedstat: with one thread, the lane's. Beside it are bytes by wall time
(`*_wall_*`), in which the client, the broker and the machine's other work have a part, and
processor milliseconds a GB of all threads of the lane, loads and stores at once.
`*_calls_*`: the driver's calls take CALL_NS of processor time for each fragment, without the
interpreter's lock, as a real driver is reported to (0.5 to 0.6 µs).

Beside this tree's figures are those of a pinned commit (`before_*`), taken in turns in the same
run; figures are medians of the rounds.
"""

import argparse
import datetime as dt
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lane_report
from harness import MIB, median
from lane_sides import PINNED, ROOT, NoTree, Side, commit, machine, unpack
from lane_timers import PIECES, STAGES
from rich.console import Console

from tests.fakecuda.build import NoCompiler, build
from tests.fakecuda.harness import FakeCuda

FRAGMENTS = (4096, 8192, 16384, 65536, 262144, 2**20)
WORKERS = (1, 4, 8)
MOVES = ("load", "store", "both")
CALL_NS = 550
CHUNK_BYTES, MOST_TENSORS = 2 * MIB, 64
JOB_BYTES, BULK_BYTES = 32 * MIB, 256 * MIB
STAGES_FRAGMENTS = (8192, 65536)
JOBS = 8  # at a time and direction
# One chunk of 128 KiB, as in the other benchmarks of such jobs.
ONE_CHUNK = {"fragment": 4096, "tensors": 2, "blocks_per_chunk": 16}
NOW, BEFORE = "", "before_"


@dataclass(frozen=True)
class Case:
    """One way to load the lane, and the name of its figures."""

    name: str  # with {} for what is measured
    move: str
    workers: int = 1
    job_bytes: int = JOB_BYTES
    jobs: int = JOBS
    call_ns: int = 0


def main() -> None:
    """Measure, print, write."""
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        result = measure(options, console)
    except NoCompiler as error:
        sys.exit(f"make bench-lane: {error}")
    for table in (lane_report.table(result), lane_report.stages(result)):
        console.print(table)
    lane_report.write(result, options.out)
    console.print(f"written to {options.out}")


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All figures."""
    result: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "commit": commit(),
        **machine(),
        "rounds": options.rounds,
        "call_ns": CALL_NS,
        "job_bytes": JOB_BYTES,
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
        sides = Sides(trees, driver, place)
        for fragment in options.fragments:
            with console.status(f"measuring fragments of {lane_report.short(fragment)}"):
                result |= sides.fragments(fragment, options)
        for fragment in options.fragments:
            if fragment in STAGES_FRAGMENTS:
                with console.status(f"timing stages of {lane_report.short(fragment)}"):
                    result |= sides.stages(fragment, options)
        with console.status("measuring jobs of one chunk"):
            result |= sides.one_chunk(options)
    return result


class Sides:
    """The trees in turns.

    Args:
        trees: by what figures' names begin with.
        driver: the test driver.
        place: a folder for their files.
    """

    def __init__(self, trees: dict[str, Path], driver: FakeCuda, place: Path) -> None:
        self._trees = trees
        self._driver = driver
        self._place = place

    def fragments(self, fragment: int, options: argparse.Namespace) -> dict[str, float]:
        """The figures of one length of fragments."""
        cases = list(_cases(fragment, options))
        figures: dict[str, float] = {}
        with ExitStack() as stack:
            sides = self._start(stack, _shape(fragment, max(case.job_bytes for case in cases)))
            for case in cases:
                for name, answers in _in_turns(sides, case, options).items():
                    figures |= {name + k: v for k, v in _rates(case, answers).items()}
        return figures

    def stages(self, fragment: int, options: argparse.Namespace) -> dict[str, float]:
        """Microseconds a piece and milliseconds a GB of each stage of the lane's work.

        Timers are around its functions; what they cost themselves is in `rest`.
        """
        figures: dict[str, float] = {}
        with ExitStack() as stack:
            sides = self._start(stack, _shape(fragment, JOB_BYTES), timed=True)
            for move in MOVES[:2]:
                case = Case("", move, call_ns=CALL_NS)
                for name, answers in _in_turns(sides, case, options).items():
                    found = _stages(answers)
                    figures |= {f"{name}stage_{move}_{k}_{fragment}": v for k, v in found.items()}
        return figures

    def one_chunk(self, options: argparse.Namespace) -> dict[str, float]:
        """Microseconds of processor time of a job of one chunk; an idle lane's percent of a core.

        Of a job: the lane's, and of the client's thread from its submission to its end.
        """
        figures = {}
        shape = ONE_CHUNK | {"most_bytes": MIB, "pool_bytes": 256 * MIB}
        with ExitStack() as stack:
            sides = self._start(stack, shape)
            for move in ("load", "store"):
                order = {"one_chunk": True, "move": move, "jobs": options.jobs}
                found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
                for number in range(options.rounds + 1):
                    for name, side in sides.items():
                        answer = side.ask(**order)
                        if number:
                            found[name].append(answer)
                for name, answers in found.items():
                    for part in ("lane", "client"):
                        figures[f"{name}{move}_job_{part}_us"] = median(
                            answer[f"{part}_ns"] / options.jobs / 1e3 for answer in answers
                        )
                    figures[f"{name}{move}_job_us"] = median(
                        (answer["lane_ns"] + answer["client_ns"]) / options.jobs / 1e3
                        for answer in answers
                    )
            for name, side in sides.items():
                figures[f"{name}job_us"] = max(
                    figures[f"{name}{move}_job_us"] for move in ("load", "store")
                )
                answer = side.ask(idle=options.idle_seconds, workers=max(options.workers))
                figures[f"{name}idle_percent"] = 100 * answer["lane_ns"] / answer["wall_ns"]
        return {name: round(value, 3) for name, value in figures.items()}

    def _start(
        self, stack: ExitStack, shape: dict[str, int], *, timed: bool = False
    ) -> dict[str, Side]:
        sides = {}
        for name, tree in self._trees.items():
            folder = Path(tempfile.mkdtemp(dir=self._place))
            sides[name] = stack.enter_context(Side(tree, self._driver, folder, shape, timed=timed))
        for side in sides.values():
            side.ready()
        return sides


def _cases(fragment: int, options: argparse.Namespace) -> Iterator[Case]:
    for move in MOVES:
        for workers in options.workers:
            more = f"_workers_{workers}" if workers > 1 else ""
            yield Case(f"{move}{{}}_{fragment}{more}", move, workers)
        yield Case(f"{move}_calls{{}}_{fragment}", move, call_ns=CALL_NS)
        if not options.quick:
            yield Case(f"{move}_bulk{{}}_{fragment}", move, job_bytes=BULK_BYTES, jobs=1)


def _shape(fragment: int, most_bytes: int) -> dict[str, int]:
    """What lane_load.py is told, for jobs of so many bytes."""
    return {
        "fragment": fragment,
        "tensors": max(2, min(MOST_TENSORS, CHUNK_BYTES // fragment)),
        "most_bytes": most_bytes,
        "pool_bytes": 4 * max(JOBS * JOB_BYTES, most_bytes),
    }


def _in_turns(
    sides: dict[str, Side], case: Case, options: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """What each side answers in each round."""
    order = {
        "move": case.move,
        "workers": case.workers,
        "job_bytes": case.job_bytes,
        "jobs": case.jobs,
    }
    for side in sides.values():
        side.ask(control=["copies=instant", f"call_ns={case.call_ns}"])
        side.ask(**order, nbytes=1)  # the first round does not count
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, side in sides.items():
            found[name].append(side.ask(**order, nbytes=options.mib * MIB))
    return found


def _stages(answers: list[dict[str, Any]]) -> dict[str, float]:
    """By stage: microseconds a piece and milliseconds a GB; the pieces of a job."""
    figures = {}
    for stage in (*STAGES, "rest"):
        spent = [_spent(answer, stage) for answer in answers]
        name = stage.replace(" ", "_")
        figures[f"{name}_us"] = median(
            ns / answer[PIECES] / 1e3 for ns, answer in zip(spent, answers, strict=True)
        )
        figures[f"{name}_ms_per_GB"] = median(
            1e3 * ns / answer["nbytes"] for ns, answer in zip(spent, answers, strict=True)
        )
    figures["piece_MiB"] = median(answer["nbytes"] / answer[PIECES] / MIB for answer in answers)
    return {name: round(value, 3) for name, value in figures.items()}


def _spent(answer: dict[str, Any], stage: str) -> int:
    if stage in answer:
        return int(answer[stage])
    return int(answer["lane_ns"]) - sum(int(answer[stage]) for stage in STAGES)


def _rates(case: Case, answers: list[dict[str, Any]]) -> dict[str, float]:
    """GB/s of a case: allowed by processor time, and by wall time; ms a GB of both directions."""
    rates = {
        case.name.format("_GBps"): median(a["nbytes"] / a["busiest_ns"] for a in answers),
        case.name.format("_wall_GBps"): median(a["nbytes"] / a["wall_ns"] for a in answers),
    }
    if case.move == "both" and case.job_bytes == JOB_BYTES:
        name = case.name.replace("both", "cpu").format("_ms_per_GB")
        rates[name] = median(1e3 * a["lane_ns"] / a["nbytes"] for a in answers)
    return {name: round(value, 3) for name, value in rates.items()}


def _options() -> argparse.Namespace:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(","))

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything, in 40 seconds")
    parser.add_argument("--fragments", type=numbers, help="bytes, with commas")
    parser.add_argument("--workers", type=numbers, help="engines at a time, with commas")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--mib", type=int, help="moved in a round, at least")
    parser.add_argument("--jobs", type=int, help="of one chunk, in a round")
    parser.add_argument("--idle-seconds", type=float)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "lane.json")
    options = parser.parse_args()
    usual = {
        "fragments": FRAGMENTS,
        "workers": WORKERS,
        "rounds": 7,
        "mib": 512,
        "jobs": 300,
        "idle_seconds": 5.0,
    }
    quick = {"fragments": (8192, 65536, 2**20), "workers": (1,), "rounds": 5, "mib": 256}
    quick |= {"jobs": 100, "idle_seconds": 1.0}
    for name, value in (usual | (quick if options.quick else {})).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


if __name__ == "__main__":
    main()
