"""The processes that a run starts: frozen, killed and replaced as the plan wants."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tests.chaos.shared import Count, Words, counts
from tests.chaos.specs import Spec

END_SECONDS = 20.0


class Freezer:
    """SIGSTOP and SIGCONT of any process, by pid; remembers who is frozen since when."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def stop(self, pid: int) -> None:
        """Freeze a process, if it is there."""
        now = time.monotonic()  # before, for this process may be kept from running after it
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self._since.setdefault(pid, now)

    def cont(self, pid: int, counters: Words | None = None) -> None:
        """Thaw it, after telling it for how long it was away."""
        since = self._since.pop(pid, None)
        if since is None:
            return
        if counters is not None:
            counters[Count.STOPPED_NS] += int((time.monotonic() - since) * 1e9)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def start_module(
    module: str,
    arguments: list[str],
    log: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> "subprocess.Popen[bytes]":
    """Run a Python module; the kernel ends it with this process."""
    tether = ["-m", "kvd_tools.demo.tether", str(os.getpid())]
    with log.open("ab") as sink:
        return subprocess.Popen(
            [sys.executable, *tether, module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=os.environ | environment,
            start_new_session=True,
        )


class Client:
    """A scheduler or a rank: one process after the other under the same name.

    Args:
        folder: of the run.
        runtime_dir: of the daemon as this engine sees it.
        spec: its engine.
        rank: None for the scheduler.
        seed: of its own choices.
    """

    def __init__(
        self, folder: Path, runtime_dir: Path, spec: Spec, rank: int | None, seed: int
    ) -> None:
        self.spec = spec
        self.rank = rank
        self.name = spec.name if rank is None else f"{spec.name}-{rank}"
        self.counters = counts(folder, self.name)
        self.log = folder / f"{self.name}.log"
        self._folder = folder
        self._runtime_dir = runtime_dir
        self._seed = seed
        self._process: subprocess.Popen[bytes] | None = None
        self.started = 0

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

    def start(self) -> None:
        """The next process; it ends with this one."""
        self.started += 1
        for word in (Count.ATTACHED, Count.RESTS):
            self.counters[word] = 0
        kind = "scheduler" if self.rank is None else "rank"
        arguments = [str(self._folder), str(self._runtime_dir), self.spec.name]
        arguments += [] if self.rank is None else [str(self.rank)]
        arguments += [str(self._seed + self.started)]
        self._process = start_module(f"tests.chaos.{kind}_process", arguments, self.log)

    def kill(self) -> None:
        """End it without asking."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_SECONDS)

    def finish(self) -> bool:
        """Wait for its end, which all were told; whether it came in time."""
        if self._process is None:
            return True
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True

    def __repr__(self) -> str:
        return f"<Client {self.name} {self.pid if self.running else 'not running'}>"
