"""For how long an engine misses while one daemon follows another, by way of following.

    python bench/handover.py [CHUNKS ...] [--runs N]

A daemon has so many chunks of 4 KiB. An engine loads one of them and stores a new one, again
and again, while the next daemon comes: by `kvd serve --handover`, or by SIGTERM and a start
(which is what `systemctl restart` does). The gap is the time between the last success with
the old daemon and the first one with the new.
"""

import argparse
import itertools
import json
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from harness import Figures, median
from restart import BLOCKS, LAYOUT, MODEL, PAGE, PATIENCE, Place, fill, key, status

from kvd_client import HostMemory, LookupResult, Scheduler, Worker

RUNS = 5
SPARE = 4096  # chunks for what is stored meanwhile
PAUSE_SECONDS = 0.001
NOBODYS = 2**40  # keys from here on are new


class Engine:
    """Looks up, loads and stores in a thread; when each last had success, and its longest gap."""

    def __init__(self, runtime_dir: Path, last: bytes) -> None:
        self._key = last
        self._scheduler = Scheduler(runtime_dir, "engine")
        self._worker = Worker(runtime_dir, "engine", 0, 1)
        self._memory = [HostMemory.allocate(size) for size in LAYOUT.storages]
        self._worker.register(self._memory, LAYOUT, MODEL)
        if not self._scheduler.wait_attached(PATIENCE):
            raise RuntimeError("the engine is not attached")
        self._jobs = itertools.count(1)
        self._new = itertools.count(NOBODYS)
        self.successes: dict[str, list[float]] = {"lookup": [], "load": [], "store": []}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            for name, ok in (
                ("lookup", self._scheduler.lookup(self._key) is LookupResult.HIT),
                ("load", self._load()),
                ("store", self._store()),
            ):
                if ok:
                    self.successes[name].append(time.monotonic())
            time.sleep(PAUSE_SECONDS)

    def _load(self) -> bool:
        ticket = self._scheduler.prepare_load([self._key])
        if not ticket.keys:
            return False
        job = next(self._jobs)
        self._worker.submit_load(job, [1], [1], [0], ticket.slots, ticket.generations)
        done = self._ended(job)
        self._scheduler.complete_load(ticket)
        return done

    def _store(self) -> bool:
        ticket = self._scheduler.prepare_store([key(next(self._new))])
        if not ticket.keys:
            return False
        job = next(self._jobs)
        self._worker.submit_store(job, [2], [1], [0], ticket.slots, ticket.generations)
        done = self._ended(job)
        self._scheduler.complete_store(ticket.keys, success=done)
        return done

    def _ended(self, job: int) -> bool:
        self._worker.wait([job], PATIENCE)
        return any(r.job_id == job and r.success for r in self._worker.get_finished())

    def wait_more(self, since: float) -> None:
        """Until everything has had success after `since`."""
        end = time.monotonic() + PATIENCE
        while any(not times or times[-1] <= since for times in self.successes.values()):
            if time.monotonic() > end:
                raise RuntimeError(f"no success: {self._scheduler}")
            time.sleep(0.01)

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait_more(0.0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._scheduler.close()
        self._worker.close()
        for item in self._memory:
            item.close()


def gap(times: list[float]) -> float:
    """Milliseconds, the longest pause between two successes."""
    return 1000 * max(after - before for before, after in itertools.pairwise(times))


def wait_ready(place: Place, daemon: subprocess.Popen[bytes]) -> None:
    """Until it is the one that serves, and ready."""
    end = time.monotonic() + PATIENCE
    report = status(place)
    while report.get("pid") != daemon.pid or not report["ready"]:
        if daemon.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"not ready: {place.log.read_text()}")
        time.sleep(0.05)
        report = status(place)


def follow(
    place: Place, old: subprocess.Popen[bytes], *, handover: bool
) -> subprocess.Popen[bytes]:
    """The next daemon, ready; the old one has ended."""
    if handover:
        new = place.start("--handover")
    else:
        old.send_signal(signal.SIGTERM)
        old.wait(PATIENCE)
        new = place.start()
    if old.wait(PATIENCE) != 0:
        raise RuntimeError(f"the old daemon has not left: {place.log.read_text()}")
    wait_ready(place, new)
    return new


def measure(chunks: int, runs: int) -> dict[str, Figures]:
    """Medians over `runs` of each way, which take turns."""
    gaps: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="kvd-bench-", dir="/dev/shm") as path:
        cpu_bytes = (max(chunks, BLOCKS) + SPARE) * PAGE
        place = Place(Path(path) / "run", Path(path), cpu_bytes, Path(path) / "log")
        fill(place, chunks)
        daemon = place.start()
        try:
            wait_ready(place, daemon)
            for handover in [True, False] * runs:
                with Engine(place.runtime_dir, key(chunks - 1)) as engine:
                    daemon = follow(place, daemon, handover=handover)
                    engine.wait_more(time.monotonic())
                gaps[handover].append({name: gap(t) for name, t in engine.successes.items()})
        finally:
            daemon.kill()
            daemon.wait()
    return {
        "handover" if handover else "stop and start": {
            "chunks": chunks,
            **{f"{name}_gap_ms": median(g[name] for g in found) for name in found[0]},
            "longest_load_gap_ms": round(max(g["load"] for g in found), 1),
        }
        for handover, found in gaps.items()
    }


def main() -> None:
    """One line of JSON for each number of chunks and way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chunks", nargs="*", type=int, default=[1000, 100_000, 1_000_000])
    parser.add_argument("--runs", type=int, default=RUNS)
    options = parser.parse_args()
    for chunks in options.chunks:
        for way, figures in measure(chunks, options.runs).items():
            print(json.dumps({"way": way} | figures), flush=True)


if __name__ == "__main__":
    main()
