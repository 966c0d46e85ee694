"""The demo's processes: the daemon and the ranks. What is started here is ended here."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Self, TypeVar

from kvd_client.scheduler import Scheduler
from kvd_tools.demo import rank
from kvd_tools.errors import DemoError, ProcessLost

START_SECONDS = 60.0
END_SECONDS = 10.0
LOOK_SECONDS = 0.05
LOG_TAIL_BYTES = 2000
SHARED_MEMORY = Path("/dev/shm")  # where a pool is memory, not disk

R = TypeVar("R", rank.Ready, rank.Finished, rank.Stopped)


@contextmanager
def workplace(pool_bytes: int) -> Iterator[Path]:
    """A temporary directory for sockets, logs and the pool; removed with the context."""
    parent = None
    with contextlib.suppress(OSError):
        room = shutil.disk_usage(SHARED_MEMORY).free > pool_bytes
        parent = SHARED_MEMORY if room and os.access(SHARED_MEMORY, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="kvd-demo-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Daemon:
    """A private `kvd serve`, ready when the context is entered; it never outlives this process.

    It has a process group of its own: Ctrl-C at the terminal reaches the parent alone, which
    ends it in order.
    """

    def __init__(self, place: Path, cpu_bytes: int) -> None:
        self.runtime_dir = place / "run"
        self._log = place / "daemon.log"
        command = [sys.executable, "-m", "kvd_tools.demo.tether", str(os.getpid())]
        command += ["kvd", "serve", "--runtime-dir", str(self.runtime_dir)]
        command += ["--cpu-bytes", str(cpu_bytes), "--pool-dir", str(place)]
        command += ["--keep-pool", "no"]  # it goes with the place
        command += ["--http-listen", "off"]  # several demos may run on one machine
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        try:
            if not self._becomes_ready():
                raise self.lost("the daemon did not become ready")
        except BaseException:
            self.end()
            raise
        return self

    def _becomes_ready(self) -> bool:
        end = time.monotonic() + START_SECONDS
        with Scheduler(self.runtime_dir, "demo-start") as asking:
            while self.running and time.monotonic() < end:
                if asking.status().get("ready"):
                    return True
                time.sleep(LOOK_SECONDS)
        return False

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def lost(self, why: str) -> ProcessLost:
        """Return an error that says what happened, with the log's end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        status = self._process.poll()
        state = "is still running" if status is None else f"ended with status {status}"
        tail = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return ProcessLost(f"{why}; the daemon (pid {self._process.pid}) {state}. Its log:\n{tail}")

    def end(self) -> None:
        """Ask it to end, wait, and kill it where that takes too long."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __exit__(self, *_: object) -> None:
        self.end()

    def __repr__(self) -> str:
        return f"<Daemon pid {self._process.pid}>"


class Ranks:
    """The rank processes and the pipes to them; all are ready when the context is entered."""

    def __init__(self, setups: Sequence[rank.Setup]) -> None:
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
                process = spawn.Process(target=rank.run, args=(theirs, setup), name=name)
                process.start()
                theirs.close()
                self._processes[ours] = process
            for pipe in self._processes:
                self.device = self._next(pipe, rank.Ready, START_SECONDS).device
        except BaseException:
            self._end()
            raise
        return self

    def check_running(self) -> None:
        """Raise ProcessLost if a rank has ended."""
        for process in self._processes.values():
            if not process.is_alive():
                raise _lost(process)

    def send_all(self, command: rank.Compute | rank.Transfer | None) -> None:
        """Send a command to every rank; None ends it.

        Raises:
            ProcessLost: a rank is gone.
        """
        for pipe, process in self._processes.items():
            try:
                pipe.send(command)
            except OSError as error:
                raise _lost(process) from error

    def receive(self, seconds: float) -> list[rank.Finished]:
        """Return what the ranks report; wait for the first report, at most so long.

        Raises:
            ProcessLost: a rank is gone.
        """
        there = wait(list(self._processes), seconds)
        return [self._next(pipe, rank.Finished, 0) for pipe in self._processes if pipe in there]

    def stop(self) -> int:
        """End all ranks; return how many bytes changed where nothing may be written."""
        self.send_all(None)
        return sum(self._next(pipe, rank.Stopped, END_SECONDS).strayed for pipe in self._processes)

    def _next(self, pipe: Connection, kind: type[R], seconds: float) -> R:
        process = self._processes[pipe]
        try:
            if not pipe.poll(seconds):
                raise ProcessLost(f"{process.name}: no answer within {seconds:g} s")
            reply = pipe.recv()
        except (EOFError, OSError) as error:
            raise _lost(process) from error
        if not isinstance(reply, kind):
            raise DemoError(f"{process.name}: {reply}")
        return reply

    def _end(self) -> None:
        for pipe in self._processes:
            pipe.close()
        for process in self._processes.values():
            process.join(END_SECONDS)
            process.kill()
            process.join()

    def __exit__(self, *_: object) -> None:
        self._end()

    def __repr__(self) -> str:
        return f"<Ranks {len(self._processes)} of {len(self._setups)} started>"


def _lost(process: BaseProcess) -> ProcessLost:
    process.join(1.0)
    return ProcessLost(f"{process.name} (pid {process.pid}) ended with status {process.exitcode}")
