"""The processes that a run starts: one after the other under a name."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil

from kvd.errors import NotRunning
from kvd.wire.tool import ToolConnection
from kvd_proto.messages import Message, Status, StatusReport
from tests.chaos.shared import Count, Spec, counts
from tests.processes import children_running

M = TypeVar("M", bound=Message)

END_SECONDS = 30.0
ASK_SECONDS = 30.0

Config = dict[str, str]
USUAL: Config = {
    "cpu-bytes": "4MiB",
    "policy": "adaptive",
    "keep-pool": "yes",
    "lease-seconds": "2",
    "ticket-seconds": "2",
    "lane-timeout-seconds": "2",
    "drain-seconds": "2",
    "http-listen": "off",
}


class Process:
    """A module that runs, has run or will run; the kernel ends it with this process."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, module: str, *arguments: str, **environment: str) -> None:
        """Start the next process."""
        self.starts += 1
        tether = ["-m", "kvd_tools.tether", str(os.getpid())]
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, *tether, module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=os.environ | environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the process that runs or has run last."""
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process is not None and self.process.poll() is None

    def end(self, number: int = 0) -> bool:
        """Signal it and wait for its end; whether that came in time, without SIGKILL."""
        if self.process is None or not self.running:
            return True
        self.process.send_signal(number)
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(END_SECONDS)
            return False
        return True

    @property
    def status(self) -> int | None:
        """With which status it ended."""
        return None if self.process is None else self.process.returncode


class Client(Process):
    """A scheduler, whose rank is None, or a rank."""

    def __init__(self, folder: Path, spec: Spec, rank: int | None, seed: int) -> None:
        self.name = spec.name if rank is None else f"{spec.name}-{rank}"
        super().__init__(folder / f"{self.name}.log")
        self.rank = rank
        self.counters = counts(folder, self.name)
        self._arguments = [str(folder), str(folder / "run"), spec.name]
        self._seed = seed

    def start(self) -> None:
        """The next process, with choices of its own."""
        self.counters[Count.ATTACHED] = self.counters[Count.RESTS] = 0
        rank = [] if self.rank is None else [str(self.rank)]
        seed = str(self._seed + self.starts + 1)
        self.launch("tests.chaos.client_process", *self._arguments, seed, *rank)


class Daemon(Process):
    """The daemon as a supervisor has it: there is one, or the next one is on its way."""

    def __init__(self, folder: Path, pool_dir: Path, environment: Mapping[str, str]) -> None:
        super().__init__(folder / "daemon.log")
        self.runtime_dir = folder / "run"
        self._config = USUAL
        self._places = {"runtime-dir": str(self.runtime_dir), "pool-dir": str(pool_dir)}
        self._environment = environment
        self._ended_by_us = True

    def start(self, change: Config | None = None, *flags: str) -> None:
        """The next daemon: as the last one, or as usual but for the change; with these flags."""
        if change is not None:
            self._config = USUAL | change
        self._ended_by_us = False
        with self.log.open("ab") as sink:
            sink.write(f"--- start {self.starts + 1}: {self._config}\n".encode())
        options = self._config | self._places
        arguments = [f"--{name}={value}" for name, value in options.items()]
        self.launch("kvd", "serve", *arguments, *flags, **self._environment)

    def finish(self, number: int) -> str:
        """End it by this signal; what was wrong with that, if anything was."""
        if not self.running:
            return ""
        self._ended_by_us = True
        if not self.end(number):
            return f"the daemon did not end within {END_SECONDS:g} s of signal {number}"
        if self.status == -number and (number == signal.SIGKILL or not self.serves):
            return ""  # before it serves it has nothing to finish
        return f"the daemon ended with status {self.status}" if self.status else ""

    @property
    def serves(self) -> bool:
        """Whether the last daemon has said that it serves."""
        return b"serving " in self.log.read_bytes().rpartition(b"--- start ")[2]

    def died(self, *, may_refuse: bool) -> str:
        """What is wrong where the broker ended and nobody had asked for it.

        Where it `may_refuse`, it may have ended with status 1 before it served.
        """
        if self.running or self._ended_by_us:
            return ""
        self._ended_by_us = True
        if may_refuse and self.status == 1 and not self.serves:
            return ""
        return f"the broker ended by itself, with status {self.status}"

    def ask(self, message: Message, kind: type[M]) -> M:
        """The reply to a request of an operator's tool.

        Raises:
            NotRunning: no answer in time.
        """
        with ToolConnection(self.runtime_dir, ASK_SECONDS) as tool:
            return tool.ask(message, kind)

    def report(self) -> dict[str, Any]:
        """The status, or nothing where nobody answers."""
        try:
            return self.ask(Status(), StatusReport).status
        except NotRunning:
            return {}

    def lane_pids(self) -> list[int]:
        """Lanes that run now, found without asking anybody."""
        try:
            lanes = children_running(self.pid, "kvd.lane") if self.running else []
        except psutil.Error:
            return []
        return [lane.pid for lane in lanes]
