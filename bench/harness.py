"""What the benchmarks share: a private daemon, an engine of one rank, figures."""

import contextlib
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvd.errors import NotRunning
from kvd.wire.tool import ToolConnection
from kvd_client import JobBlocks, Load, Store
from kvd_client.memory import DeviceMemory, HostMemory, Memory
from kvd_client.routes import EXPORT, STAGING, Transfer
from kvd_client.scheduler import Scheduler
from kvd_client.staging_memory import KvTensors
from kvd_client.tickets import LoadTicket, StoreTicket
from kvd_client.worker import Worker
from kvd_proto.directory import LookupResult
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.messages import Fingerprint

MIB = 2**20
READY_SECONDS = 30.0
POLL_SECONDS = 0.001
START_POLL_SECONDS = 0.005
SECONDS = 60.0  # for anything else
SPARE = 3  # stores' worth of slots that an engine may have on loan, with those it uses
SHARED_MEMORY = Path("/dev/shm")
SHARED_MARKS = ("/pool", "memfd:kvd-memory", "/dev/shm/")  # the pool's and the workers' memory
# The Python of a machine with a GPU may have no click, and then there is no `kvd`.
SERVE = (
    ("-m", "kvd", "serve")
    if importlib.util.find_spec("click")
    else (str(Path(__file__).parents[1] / "tests" / "gpu" / "serve.py"),)
)

Figures = dict[str, float]
Ints = npt.NDArray[np.int64]
Ticket = TypeVar("Ticket", StoreTicket, LoadTicket)
_numbers = itertools.count()


def find_doubles() -> None:
    """Have processes that are started from here find the tests' tiers: `--tier memory:…`."""
    folder = str(Path(__file__).parents[1] / "tests/tier/doubles")
    paths = [os.environ.get("PYTHONPATH", ""), folder]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def median(values: Iterable[float]) -> float:
    """The median of some measurements."""
    return float(np.median(list(values)))


def fresh_keys(count: int) -> list[bytes]:
    """Keys that were never used before: 36 bytes, as a block hash and a group index have."""
    batch = next(_numbers).to_bytes(4, "little")
    noise = np.random.default_rng(int.from_bytes(batch, "little")).bytes(28 * count)
    return [noise[28 * i : 28 * i + 28] + batch + b"\0\0\0\0" for i in range(count)]


class Served:
    """A daemon that somebody runs."""

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir

    def status(self) -> dict[str, Any]:
        """The daemon's report; empty while it does not answer."""
        try:
            with ToolConnection(self.runtime_dir) as control:
                return control.status()
        except NotRunning:
            return {}

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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.runtime_dir}>"


