"""Daemons that take over from each other while two engines store and load.

As in `tests.soak.restart_loop` each new daemon is held against the one before: every
chunk that was READY is a hit, under its generation, with its bytes, and nothing else
is one. Beside that, every call of the engines is timed against its deadline.
"""

import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

from kvd_client import Scheduler, Worker
from tests.daemon.serving import Daemon, StartDaemon, started_daemons
from tests.soak.restart_loop import PATIENCE, POOL, Client, Loop

STEPS = 40
REQUEST_SECONDS = 1.0  # the deadline of a scheduler's requests
JOB_SECONDS = 10.0  # what an engine here waits for its jobs
SLACK_SECONDS = 15.0  # a busy machine may keep a process from running for so long
_TIMED = {
    "lookup": REQUEST_SECONDS,
    "prepare_store": REQUEST_SECONDS,
    "complete_store": REQUEST_SECONDS,
    "prepare_load": REQUEST_SECONDS,
    "complete_load": REQUEST_SECONDS,
    "submit_store": REQUEST_SECONDS,
    "submit_load": REQUEST_SECONDS,
    "get_finished": REQUEST_SECONDS,
    "wait": JOB_SECONDS,
}


class Handovers(Loop):
    """The daemons, the engines, and how long their calls took.

    Attributes:
        statuses: exit statuses of those that left.
        calls: how many were made, by name.
        late: those that took longer than their deadline: name and seconds.
    """

    def __init__(self, start: StartDaemon, runtime_dir: Path, seed: int) -> None:
        super().__init__(start, runtime_dir, seed)
        self.statuses: list[int] = []
        self.calls: Counter[str] = Counter()
        self.late: list[tuple[str, float]] = []
        for client in self.clients:
            engine = client.engine
            engine.scheduler = cast("Scheduler", _Timed(self, engine.scheduler))
            for rank, worker in engine.workers.items():
                engine.workers[rank] = cast("Worker", _Timed(self, worker))

    def hand_over(self) -> None:
        """Work for a while; then a new daemon takes over, while the work goes on."""
        for _ in range(STEPS):
            self.step()
        successor = self.start("--keep-pool", "yes", "--handover", cpu_bytes=POOL, ready=False)
        end = time.monotonic() + PATIENCE
        while self.daemon.process.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError(successor.log.read_text())
            if "hands over" in successor.log.read_text():
                self.look_around()  # what is stored now is stored by the new daemon
            else:
                self.step()
        self.statuses.append(self.daemon.process.returncode)

        def met() -> Daemon:
            return successor

        self.meet(met)
        self.asking = False

    def look_around(self) -> None:
        """Load some keys, which may be a miss and never wrong."""
        client: Client = self.random.choice(self.clients)
        at = self.random.randrange(len(client.keys) - 4)
        self.load(client, client.keys[at : at + 4])


class _Timed:
    """Passes everything on, and notes how long calls take."""

    def __init__(self, loop: Handovers, inner: object) -> None:
        self._loop = loop
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in _TIMED:
            return found

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return found(*args, **kwargs)
            finally:
                took = time.monotonic() - began
                self._loop.calls[name] += 1
                if took > _TIMED[name] + SLACK_SECONDS:
                    self._loop.late.append((name, took))

        return timed


def run(handovers: int, seed: int | None = None) -> Handovers:
    """So many handovers in a row; what was seen."""
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    with tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp") as path:  # short
        runtime_dir = Path(path) / "run"
        with started_daemons(runtime_dir) as start:
            loop = Handovers(start, runtime_dir, seed)
            try:
                for _ in range(handovers):
                    loop.hand_over()
            finally:
                loop.close()
            return loop
