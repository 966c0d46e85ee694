"""What a lane uses while something is done: processor time by thread, from /proc."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import lane_timers

SETTLE_SECONDS, SETTLED_SECONDS = 0.003, 1.0


def used(pid: int) -> dict[int, int]:
    """Nanoseconds of processor time that each thread of a process has used."""
    threads = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            threads[int(task.name)] = int((task / "schedstat").read_text("ascii").split()[0])
    return threads


def settled(pid: int) -> dict[int, int]:
    """The same once it sleeps: while a thread runs, the system counts it some ticks late."""
    end = time.monotonic() + SETTLED_SECONDS
    before = used(pid)
    while True:
        time.sleep(SETTLE_SECONDS)
        now = used(pid)
        if now == before or time.monotonic() > end:
            return now
        before = now


@dataclass
class Spent:
    """What was used while a meter ran.

    threads: nanoseconds of processor time by thread of the lane.
    wall_ns, client_ns: of the block; the second is this thread's processor time in it.
    stages: what lane_timers counted.
    nbytes: moved, for the caller to fill in.
    """

    threads: dict[int, int] = field(default_factory=dict)
    wall_ns: int = 0
    client_ns: int = 0
    stages: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0

    def answer(self) -> dict[str, int]:
        """The figures that lane.py takes."""
        return {
            "busiest_ns": max(self.threads.values(), default=0),
            "lane_ns": sum(self.threads.values()),
            "wall_ns": self.wall_ns,
            "client_ns": self.client_ns,
            "nbytes": self.nbytes,
            **self.stages,
        }


class Meter:
    """Reads what a lane uses.

    Args:
        pid: the lane's.
        stages: the file of lane_timers, where the lane has them.
    """

    def __init__(self, pid: int, stages: Path | None) -> None:
        self._pid = pid
        self._stages = stages

    @contextlib.contextmanager
    def running(self, spent: Spent) -> Iterator[None]:
        """Add what is used in the block, and until the lane sleeps again."""
        stages = self._timed()
        before, began, client = settled(self._pid), time.perf_counter_ns(), time.thread_time_ns()
        yield
        spent.client_ns += time.thread_time_ns() - client
        spent.wall_ns += time.perf_counter_ns() - began
        for thread, now in settled(self._pid).items():
            spent.threads[thread] = spent.threads.get(thread, 0) + now - before.get(thread, 0)
        for stage, total in self._timed().items():
            spent.stages[stage] = spent.stages.get(stage, 0) + total - stages[stage]

    def _timed(self) -> dict[str, int]:
        return lane_timers.read(self._stages) if self._stages else {}

    def __repr__(self) -> str:
        return f"<Meter of process {self._pid}>"
