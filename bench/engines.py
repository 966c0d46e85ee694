"""Engines that step at the same time: how soon the broker answers each, and what that costs it.

Every engine sends 100 steps a second, at times of its own (5 to 15 ms apart), and waits for no
reply: a step begins two stores, pins two chunks, gives two pins back and names eight chunks of
requests that have finished. The stores are written, so the pool is full of READY chunks after a
moment and others have to go; so that two cores are enough for all of it, sixteen steps' chunks
go to the lane as one job. All engines share one namespace. Sessions are made by hand, over the
channel that engines have: two processes drive them, this one is their workers.

A reply's time runs from just before the step is sent until the reply is received.

`python engines.py drive RUNTIME_DIR SECONDS ENGINE …` is a driver.
"""

import argparse
import heapq
import json
import os
import platform
import random
import select
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from harness import Daemon, Figures, engine_name, median
from raw_session import RawWorker, directory_of, expect
from rich.console import Console
from rich.table import Table
from step_messages import Chunk, Steps, places

from kvd_proto.codec import WIRE
from kvd_proto.messages import Message, Step, Welcome
from tests.raw_client import RawClient

OUT = Path(__file__).parent / "out" / "engines.json"
ENGINES, DRIVERS = (1, 4, 16, 32), 2
ROUNDS, RUN_SECONDS, WARM_SECONDS = 3, 10.0, 4.0
STEP_SECONDS = 0.01
STORES, PINS, USED = 2, 2, 8
STEPS_A_JOB = 16
OLD_CHUNKS = 400  # of an engine: those that were written last are pinned and used
PAGE, SLOTS, BLOCKS = 4096, 16384, 64


# ------------------------------------------------------------------- drivers


class Driven:
    """One engine's scheduler: what it sends, and how long each reply took."""

    def __init__(self, runtime_dir: Path, engine: str) -> None:
        self.engine = engine
        self.took: list[float] = []
        self._sent: deque[float] = deque()
        session = RawClient(runtime_dir)
        expect(session.hello("scheduler", engine), Welcome)
        self._channel = session.channel
        self._steps = Steps(directory_of(session), STORES, PINS, USED)
        while self._steps.at_hand < STORES:
            self._steps.lend(session.ask(self._ask_loans()))
        self._request_id = session.request_id

    def fileno(self) -> int:
        """Of the connection; readable where `receive` may have something to do."""
        return self._channel.fileno()

    def _ask_loans(self) -> Step:
        return Step(wanted=self._steps.wanted)

    def _frame(self, message: Message) -> bytes:
        self._request_id += 1
        return WIRE.encode(message, self._request_id)

    def step(self) -> list[Chunk]:
        """Send the next step, an empty one where loans are short; chunks to be written now."""
        steps = self._steps
        short = steps.at_hand < STORES
        frame = self._frame(self._ask_loans() if short else steps.next())
        self._sent.append(time.perf_counter())
        self._channel.send(frame)
        begun = steps.begun
        if len(begun) < STEPS_A_JOB * STORES:
            return []
        steps.begun, steps.ready = [], (steps.ready + begun)[-OLD_CHUNKS:]
        return begun

    def receive(self) -> None:
        """Take in the replies that have come."""
        arrived = self._channel.receive_all()
        now = time.perf_counter()
        for frame, _ in arrived:
            self.took.append(now - self._sent.popleft())
            self._steps.took(frame)


def drive(runtime_dir: Path, seconds: float, engines: list[str]) -> None:
    """Drive these engines; jobs go to standard output, and at the end a line with figures."""
    driven = [Driven(runtime_dir, engine) for engine in engines]
    rng = random.Random(engines[0])
    say({"ready": True})
    sys.stdin.readline()
    start = time.perf_counter()
    due = [(start + rng.uniform(0, STEP_SECONDS), number) for number in range(len(driven))]
    heapq.heapify(due)
    late: list[float] = []
    warm = False
    while due[0][0] < start + WARM_SECONDS + seconds:
        at, number = due[0]
        now = time.perf_counter()
        if not warm and now >= start + WARM_SECONDS:
            warm = True
            for lists in (late, *(each.took for each in driven)):
                lists.clear()
        if at > now:
            for each in select.select(driven, [], [], at - now)[0]:
                each.receive()
            continue
        late.append(now - at)
        heapq.heapreplace(due, (at + STEP_SECONDS * rng.uniform(0.5, 1.5), number))
        if chunks := driven[number].step():
            slots, generations = places(chunks)
            say({"job": [driven[number].engine, slots.tolist(), generations.tolist()]})
    say({"late": late, "took": [each.took for each in driven]})


def say(what: dict[str, Any]) -> None:
    """A line of JSON."""
    os.write(1, json.dumps(what).encode() + b"\n")


# ------------------------------------------------------------------- the run


