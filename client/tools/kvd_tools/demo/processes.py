"""The demo's child processes: the daemon and the ranks.

A rank computes, stores, loads and verifies. Its pipe carries:

1. from the rank: the name of its device, once its memory is registered;
2. to the rank: `RankStep`s. From the rank: a `RankReport` for each transfer;
3. to the rank: `None`. The rank sends the number of stray bytes and ends.

A rank that fails sends a `DemoError` instead. It also ends when its pipe is closed.
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
from kvd_tools.demo.workload import STRIDES, KvMemory, rank_layout
from kvd_tools.errors import DemoError

JOB_POLL_SECONDS = 100e-6  # about as often as the steps of an engine
ENGINE = "demo"


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What a rank needs to start. `corrupt`: it flips a bit of the first block that it stores."""

    runtime_dir: Path
    rank: int
    world_size: int
    num_blocks: int
    corrupt: bool


@dataclass(frozen=True, slots=True)
class RankStep:
    """What a rank is to do with blocks of its groups.

    Without a ticket it computes the blocks. With a ticket it stores the ticket's chunks from them,
    or loads the chunks into them and verifies the bytes.
    """

    groups: list[ChunkBlocks]
    job: int = 0
    ticket: StoreTicket | LoadTicket | None = None


@dataclass(frozen=True, slots=True)
class RankReport:
    """The result of a transfer on one rank.

    Attributes:
        result: of the job.
        took_ns: from its submission until the rank saw its result.
        verified, mismatched: loaded bytes that were compared, and those of them that are wrong.
    """

    result: JobResult
    took_ns: int
    verified: int
    mismatched: int


def run_rank(pipe: Connection, setup: RankSetup) -> None:
    """Serve the scheduler at the other end of `pipe`. The main function of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at Ctrl-C the parent ends the ranks
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            _register_and_serve(pipe, setup)
        except KvdClientError as error:
            pipe.send(DemoError(f"rank {setup.rank}: {error}"))


def _register_and_serve(pipe: Connection, setup: RankSetup) -> None:
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
        pipe.send(memory.count_stray_bytes())


def _serve(pipe: Connection, memory: KvMemory, worker: Worker, *, corrupt: bool) -> None:
    """Compute, store or load what each `RankStep` says, and report each transfer that has ended.

    Returns when `None` comes. `corrupt`: flip a bit of the first block before the first store.
    """
    jobs: dict[int, tuple[int, RankStep]] = {}  # time of submission in ns, and step
    while True:
        if pipe.poll(JOB_POLL_SECONDS if jobs else None):
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
            ended_ns = time.perf_counter_ns()
            started_ns, step = jobs.pop(result.job_id)
            verified = mismatched = 0
            if isinstance(step.ticket, LoadTicket) and result.success:
                verified, mismatched = memory.verify(step.groups)
            pipe.send(RankReport(result, ended_ns - started_ns, verified, mismatched))


START_SECONDS = 60.0
END_SECONDS = 10.0
START_POLL_SECONDS = 0.05
LOG_TAIL_BYTES = 2000
SHARED_MEMORY = Path("/dev/shm")  # a pool there needs no disk


class Daemon:
    """A private `kvd serve`. Entering the context waits until it is ready; leaving it ends it.

    It gets SIGTERM if this process dies. It has its own process group, so that Ctrl-C at the
    terminal reaches only this process, which then ends it.

    Args:
        cpu_bytes: size of the pool.
        extra_bytes: space that the caller needs in `folder` beside the pool.
        tiers: values for `kvd serve --tier`.

    Attributes:
        folder: a temporary folder with sockets, log and pool, removed with the context.
    """

    def __init__(self, cpu_bytes: int, extra_bytes: int = 0, tiers: Sequence[str] = ()) -> None:
        parent = None
        with contextlib.suppress(OSError):
            fits = shutil.disk_usage(SHARED_MEMORY).free > cpu_bytes + extra_bytes
            parent = SHARED_MEMORY if fits and os.access(SHARED_MEMORY, os.W_OK) else None
        self._temporary = tempfile.TemporaryDirectory(
            prefix="kvd-demo-", dir=parent, ignore_cleanup_errors=True
        )
        self.folder = Path(self._temporary.name)
        self.runtime_dir = self.folder / "run"
        self._log = self.folder / "daemon.log"
        self._command = [sys.executable, "-m", "kvd_tools.tether", str(os.getpid())]
        self._command += ["kvd", "serve", "--runtime-dir", str(self.runtime_dir)]
        self._command += ["--cpu-bytes", str(cpu_bytes), "--pool-dir", str(self.folder)]
        self._command += ["--keep-pool", "no"]  # its folder is removed anyway
        self._command += [f"--tier={tier}" for tier in tiers]
        self._command += ["--http-listen", "off"]  # its port would be taken by another demo

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
            with Scheduler(self.runtime_dir, "demo-start") as observer:
                while not observer.status().get("ready"):
                    if not self.running or time.monotonic() > end:
                        raise self.lost("the daemon did not become ready")
                    time.sleep(START_POLL_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    @property
    def running(self) -> bool:
        """Whether the daemon's process is alive."""
        return self._process.poll() is None

    def lost(self, reason: str) -> DemoError:
        """Return an error with this reason, the state of the process and the end of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        status = self._process.poll()
        state = "is still running" if status is None else f"ended with status {status}"
        tail = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return DemoError(
            f"{reason}; the daemon (pid {self._process.pid}) {state}. Its log:\n{tail}"
        )

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._temporary.cleanup()


class RankProcesses:
    """The rank processes. Entering the context waits until all are ready; leaving it ends them.

    Methods raise DemoError if a rank has ended or failed.

    Attributes:
        device: name of the device with the ranks' KV memory.
    """

    def __init__(self, setups: Sequence[RankSetup]) -> None:
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
                process = spawn.Process(target=run_rank, args=(theirs, setup), name=name)
                process.start()
                theirs.close()
                self._processes[ours] = process
            for pipe in self._processes:
                self.device = self._receive(pipe, START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def send_all(self, step: RankStep | None) -> None:
        """Send a step to every rank. None ends the ranks."""
        for pipe, process in self._processes.items():
            try:
                pipe.send(step)
            except OSError as error:
                raise _lost(process) from error

    def receive(self, seconds: float) -> list[RankReport]:
        """Return the ranks' reports; wait up to `seconds` for the first one."""
        readable = wait(list(self._processes), seconds)
        return [self._receive(pipe, 0) for pipe in self._processes if pipe in readable]

    def stop(self) -> int:
        """End all ranks; return the number of bytes changed where nothing may be written."""
        self.send_all(None)
        return sum(self._receive(pipe, END_SECONDS) for pipe in self._processes)

    def _receive(self, pipe: Connection, seconds: float) -> Any:
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
        end = time.monotonic() + END_SECONDS  # for all ranks together
        for process in self._processes.values():
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()


def _lost(process: BaseProcess) -> DemoError:
    process.join(1.0)
    return DemoError(f"{process.name} (pid {process.pid}) ended with status {process.exitcode}")
