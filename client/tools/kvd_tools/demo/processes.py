"""The demo's processes: the daemon and the ranks. What is started here is ended here.

A rank computes, stores, loads and verifies. It sends its device's name once its memory is
registered, then takes `Step`s and sends a `Finished` for every transfer. `None` ends it: then it
sends how many bytes changed where nothing may ever be written. A `DemoError` says why it cannot go
on. It ends when the pipe does.
"""

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

from kvd_client.errors import KvdClientError
from kvd_client.jobs import JobResult
from kvd_client.memory import HostMemory
from kvd_client.scheduler import Scheduler
from kvd_client.tickets import ChunkBlocks, LoadTicket, StoreTicket
from kvd_client.worker import Worker
from kvd_proto.messages import Fingerprint
from kvd_tools.demo.memory import STRIDES, KvMemory, rank_layout
from kvd_tools.errors import DemoError

POLL_SECONDS = 100e-6  # an engine's step looks for finished jobs about so often
ENGINE = "demo"


@dataclass(frozen=True, slots=True)
class Setup:
    """Who the rank is, and what it owns. corrupt: flip a bit in what is stored first."""

    runtime_dir: Path
    rank: int
    world_size: int
    num_blocks: int
    corrupt: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Write the content of these blocks, group by group; or, with a ticket, do a transfer.

    A transfer stores the ticket's chunks from the blocks, or loads them and verifies the blocks.
    """

    groups: list[ChunkBlocks]
    job: int = 0
    ticket: StoreTicket | LoadTicket | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A transfer's end on one rank.

    took_ns: from submission to seen finished.
    verified, mismatched: bytes of a load that were compared, and of these the wrong ones.
    """

    result: JobResult
    took_ns: int
    verified: int
    mismatched: int


