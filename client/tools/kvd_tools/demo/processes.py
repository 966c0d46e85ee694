"""The demo's processes: the daemon and the ranks. What is started here is ended here."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Self

from kvd_tools.demo.errors import DemoError, ProcessLost
from kvd_tools.demo.wire import (
    Command,
    Farewell,
    Finished,
    Ready,
    Reply,
    Setup,
    Stop,
    next_reply,
    send,
)

START_SECONDS = 60.0
LOOK_SECONDS = 0.2  # a daemon that ends at its start is noticed as soon
END_SECONDS = 10.0
LOG_TAIL_BYTES = 2000
SHARED_MEMORY = Path("/dev/shm")  # where a pool is memory, not disk


class Workplace:
    """A temporary directory for sockets, logs and the pool; gone with the context."""

    def __init__(self, pool_bytes: int) -> None:
        self._pool_bytes = pool_bytes

    def __enter__(self) -> Path:
        self._path = Path(tempfile.mkdtemp(prefix="kvd-demo-", dir=self._parent()))
        return self._path

    def _parent(self) -> Path | None:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(SHARED_MEMORY).free > self._pool_bytes and os.access(
                SHARED_MEMORY, os.W_OK
            ):
                return SHARED_MEMORY
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


class Process:
    """A subprocess with a log file, in a process group of its own; it never outlives this one.

    Ctrl-C at the terminal then reaches the parent alone, which ends the others in order.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], log: Path, pass_fds: Sequence[int] = ()
    ) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvd_tools.demo.tether", str(os.getpid())),
                    *arguments,
                ],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                pass_fds=pass_fds,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def lost(self, why: str) -> ProcessLost:
        """An error that says what happened, with the log's end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        status = self._process.poll()
        state = "is still running" if status is None else f"ended with status {status}"
        tail = self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return ProcessLost(f"{why}; {self.name} (pid {self.pid}) {state}. Its log:\n{tail}")

    def wait(self, seconds: float) -> None:
        """Wait for its end, which was asked for; kill it afterwards."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def end(self) -> None:
        """Ask it to end, wait, kill it where that takes too long. May be called again."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
        self.wait(END_SECONDS)

    def __repr__(self) -> str:
        return f"<Process {self.name} pid {self.pid}>"


class Daemon(Process):
    """A private `kvd serve`, ready when the context is entered."""

    def __init__(self, place: Path, cpu_bytes: int) -> None:
        self.runtime_dir = place / "run"
        arguments = ["kvd", "serve", "--runtime-dir", str(self.runtime_dir)]
        arguments += ["--cpu-bytes", str(cpu_bytes), "--pool-dir", str(place)]
        arguments += ["--keep-pool", "no"]  # it goes with the place
        arguments += ["--http-listen", "off"]  # several demos may run on one machine
        super().__init__("the daemon", arguments, place / "daemon.log")

    def __enter__(self) -> Self:
        try:
            if not self._becomes_ready():
                raise self.lost("the daemon did not become ready")
        except BaseException:
            self.end()
            raise
        return self

    def _becomes_ready(self) -> bool:
        """Wait until it is, or has ended."""
        arguments = ["--runtime-dir", str(self.runtime_dir), "--wait", str(START_SECONDS)]
        asking = subprocess.Popen(
            [sys.executable, "-m", "kvd", "status", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while self.running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return asking.wait(LOOK_SECONDS) == 0
            return False
        finally:
            asking.kill()
            asking.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


class Ranks:
    """The rank processes and the pipes to them; a rank ends when its pipe closes."""

    def __init__(self, place: Path, setups: Sequence[Setup]) -> None:
        self._place = place
        self._setups = setups
        self._processes: dict[Connection, Process] = {}
        self.device = ""

    def __len__(self) -> int:
        return len(self._setups)

    def __enter__(self) -> Self:
        try:
            for setup in self._setups:
                self._start(setup)
            for pipe in self._processes:
                reply = self._next(pipe, START_SECONDS)
                if not isinstance(reply, Ready):
                    raise DemoError(f"a rank said {reply!r} instead of being ready")
                self.device = reply.device
        except BaseException:
            self._end_all()
            raise
        return self

    def _start(self, setup: Setup) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = Process(
                f"rank {setup.rank}",
                ["kvd_tools.demo.rank", str(theirs.fileno())],
                self._place / f"rank-{setup.rank}.log",
                [theirs.fileno()],
            )
        pipe = Connection(ours.detach())
        self._processes[pipe] = process
        send(pipe, setup)

    def check_running(self) -> None:
        """Check that no rank has ended.

        Raises:
            ProcessLost: one has.
        """
        for process in self._processes.values():
            if not process.running:
                raise process.lost("a rank is gone")

    def send_all(self, command: Command) -> None:
        """The same command to every rank.

        Raises:
            ProcessLost: a rank is gone.
        """
        for pipe, process in self._processes.items():
            try:
                send(pipe, command)
            except ProcessLost as error:
                raise process.lost(str(error)) from error

    def receive(self, seconds: float) -> list[Finished]:
        """What the ranks report; waits for the first report, at most so long.

        Raises:
            ProcessLost: a rank is gone.
        """
        reports: list[Finished] = []
        for pipe in wait(list(self._processes), seconds):
            if isinstance(pipe, Connection):
                reply = self._next(pipe, 0)
                if not isinstance(reply, Finished):
                    raise DemoError(f"a rank said {reply!r} out of turn")
                reports.append(reply)
        return reports

    def stop(self) -> int:
        """End all ranks in order; how many bytes were changed where nothing may be written."""
        strayed = 0
        self.send_all(Stop())
        for pipe, process in self._processes.items():
            reply = self._next(pipe, END_SECONDS)
            if not isinstance(reply, Farewell):
                raise DemoError(f"a rank said {reply!r} instead of farewell")
            strayed += reply.strayed
            process.wait(END_SECONDS)
        return strayed

    def _next(self, pipe: Connection, seconds: float) -> Reply:
        try:
            if pipe.poll(seconds):
                return next_reply(pipe)
        except (EOFError, OSError) as error:
            raise self._processes[pipe].lost("a rank is gone") from error
        raise self._processes[pipe].lost(f"no answer within {seconds:g} s")

    def _end_all(self) -> None:
        for pipe in self._processes:
            pipe.close()
        for process in self._processes.values():
            process.end()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end_all()

    def __repr__(self) -> str:
        return f"<Ranks {len(self._processes)} of {len(self._setups)} started>"
