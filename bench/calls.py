"""What a scheduler's calls take, beside a bare ZeroMQ round trip of the same run.

Each call is about eight chunks; a step is ten requests that offer eight chunks each while five
loads end. Then the same with a broker that stands still, for less than the scheduler's deadline.
Prints a table, writes bench/out/calls.json; figures are microseconds of the caller's thread.
"""

import argparse
import json
import os
import platform
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import zmq
from harness import SECONDS, Daemon, Engine, fresh_keys, layout
from request_cost import serving
from rich.console import Console
from rich.table import Table

from kvd_client.scheduler import Scheduler

OUT = Path(__file__).parent / "out" / "calls.json"
KEYS, OFFERS, LOADS = 8, 10, 5
PAGE, SLOTS = 4096, 65536
STEP_SECONDS = 0.004  # between steps: an engine computes meanwhile
ROUNDS, QUICK_ROUNDS = 3000, 300
FROZEN_SECONDS, DEADLINE = 5.0, 30.0
T = TypeVar("T")


class Calls:
    """Runs steps of a scheduler and keeps what each call took, by its name."""

    def __init__(self, scheduler: Scheduler, cached: list[bytes]) -> None:
        self._scheduler = scheduler
        self._cached = cached
        self.took: dict[str, list[float]] = defaultdict(list)
        self.accepted = self.offered = 0

    def _timed(self, name: str, call: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = call()
        self.took[name].append((time.perf_counter() - started) * 1e6)
        return result

    def single(self) -> None:
        """One of each call, and the message that they leave in."""
        scheduler, cached = self._scheduler, self._cached
        keys = fresh_keys(KEYS)
        stores = self._timed("prepare_store", lambda: scheduler.prepare_store(keys))
        loads = self._timed("prepare_load", lambda: scheduler.prepare_load(cached))
        self._timed("end_step", scheduler.end_step)
        self._timed("complete_store", lambda: scheduler.complete_store(stores, success=False))
        self._timed("complete_load", lambda: scheduler.complete_load(loads))
        self._timed("request_finished", lambda: scheduler.request_finished(cached))
        self._timed("end_step", scheduler.end_step)
        self._count(len(keys), len(stores))

    def step(self) -> None:
        """A whole step of a busy engine."""
        scheduler, cached = self._scheduler, self._cached
        loads = [scheduler.prepare_load(cached) for _ in range(LOADS)]
        scheduler.end_step()
        offers = [fresh_keys(KEYS) for _ in range(OFFERS)]
        started = time.perf_counter()
        stores = [scheduler.prepare_store(keys) for keys in offers]
        for load in loads:
            scheduler.complete_load(load)
        scheduler.end_step()
        self.took["step"].append((time.perf_counter() - started) * 1e6)
        for store in stores:
            scheduler.complete_store(store, success=False)
        self._count(OFFERS * KEYS, sum(map(len, stores)))

    def _count(self, offered: int, accepted: int) -> None:
        self.offered += offered
        self.accepted += accepted


def round_trips(count: int) -> list[float]:
    """Microseconds of round trips to a process that sends back what comes, by libzmq."""
    took = []
    with (
        serving("pyzmq") as (place, _),
        zmq.Context() as context,
        context.socket(zmq.DEALER) as sock,
    ):
        sock.linger = 0
        sock.connect(f"ipc://{place / 'broker.sock'}")
        for _ in range(count):
            started = time.perf_counter()
            sock.send(bytes(380))
            if not sock.poll(int(SECONDS * 1e3)):
                raise RuntimeError("the echo does not answer")
            sock.recv()
            took.append((time.perf_counter() - started) * 1e6)
            time.sleep(STEP_SECONDS / 4)
    return took[count // 10 :]


def summary(took: list[float]) -> dict[str, float]:
    """Percentiles, in microseconds."""
    p50, p90, p99 = np.percentile(took, (50, 90, 99))
    figures = {"p50": p50, "p90": p90, "p99": p99, "longest": max(took)}
    return {name: round(float(value), 1) for name, value in figures.items()}


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Figures by call."""
    results = {"bare round trip": summary(round_trips(rounds))}
    with (
        Daemon(SLOTS * PAGE) as daemon,
        Engine(daemon.runtime_dir, layout(1, PAGE, KEYS + 1)) as engine,
    ):
        cached, _ = engine.fill(KEYS, KEYS)
        engine.stored(cached)
        with Scheduler(
            daemon.runtime_dir, engine.worker.engine, deadline=DEADLINE, steps=True
        ) as scheduler:
            engine.scheduler.close()  # an engine has one scheduler
            if not scheduler.wait_attached(SECONDS):
                raise RuntimeError("the engine does not become complete")
            calls = Calls(scheduler, cached)
            for number in range(rounds):
                (calls.step if number % 4 == 3 else calls.single)()
                time.sleep(STEP_SECONDS)
            results |= {name: summary(took) for name, took in calls.took.items()}
            results["share of offered keys accepted"] = {
                "p50": round(calls.accepted / calls.offered, 4)
            }
            frozen = Calls(scheduler, cached)
            pid = int(daemon.status()["pid"])
            os.kill(pid, signal.SIGSTOP)
            try:
                end = time.monotonic() + FROZEN_SECONDS
                while time.monotonic() < end:
                    frozen.single()
                    frozen.step()
                    time.sleep(STEP_SECONDS)
            finally:
                os.kill(pid, signal.SIGCONT)
            results |= {f"{name}, frozen": summary(took) for name, took in frozen.took.items()}
    return results


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    options = parser.parse_args()
    console = Console()
    with console.status("measuring"):
        results = measure(QUICK_ROUNDS if options.quick else ROUNDS)
    title = f"calls, µs, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    table = Table("call", "p50", "p90", "p99", "longest", title=title)
    for name, figures in results.items():
        table.add_row(name, *(f"{value:,}" for value in figures.values()))
    console.print(table)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(results, indent=2) + "\n")
    console.print(f"written to {OUT}")


if __name__ == "__main__":
    main()
