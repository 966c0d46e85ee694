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
CHANGES: tuple[Config, ...] = (
    {},
    {"cpu-bytes": "3MiB"},
    {"cpu-bytes": "8MiB", "policy": "lru"},
    {"policy": "lru"},
    {"keep-pool": "no"},
    {"lease-seconds": "1", "ticket-seconds": "0.5"},
    {"max-queued-jobs": "2"},
    {"max-queued-bytes": "128KiB"},
    {"reuse-threshold": "2"},
    {"max-leases": "3"},
    {"max-sessions": "12"},
    {"max-namespaces": "2"},
    {"log-level": "debug", "log-format": "json"},
    {"share-between-users": "no"},
)
"""What a restart may change of the usual configuration."""


class Process:
    """A module that runs, has run or will run; the kernel ends it with this process."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, module: str, *arguments: str, **environment: str) -> None:
        """Start the next process."""
        self.starts += 1
        tether = ["-m", "kvd_tools.tether", str(os.getpid())]
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
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
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int | None:
        """With which status it ended."""
        return None if self._process is None else self._process.returncode

    def end(self, number: int = 0) -> bool:
        """Signal it and wait for its end; whether that came in time, without SIGKILL."""
        if self._process is None or not self.running:
            return True
        self._process.send_signal(number)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_SECONDS)
            return False
        return True


class Client(Process):
    """A scheduler or a rank.

    Args:
        folder: of the run.
        spec: its engine.
        rank: None for the scheduler.
        seed: of its own choices.
    """

    def __init__(self, folder: Path, spec: Spec, rank: int | None, seed: int) -> None:
        self.name = spec.name if rank is None else f"{spec.name}-{rank}"
        super().__init__(folder / f"{self.name}.log")
        self.rank = rank
        self.counters = counts(folder, self.name)
        self._arguments = [str(folder), str(folder / "run"), spec.name]
        self._seed = seed

    def start(self) -> None:
        """The next process."""
        for word in (Count.ATTACHED, Count.RESTS):
            self.counters[word] = 0
        rank = [] if self.rank is None else [str(self.rank)]
        seed = str(self._seed + self.starts + 1)
        self.launch("tests.chaos.client_process", *self._arguments, seed, *rank)


class Daemon(Process):
    """The daemon as a supervisor has it: there is one, or the next one is on its way.

    Args:
        folder: of the run.
        pool_dir: of its pool.
        environment: what its processes have beside this one's environment.
    """

    def __init__(self, folder: Path, pool_dir: Path, environment: Mapping[str, str]) -> None:
        super().__init__(folder / "daemon.log")
        self.config: Config = USUAL
        self.runtime_dir = folder / "run"
        self._pool_dir = pool_dir
        self._environment = environment
        self._ended_by_us = True

    def start(self, change: Config | None = None, *flags: str) -> None:
        """The next daemon, with the usual configuration but for the change, and these flags."""
        if change is not None:
            self.config = {**USUAL, **change}
        self._ended_by_us = False
        options = self.config | {
            "runtime-dir": str(self.runtime_dir),
            "pool-dir": str(self._pool_dir),
        }
        with self.log.open("ab") as sink:
            sink.write(f"--- start {self.starts + 1}: {self.config}\n".encode())
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
        if self._process is None or self.running or self._ended_by_us:
            return ""
        self._ended_by_us = True
        if may_refuse and self.status == 1 and not self.serves:
            return ""
        return f"the broker ended by itself, with status {self.status}"

    def ask(self, message: Message, kind: type[M]) -> M:
        """A request as an operator's tool makes it.

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
            children = psutil.Process(self.pid).children()
            return [child.pid for child in children if "kvd.lane" in child.cmdline()]
        except psutil.Error:
            return []
