"""What lane.py measures: the trees in turns, and the figures of what they answer."""

import argparse
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import MIB, Figures, median
from lane_sides import Side
from lane_timers import PIECES, STAGES

from tests.fakecuda.harness import FakeCuda

FRAGMENTS = (4096, 8192, 16384, 65536, 262144, 2**20)
WORKERS = (1, 4, 8)
MOVES = ("load", "store", "both")
CALL_NS = 550
CHUNK_BYTES, MOST_TENSORS = 2 * MIB, 64
BULK_BYTES = 256 * MIB
JOBS = 16  # at a time and direction
# One chunk of 128 KiB, as in latency.py.
ONE_CHUNK = {"fragment": 16384, "tensors": 4, "blocks_per_chunk": 2}
NOW, BEFORE = "", "before_"  # what figures' names begin with

Answers = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One way to load the lane, and the name of its figures: with {} for what is measured."""

    name: str
    move: str
    fragment: int
    workers: int = 1
    job_bytes: int = 0  # of lane.py's options
    jobs: int = JOBS
    call_ns: int = 0


class Sides:
    """The trees in turns.

    Args:
        trees: by what figures' names begin with.
        driver: the test driver.
        place: a folder for their files.
        options: of lane.py.
    """

    def __init__(
        self, trees: dict[str, Path], driver: FakeCuda, place: Path, options: argparse.Namespace
    ) -> None:
        self._trees = trees
        self._driver = driver
        self._place = place
        self._options = options
        self._job_bytes = options.job_mib * MIB

    def fragments(self, fragment: int) -> Figures:
        """GB/s for fragments of this length."""
        cases = list(self._cases(fragment))
        with ExitStack() as stack:
            most = max(case.job_bytes for case in cases)
            return self._measure(self._start(stack, self._shape(fragment, most)), cases)

    def stages(self, fragment: int) -> Figures:
        """Microseconds a piece and milliseconds a GB of each stage of the lane's work.

        Timers are around its functions; what they cost themselves is in `rest`.
        """
        figures: Figures = {}
        with ExitStack() as stack:
            sides = self._start(stack, self._shape(fragment), timed=True)
            for move in MOVES[:2]:
                case = Case("", move, fragment, call_ns=CALL_NS)
                for name, answers in self._in_turns(sides, case).items():
                    found = _stages(answers)
                    figures |= {f"{name}stage_{move}_{k}_{fragment}": v for k, v in found.items()}
        return figures

    def one_chunk(self) -> Figures:
        """Microseconds of processor time of a job of one chunk: the lane's, and the client's.

        The client's thread from submission to seen finished; `job_us` is the slower way's sum.
        Then how much of a core the lane uses while nobody wants anything of it.
        """
        figures: Figures = {}
        with ExitStack() as stack:
            sides = self._start(stack, ONE_CHUNK | {"most_bytes": MIB, "pool_bytes": 256 * MIB})
            for move in MOVES[:2]:
                order = {"one_chunk": True, "move": move, "jobs": self._options.jobs}
                for name, answers in self._answers(sides, order).items():
                    found = _job(answers, self._options.jobs)
                    figures |= {f"{name}{move}_job_{k}": v for k, v in found.items()}
            for name, side in sides.items():
                slower = (figures[f"{name}{move}_job_us"] for move in MOVES[:2])
                figures[f"{name}job_us"] = max(slower)
                workers = max(self._options.workers)
                answer = side.ask(idle=self._options.idle_seconds, workers=workers)
                percent = 100 * answer["lane_ns"] / answer["wall_ns"]
                figures[f"{name}idle_percent"] = round(percent, 3)
        return figures

    # ------------------------------------------------------------- details

    def _cases(self, fragment: int) -> Iterator[Case]:
        for move in MOVES:
            for workers in self._options.workers:
                more = f"_workers_{workers}" if workers > 1 else ""
                yield Case(f"{move}{{}}_{fragment}{more}", move, fragment, workers)
            yield Case(f"{move}_calls{{}}_{fragment}", move, fragment, call_ns=CALL_NS)
            if not self._options.quick:
                name = f"{move}_bulk{{}}_{fragment}"
                yield Case(name, move, fragment, job_bytes=BULK_BYTES, jobs=1)

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

    def _shape(self, fragment: int, most_bytes: int = 0) -> dict[str, int]:
        """What lane_load.py is told, for jobs of so many bytes or of the usual ones."""
        return {
            "fragment": fragment,
            "tensors": max(2, min(MOST_TENSORS, CHUNK_BYTES // fragment)),
            "most_bytes": max(self._job_bytes, most_bytes),
            "pool_bytes": 3 * max(JOBS * self._job_bytes, most_bytes),
        }

    def _measure(self, sides: dict[str, Side], cases: Iterable[Case]) -> Figures:
        figures: Figures = {}
        for case in cases:
            for name, answers in self._in_turns(sides, case).items():
                figures |= {name + k: v for k, v in _rates(case, answers).items()}
        return figures

    def _in_turns(self, sides: dict[str, Side], case: Case) -> dict[str, Answers]:
        """What each side answers in each round of a case."""
        for side in sides.values():
            side.ask(control=["copies=instant", f"call_ns={case.call_ns}"])
        order = {
            "move": case.move,
            "workers": case.workers,
            "job_bytes": case.job_bytes or self._job_bytes,
            "jobs": case.jobs,
            "nbytes": self._options.mib * MIB,
        }
        return self._answers(sides, order)

    def _answers(self, sides: dict[str, Side], order: dict[str, Any]) -> dict[str, Answers]:
        """Of all rounds but a first one, which does not count."""
        found: dict[str, Answers] = {name: [] for name in sides}
        for number in range(self._options.rounds + 1):
            for name, side in sides.items():
                answer = side.ask(**order)
                if number:
                    found[name].append(answer)
        return found


def _rates(case: Case, answers: Answers) -> Figures:
    """GB/s of a case: of the lane's busiest thread, and by wall time; ms a GB of all threads."""
    rates = {
        case.name.format("_GBps"): median(a["nbytes"] / a["busiest_ns"] for a in answers),
        case.name.format("_wall_GBps"): median(a["nbytes"] / a["wall_ns"] for a in answers),
    }
    if case.move == "both" and not case.job_bytes:
        name = case.name.replace("both", "cpu").format("_ms_per_GB")
        rates[name] = median(1e3 * a["lane_ns"] / a["nbytes"] for a in answers)
    return {name: round(value, 3) for name, value in rates.items()}


def _job(answers: Answers, jobs: int) -> Figures:
    """Microseconds of one of so many jobs."""
    spent = {
        "us": [answer["lane_ns"] + answer["client_ns"] for answer in answers],
        "lane_us": [answer["lane_ns"] for answer in answers],
        "client_us": [answer["client_ns"] for answer in answers],
    }
    return {name: round(median(values) / jobs / 1e3, 1) for name, values in spent.items()}


def _stages(answers: Answers) -> Figures:
    """By stage: microseconds a piece and milliseconds a GB; and how long a piece is."""
    figures: Figures = {}
    for answer in answers:
        answer["rest"] = answer["lane_ns"] - sum(answer[stage] for stage in STAGES)
    for stage in (*STAGES, "rest"):
        name = stage.replace(" ", "_")
        figures[f"{name}_us"] = median(a[stage] / a[PIECES] / 1e3 for a in answers)
        figures[f"{name}_ms_per_GB"] = median(1e3 * a[stage] / a["nbytes"] for a in answers)
    figures["piece_MiB"] = median(a["nbytes"] / a[PIECES] / MIB for a in answers)
    return {name: round(value, 3) for name, value in figures.items()}
