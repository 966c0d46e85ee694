"""What scrubbing costs: how fast cleared chunks are wiped, and what loads notice of it.

`python bench/scrub.py` prints a table and, as its last line, JSON. A namespace is filled and
cleared, in turn with the setting scrub off, with it on, and with it on while another engine
loads; each turn has also loads alone, so that all see the same machine.
"""

import json
import threading
import time

import numpy as np
from fairness import CHUNK, LOAD_CHUNKS, engine, one_load, store
from harness import MIB, Daemon, Figures, engine_name, fresh_keys, median

from kvd.control import Control
from kvd_client.scheduler import Scheduler
from kvd_client.worker import Worker
from kvd_proto.messages import Clear, Cleared

POOL, FILLED, ROUNDS, LOADS = 1024 * MIB, 768 * MIB, 5, 200
PATIENCE = 120.0


class Clearing:
    """A `Clear` of one namespace, timed from the question to the answer, by another thread."""

    def __init__(self, daemon: Daemon, ns_id: bytes) -> None:
        self.seconds = 0.0
        self.chunks = 0
        self._daemon = daemon
        self._message = Clear(namespace=ns_id)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with Control(self._daemon.runtime_dir, PATIENCE) as control:
            started = time.perf_counter()
            self.chunks = control.ask(self._message, Cleared).chunks
            self.seconds = time.perf_counter() - started

    @property
    def under_way(self) -> bool:
        """There is no answer yet."""
        return self._thread.is_alive()

    def wait(self) -> "Clearing":
        """Until the answer is here.

        Raises:
            RuntimeError: there is none, or not all was there to be cleared.
        """
        self._thread.join()
        if self.chunks != FILLED // CHUNK:
            raise RuntimeError(f"{self.chunks} chunks were cleared, {FILLED // CHUNK} stored")
        return self


def fill(daemon: Daemon) -> bytes:
    """A new model stores FILLED bytes and leaves; its namespace."""
    name = engine_name()
    with engine(daemon.runtime_dir, name, name) as (scheduler, worker):
        for job in range(FILLED // CHUNK // LOAD_CHUNKS):
            store(scheduler, worker, fresh_keys(LOAD_CHUNKS), job)
    while any(each["name"] == name for each in daemon.status()["engines"]):
        time.sleep(0.01)
    (found,) = (each for each in daemon.status()["namespaces"] if each["model"] == name)
    return bytes.fromhex(found["id"])


def measure() -> Figures:
    """Medians of the rounds."""
    spread: dict[str, list[float]] = {}
    with (
        Daemon(POOL) as off,
        Daemon(POOL, "--scrub", "yes") as on,
        engine(on.runtime_dir, engine_name(), "quiet") as (scheduler, worker),
    ):
        keys = fresh_keys(LOAD_CHUNKS)
        store(scheduler, worker, keys, 0)
        for number in range(ROUNDS + 1):
            figures = one_round(off, on, scheduler, worker, keys)
            for name, value in figures.items() if number else ():  # the first warms up
                spread.setdefault(name, []).append(value)
    return {name: median(values) for name, values in spread.items()}


def one_round(
    off: Daemon, on: Daemon, scheduler: Scheduler, worker: Worker, keys: list[bytes]
) -> Figures:
    """Every way to clear, and loads alone and beside one."""
    jobs = iter(range(int(time.monotonic_ns()), 2**63))
    cleared_off = Clearing(off, fill(off)).wait()
    cleared_on = Clearing(on, fill(on)).wait()
    namespace = fill(on)
    alone = [one_load(scheduler, worker, keys, next(jobs)) for _ in range(LOADS)]
    clearing, beside = Clearing(on, namespace), []
    while clearing.under_way:
        beside.append(one_load(scheduler, worker, keys, next(jobs)))
    clearing.wait()
    figures = {
        "clear_off_ms": cleared_off.seconds * 1e3,
        "clear_on_ms": cleared_on.seconds * 1e3,
        "wiped_gb_s": FILLED / (cleared_on.seconds - cleared_off.seconds) / 1e9,
        "wiped_beside_loads_gb_s": FILLED / (clearing.seconds - cleared_off.seconds) / 1e9,
        "loads_beside": float(len(beside)),
    }
    for name, values in (("alone", alone), ("beside", beside)):
        for percent in (50, 99):
            figures[f"{name}_p{percent}_ms"] = float(np.percentile(values, percent))
    return figures


def main() -> None:
    """Print the table and the JSON."""
    figures = measure()
    for name, value in figures.items():
        print(f"{name:24} {value:8.2f}")
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