class Daemon(Served):
    """A `kvd serve` of its own with a pool of `cpu_bytes` and `options`; ended with the context.

    Args:
        cpu_bytes: of the pool.
        options: more of `kvd serve`.
        log: a file to which it and its lanes append theirs; else that is gone with it.
        place: where it lives; it is killed at the end and leaves its pool there. Else it lives in
            a folder of its own, which goes with it.

    Attributes:
        answer_ms, start_ms: from its start until it answers, and until it is ready.
    """

    def __init__(
        self, cpu_bytes: int, *options: str, log: Path | None = None, place: Path | None = None
    ) -> None:
        roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > cpu_bytes
        self._keeps = place is not None
        self._place = place or Path(
            tempfile.mkdtemp(
                prefix=f"kvd-bench-{os.getpid()}-", dir=SHARED_MEMORY if roomy else None
            )
        )
        super().__init__(self._place / "run")
        self._log_path = log or self._place / "log"
        self._command = [sys.executable, *SERVE, "--runtime-dir"]
        self._command += [str(self.runtime_dir), "--pool-dir", str(self._place)]
        self._command += ["--cpu-bytes", str(cpu_bytes), "--http-listen", "off"]
        self._command += ["--keep-pool", "yes" if self._keeps else "no", *options]
        self.answer_ms = self.start_ms = 0.0

    def __enter__(self) -> Self:
        started = time.perf_counter()
        self._log = self._log_path.open("ab")
        begin = self._log.tell()
        self._process = subprocess.Popen(self._command, stderr=self._log, start_new_session=True)
        try:
            with self._first_answer(started, begin) as control:
                self.answer_ms = (time.perf_counter() - started) * 1e3
                while not control.status()["ready"]:
                    self._check_start(started, begin)
                    # A report costs the broker milliseconds: it would be much of the start.
                    time.sleep(START_POLL_SECONDS)
                self.start_ms = (time.perf_counter() - started) * 1e3
        except BaseException:
            self.__exit__()
            raise
        return self

    def _first_answer(self, started: float, begin: int) -> ToolConnection:
        socket = self.runtime_dir / "broker.sock"
        while True:
            if socket.exists():  # else there is nothing to try, which would cost time of the start
                with contextlib.suppress(NotRunning):
                    return ToolConnection(self.runtime_dir)
            self._check_start(started, begin)
            time.sleep(POLL_SECONDS)

    def _check_start(self, started: float, begin: int) -> None:
        late = time.perf_counter() - started > READY_SECONDS
        if late or self._process.poll() is not None:
            said = self._log_path.read_bytes()[begin:].decode(errors="replace")
            raise RuntimeError(f"the daemon is not ready: {said}")

    def lane_pid(self) -> int:
        """The process of the only lane of a GPU.

        Raises:
            RuntimeError: there is none, or another one too.
        """
        lanes = [lane for lane in self.status()["lanes"] if lane["device"] != "host"]
        if len(lanes) != 1:
            raise RuntimeError(f"one lane of a GPU is needed: {lanes}")
        return int(lanes[0]["pid"])

    def memory(self) -> tuple[float, float]:
        """MiB resident beyond the pool and the workers' tensors: of the broker, of the lane."""
        lane = self.status()["lanes"][0]["pid"]
        return own_memory(self._process.pid), own_memory(lane)

    def __exit__(self, *_: object) -> None:
        if self._keeps:
            self._process.kill()
        end(self._process)
        self._log.close()
        if not self._keeps:
            shutil.rmtree(self._place, ignore_errors=True)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ask it to end, wait, and kill it where that takes too long."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def own_memory(pid: int) -> float:
    """MiB resident of a process, without shared memory that holds KV bytes."""
    import psutil  # noqa: PLC0415  # a machine with a GPU may have none

    maps = psutil.Process(pid).memory_maps(grouped=True)
    return sum(m.rss for m in maps if not any(mark in m.path for mark in SHARED_MARKS)) / MIB


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process, from /proc/PID/task/TID/schedstat."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += int((thread / "schedstat").read_text(encoding="ascii").split()[0])
    return total / 1e9


def engine_name() -> str:
    """A name that no other engine of this run has."""
    return f"bench-{os.getpid()}-{next(_numbers)}"


def wait_found(scheduler: Scheduler, keys: list[bytes]) -> None:
    """Wait until all of these can be loaded: lanes tell the broker after they tell the worker.

    Raises:
        RuntimeError: they are not found within a minute.
    """
    end = time.monotonic() + SECONDS
    while not {LookupResult.HIT}.issuperset(scheduler.lookup_many(keys)):
        if time.monotonic() > end:
            raise RuntimeError("what was stored is not found")
        time.sleep(1e-3)


def layout(tensors: int, page: int, num_blocks: int, blocks_per_chunk: int = 1) -> RankLayout:
    """Tensors of so many pages one after another in one storage; one group."""
    size = num_blocks * page
    refs = tuple(TensorRef(tensor=i, page_bytes=page) for i in range(tensors))
    return RankLayout(
        num_blocks=num_blocks,
        blocks_per_chunk=blocks_per_chunk,
        hash_block_size=16,
        storages=(tensors * size,),
        tensors=tuple(
            TensorSpec(storage=0, offset=i * size, page_bytes=page, block_stride=page)
            for i in range(tensors)
        ),
        groups=(GroupSpec(refs=refs, block_size=16),),
    )


def _as_tensors(memory: Memory) -> KvTensors:
    import torch  # noqa: PLC0415  # for staging only

    from kvd_client.torch_memory import describe_torch  # noqa: PLC0415

    if not isinstance(memory, HostMemory):
        raise TypeError(f"{memory!r}: host memory is needed")
    return describe_torch([torch.from_numpy(memory.array)])