def run(engines: int, seconds: float) -> Figures:
    """So many engines on a daemon of their own."""
    with Daemon(SLOTS * PAGE) as daemon:
        clock = (~int(daemon.status()["pid"]) << 3) | 2  # clock_getcpuclockid(3)
        names = [engine_name() for _ in range(engines)]
        workers = {
            name: RawWorker(daemon.runtime_dir, name, page=PAGE, num_blocks=BLOCKS)
            for name in names
        }
        drivers = [
            Driver(daemon.runtime_dir, seconds, names[first::DRIVERS])
            for first in range(min(DRIVERS, engines))
        ]
        try:
            for driver in drivers:
                driver.lines()
            for driver in drivers:
                driver.go()
            cpu = serve(drivers, workers, clock, seconds)
            ends = [driver.end for driver in drivers]
        finally:
            for driver in drivers:
                driver.close()
            for worker in workers.values():
                worker.close()
    took = [np.array(each) * 1e6 for end in ends for each in end["took"]]
    late = [seconds for end in ends for seconds in end["late"]]
    p99 = [float(np.percentile(each, 99)) for each in took]
    return {
        "steps_per_second": sum(map(len, took)) / seconds,
        "p50_us": float(np.percentile(np.concatenate(took), 50)),
        "p99_us": median(p99),
        "worst_p99_us": max(p99),
        "broker_share": cpu / seconds,
        "broker_us_a_step": cpu / sum(map(len, took)) * 1e6,
        "driver_late_p99_us": float(np.percentile(late, 99)) * 1e6,
    }


class Driver:
    """A process that drives some of the engines."""

    def __init__(self, runtime_dir: Path, seconds: float, engines: list[str]) -> None:
        command = [sys.executable, __file__, "drive", str(runtime_dir), str(seconds), *engines]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._rest = b""
        self.end: dict[str, Any] = {}

    def fileno(self) -> int:
        """Readable where a line has come."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def lines(self) -> list[dict[str, Any]]:
        """What it has said; waits where that is nothing."""
        assert self._process.stdout is not None
        data = os.read(self._process.stdout.fileno(), 2**20)
        if not data:
            raise RuntimeError("a driver has ended")
        *whole, self._rest = (self._rest + data).split(b"\n")
        said: list[dict[str, Any]] = [json.loads(line) for line in whole]
        self.end = next((each for each in said if "took" in each), self.end)
        return said

    def go(self) -> None:
        """Begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Wait for its end."""
        self._process.communicate()


def serve(
    drivers: list[Driver], workers: dict[str, RawWorker], clock: int, seconds: float
) -> float:
    """Be the workers until the drivers end; the broker's processor seconds meanwhile."""
    begin = time.perf_counter() + WARM_SECONDS
    marks: list[float] = []
    while not all(driver.end for driver in drivers):
        now = time.perf_counter()
        if len(marks) < 2 and now >= begin + len(marks) * seconds:
            marks.append(time.clock_gettime(clock))
        for driver in select.select([d for d in drivers if not d.end], [], [], 0.01)[0]:
            for engine, slots, generations in (e["job"] for e in driver.lines() if "job" in e):
                worker = workers[engine]
                worker.submit(np.array(slots, np.uint32), np.array(generations, np.uint64))
                worker.drop_finished()
    while len(marks) < 2:
        marks.append(time.clock_gettime(clock))
    return marks[1] - marks[0]


def main() -> None:
    """Run all, or one driver."""
    if sys.argv[1:2] == ["drive"]:
        drive(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=RUN_SECONDS, help="of each measurement")
    options = parser.parse_args()
    console = Console()
    rounds: dict[int, list[Figures]] = {engines: [] for engines in ENGINES}
    for number in range(options.rounds):
        for engines in ENGINES:
            with console.status(f"round {number + 1}: {engines} engines"):
                rounds[engines].append(run(engines, options.seconds))
    results = {
        engines: {
            name: round(median(each[name] for each in all_rounds), 3) for name in all_rounds[0]
        }
        for engines, all_rounds in rounds.items()
    }
    title = f"engines of 100 steps a second, {os.cpu_count()} CPUs, {platform.python_version()}"
    columns = ("steps/s", "p50 µs", "p99 µs", "worst p99", "broker's share", "µs a step", "late")
    table = Table("engines", *columns, title=title)
    for engines, figures in results.items():
        row = [f"{figures[name]:,.0f}" for name in ("steps_per_second", "p50_us", "p99_us")]
        row += [f"{figures['worst_p99_us']:,.0f}", f"{figures['broker_share']:.0%}"]
        row += [f"{figures[name]:,.0f}" for name in ("broker_us_a_step", "driver_late_p99_us")]
        table.add_row(str(engines), *row)
    console.print(table)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(results, indent=2) + "\n")
    console.print(f"written to {OUT}")


if __name__ == "__main__":
    main()
