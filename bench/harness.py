"""What the benchmarks share: a private daemon, memory figures, statistics."""

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import psutil

from kvd.errors import NotRunning
from kvd.wire.tool import Control
from kvd_client.scheduler import Scheduler
from kvd_proto.answers import LookupResult
from kvd_proto.messages import Status, StatusReport

MIB = 2**20
READY_SECONDS = 30.0
POLL_SECONDS = 0.001
FOUND_SECONDS = 60.0
SHARED_MEMORY = Path("/dev/shm")
SHARED_MARKS = ("/pool", "memfd:kvd-memory", "/dev/shm/")  # the pool's and the workers' memory

Figures = dict[str, float]
_numbers = itertools.count()


def median(values: Iterable[float]) -> float:
    """The median of some measurements."""
    return float(np.median(list(values)))


def fresh_keys(count: int) -> list[bytes]:
    """Keys that were never used before: 36 bytes, as a block hash and a group index have."""
    batch = next(_numbers).to_bytes(4, "little")
    noise = np.random.default_rng(int.from_bytes(batch, "little")).bytes(28 * count)
    return [noise[28 * i : 28 * i + 28] + batch + b"\0\0\0\0" for i in range(count)]


class Daemon:
    """A `kvd serve` of its own with a pool of `cpu_bytes` and `options`; ended with the context.

    Args:
        cpu_bytes: of the pool.
        options: more of `kvd serve`.
        log: a file to which it and its lanes append theirs; else that is gone with it.
    """

    def __init__(self, cpu_bytes: int, *options: str, log: Path | None = None) -> None:
        roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > cpu_bytes
        self._place = Path(
            tempfile.mkdtemp(prefix="kvd-bench-", dir=SHARED_MEMORY if roomy else None)
        )
        self.runtime_dir = self._place / "run"
        self._cpu_bytes = cpu_bytes
        self._options = options
        self._log_path = log or self._place / "log"
        self.start_ms = 0.0

    def __enter__(self) -> Self:
        started = time.perf_counter()
        command = [sys.executable, "-m", "kvd", "serve", "--runtime-dir", str(self.runtime_dir)]
        command += ["--cpu-bytes", str(self._cpu_bytes), "--pool-dir", str(self._place)]
        command += ["--http-listen", "off", "--keep-pool", "no", *self._options]
        self._log = self._log_path.open("ab")
        begin = self._log.tell()
        self._process = subprocess.Popen(command, stderr=self._log, start_new_session=True)
        try:
            while not self.status().get("ready"):
                if (
                    self._process.poll() is not None
                    or time.perf_counter() - started > READY_SECONDS
                ):
                    said = self._log_path.read_bytes()[begin:].decode(errors="replace")
                    raise RuntimeError(f"the daemon is not ready: {said}")
                time.sleep(POLL_SECONDS)
        except BaseException:
            self._end()
            raise
        self.start_ms = (time.perf_counter() - started) * 1e3
        return self

    def status(self) -> dict[str, Any]:
        """The daemon's report; empty while it does not answer."""
        try:
            with Control(self.runtime_dir) as control:
                reply = control.request(Status())
        except NotRunning:
            return {}
        return reply.status if isinstance(reply, StatusReport) else {}

    def wait_usable(self, seconds: float) -> None:
        """Wait until every lane can copy all of the pool; less is taken of a store before that.

        Raises:
            RuntimeError: a lane cannot, or not in this time.
        """
        end = time.monotonic() + seconds
        while True:
            lanes = self.status().get("lanes", [])
            if lanes and all(lane["usable_bytes"] >= lane["pool_bytes"] > 0 for lane in lanes):
                return
            errors = [lane["pin_error"] for lane in lanes if lane["pin_error"]]
            if errors or time.monotonic() > end:
                raise RuntimeError(
                    errors[0] if errors else f"the pool is not usable in {seconds:g} s: {lanes}"
                )
            time.sleep(POLL_SECONDS)

    def memory(self) -> tuple[float, float]:
        """MiB resident beyond the pool and the workers' tensors: of the broker, of the lane."""
        lane = self.status()["lanes"][0]["pid"]
        return own_memory(self._process.pid), own_memory(lane)

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()
        shutil.rmtree(self._place, ignore_errors=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def __repr__(self) -> str:
        return f"<Daemon {self.runtime_dir}>"


def own_memory(pid: int) -> float:
    """MiB resident of a process, without shared memory that holds KV bytes."""
    maps = psutil.Process(pid).memory_maps(grouped=True)
    return sum(m.rss for m in maps if not any(mark in m.path for mark in SHARED_MARKS)) / MIB


def engine_name() -> str:
    """A name that no other engine of this run has."""
    return f"bench-{os.getpid()}-{next(_numbers)}"


def wait_found(scheduler: Scheduler, keys: list[bytes]) -> None:
    """Wait until all of these can be loaded: lanes tell the broker after they tell the worker.

    Raises:
        RuntimeError: they are not found within a minute.
    """
    end = time.monotonic() + FOUND_SECONDS
    while set(scheduler.lookup_many(keys)) != {LookupResult.HIT}:
        if time.monotonic() > end:
            raise RuntimeError("what was stored is not found")
        scheduler.status()