class Engine:
    """One rank and its scheduler in this process, complete; ended with the context.

    Args:
        runtime_dir: the daemon's.
        layout: of `layout`.
        memory: its storage; new host memory where there is none.
        model: engines of one model share their chunks.
        transfer: whether the daemon maps the memory, or it is staged.

    Raises:
        RuntimeError: from what it does: it is not complete, chunks are missing, a job failed.
    """

    def __init__(
        self,
        runtime_dir: Path,
        layout: RankLayout,
        memory: HostMemory | DeviceMemory | None = None,
        model: str = "bench",
        transfer: Transfer = EXPORT,
    ) -> None:
        self.layout = layout
        self.memory = memory or HostMemory.allocate(layout.storages[0])
        self._job = 0
        name = engine_name()
        self.worker = Worker(runtime_dir, name, 0, 1)
        self.scheduler = Scheduler(runtime_dir, name)
        memories: Sequence[Memory] | KvTensors = [self.memory]
        if transfer == STAGING:
            memories = _as_tensors(self.memory)
        self.worker.register(
            memories, layout, Fingerprint(model=model), required=True, transfer=transfer
        )
        if not self.worker.wait_attached(SECONDS) or not self.scheduler.wait_attached(SECONDS):
            raise RuntimeError("the engine does not become complete")

    def offer(self, keys: list[bytes]) -> StoreTicket:
        """Slots for all of these keys, which are new.

        Where other chunks have to go for them, the daemon lends a part of the pool at a time.
        """
        tickets: list[StoreTicket] = []
        rest = keys
        while rest:
            self.scheduler.reserve(1, SECONDS)
            ticket = self.scheduler.prepare_store(rest)
            if not ticket.keys:
                raise RuntimeError(f"{ticket!r}: slots are needed for all keys")
            tickets.append(ticket)
            rest = rest[len(ticket) :]
        return StoreTicket(
            tuple(keys),
            np.concatenate([ticket.slots for ticket in tickets]),
            np.concatenate([ticket.generations for ticket in tickets]),
        )

    def find(self, keys: list[bytes]) -> LoadTicket:
        """All of these chunks, pinned."""
        return _all(self.scheduler.prepare_load(keys), keys)

    def stored(self, keys: list[bytes]) -> None:
        """Complete a store, and wait until its chunks can be loaded."""
        self.scheduler.complete_store(keys)
        wait_found(self.scheduler, keys)

    def submit(self, ticket: StoreTicket | LoadTicket, blocks: Ints, after: int = 0) -> int:
        """A job between these blocks and the ticket's slots; its number."""
        kind = Store if isinstance(ticket, StoreTicket) else Load
        self._job += 1
        job = JobBlocks.of(blocks, [len(blocks)], [0], ticket.slots, ticket.generations)
        self.worker.submit(kind, self._job, job, after)
        return self._job

    def finish(self, *jobs: int) -> None:
        """Wait for the end of all jobs that were submitted."""
        self.worker.wait(jobs, SECONDS)
        results = {result.job_id: result for result in self.worker.get_finished()}
        for job in jobs:
            if job not in results or not results[job].success:
                raise RuntimeError(f"job {job} failed: {results.get(job)}")

    def fill(self, count: int, at_a_time: int) -> tuple[list[bytes], list[float]]:
        """Store so many chunks of one block each: their keys, and ms of each `prepare_store`.

        A pool needs room for `SPARE` times `at_a_time` more: slots are lent ahead of need.
        """
        keys: list[bytes] = []
        took = []
        while len(keys) < count:
            batch = fresh_keys(at_a_time)
            self.scheduler.reserve(at_a_time, SECONDS)
            started = time.perf_counter()
            ticket = _all(self.scheduler.prepare_store(batch), batch)
            took.append((time.perf_counter() - started) * 1e3)
            self.finish(self.submit(ticket, np.arange(1, 1 + at_a_time)))
            self.scheduler.complete_store(batch)
            keys += batch
        return keys, took

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.scheduler.close()
        self.worker.close()
        self.memory.close()


def _all(ticket: Ticket, keys: list[bytes]) -> Ticket:
    if len(ticket) != len(keys):
        raise RuntimeError(f"{ticket!r}: all keys are needed")
    return ticket