def run(pipe: Connection, setup: Setup) -> None:
    """Serve the scheduler at the other end of `pipe`: the main function of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the scheduler ends its ranks
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            _run(pipe, setup)
        except KvdClientError as error:
            pipe.send(DemoError(f"rank {setup.rank}: {error}"))


def _run(pipe: Connection, setup: Setup) -> None:
    storages = [HostMemory.allocate(setup.num_blocks * stride) for stride in STRIDES]
    arrays = [storage.array.reshape(setup.num_blocks, -1) for storage in storages]
    memory = KvMemory(setup.rank, arrays)
    with Worker(setup.runtime_dir, ENGINE, setup.rank, setup.world_size) as worker:
        worker.register(
            storages,
            rank_layout(setup.num_blocks),
            Fingerprint(model="kvd-demo", dtype="uint8"),
            required=True,
        )
        pipe.send(storages[0].device)
        _serve(pipe, memory, worker, corrupt=setup.corrupt)
        pipe.send(memory.strayed())


def _serve(pipe: Connection, memory: KvMemory, worker: Worker, *, corrupt: bool) -> None:
    jobs: dict[int, tuple[int, Step]] = {}  # with the time of submission, in ns
    while True:
        if pipe.poll(POLL_SECONDS if jobs else None):
            step = pipe.recv()
            if step is None:
                return
            if step.ticket is None:
                memory.fill(step.groups)
                continue
            jobs[step.job] = time.perf_counter_ns(), step
            if isinstance(step.ticket, LoadTicket):
                memory.poison(step.groups)
                worker.load(step.job, step.ticket, step.groups)
            else:
                if corrupt:
                    memory.corrupt(step.groups)
                    corrupt = False
                worker.store(step.job, step.ticket, step.groups)
        for result in worker.get_finished():
            now_ns = time.perf_counter_ns()
            started_ns, step = jobs.pop(result.job_id)
            verified = mismatched = 0
            if isinstance(step.ticket, LoadTicket) and result.success:
                verified, mismatched = memory.verify(step.groups)
            pipe.send(Finished(result, now_ns - started_ns, verified, mismatched))


START_SECONDS = 60.0
END_SECONDS = 10.0
LOOK_SECONDS = 0.05
LOG_TAIL_BYTES = 2000
SHARED_MEMORY = Path("/dev/shm")  # where a pool is memory, not disk


class Daemon:
    """A private `kvd serve`, ready when the context is entered; it never outlives this process.

    It has a process group of its own: Ctrl-C at the terminal reaches the parent alone, which
    ends it in order.

    Args:
        cpu_bytes: of the pool.
        more_bytes: that the caller wants in `place` beside it.
        tiers: below the pool, as `kvd serve --tier` takes them.

    Attributes:
        place: a temporary folder for sockets, log and pool; removed with the context.
    """

    def __init__(self, cpu_bytes: int, more_bytes: int = 0, tiers: Sequence[str] = ()) -> None:
        parent = None
        with contextlib.suppress(OSError):
            room = shutil.disk_usage(SHARED_MEMORY).free > cpu_bytes + more_bytes
            parent = SHARED_MEMORY if room and os.access(SHARED_MEMORY, os.W_OK) else None
        self._folder = tempfile.TemporaryDirectory(
            prefix="kvd-demo-", dir=parent, ignore_cleanup_errors=True
        )
        self.place = Path(self._folder.name)
        self.runtime_dir = self.place / "run"
        self._log = self.place / "daemon.log"
        self._command = [sys.executable, "-m", "kvd_tools.demo.tether", str(os.getpid())]
        self._command += ["kvd", "serve", "--runtime-dir", str(self.runtime_dir)]
        self._command += ["--cpu-bytes", str(cpu_bytes), "--pool-dir", str(self.place)]
        self._command += ["--keep-pool", "no"]  # it goes with the place
        self._command += [f"--tier={tier}" for tier in tiers]
        self._command += ["--http-listen", "off"]  # several demos may run on one machine

    def __enter__(self) -> Self:
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        try:
            end = time.monotonic() + START_SECONDS
            with Scheduler(self.runtime_dir, "demo-start") as asking:
                while not asking.status().get("ready"):
                    if not self.running or time.monotonic() > end:
                        raise self.lost("the daemon did not become ready")
                    time.sleep(LOOK_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def lost(self, why: str) -> DemoError:
        """Return an error that says what happened, with the log's end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        status = self._process.poll()
        state = "is still running" if status is None else f"ended with status {status}"
        tail = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return DemoError(f"{why}; the daemon (pid {self._process.pid}) {state}. Its log:\n{tail}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


class Ranks:
    """The rank processes and the pipes to them; all are ready when the context is entered.

    Its methods raise DemoError where a rank has ended, or cannot go on.
    """

    def __init__(self, setups: Sequence[Setup]) -> None:
        self._setups = setups
        self._processes: dict[Connection, BaseProcess] = {}
        self.device = ""

    def __len__(self) -> int:
        return len(self._setups)

    def __enter__(self) -> Self:
        spawn = multiprocessing.get_context("spawn")
        try:
            for setup in self._setups:
                ours, theirs = spawn.Pipe()
                name = f"rank {setup.rank}"
                process = spawn.Process(target=run, args=(theirs, setup), name=name)
                process.start()
                theirs.close()
                self._processes[ours] = process
            for pipe in self._processes:
                self.device = self._next(pipe, START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def send_all(self, step: Step | None) -> None:
        """Send a step to every rank; None ends it."""
        for pipe, process in self._processes.items():
            try:
                pipe.send(step)
            except OSError as error:
                raise _lost(process) from error

    def receive(self, seconds: float) -> list[Finished]:
        """Return what the ranks report; wait for the first report, at most so long."""
        there = wait(list(self._processes), seconds)
        return [self._next(pipe, 0) for pipe in self._processes if pipe in there]

    def stop(self) -> int:
        """End all ranks; return how many bytes changed where nothing may be written."""
        self.send_all(None)
        return sum(self._next(pipe, END_SECONDS) for pipe in self._processes)

    def _next(self, pipe: Connection, seconds: float) -> Any:
        process = self._processes[pipe]
        try:
            if not pipe.poll(seconds):
                raise DemoError(f"{process.name}: no answer within {seconds:g} s")
            reply = pipe.recv()
        except (EOFError, OSError) as error:
            raise _lost(process) from error
        if isinstance(reply, DemoError):
            raise reply
        return reply

    def __exit__(self, *_: object) -> None:
        for pipe in self._processes:
            pipe.close()
        end = time.monotonic() + END_SECONDS  # for all of them
        for process in self._processes.values():
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()


def _lost(process: BaseProcess) -> DemoError:
    process.join(1.0)
    return DemoError(f"{process.name} (pid {process.pid}) ended with status {process.exitcode}")
