"""The daemon of a run: one `kvd serve` after the other, with configurations that change."""

import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from kvd.errors import NotRunning
from kvd.wire.tool import Control
from kvd_proto.messages import Message, Status, StatusReport
from tests.chaos.children import start_module
from tests.chaos.place import Place

M = TypeVar("M", bound=Message)

STOP_SECONDS = 30.0
ASK_SECONDS = 10.0
NAP_SECONDS = 0.05

Config = Mapping[str, str]
USUAL: Config = {
    "cpu-bytes": "4MiB",
    "policy": "lru",
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
    {"cpu-bytes": "8MiB", "policy": "arc"},
    {"policy": "arc"},
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


class Daemon:
    """The daemon as a supervisor has it: there is one, or the next one is on its way.

    Args:
        place: of the run.
        environment: what its processes have beside this one's environment.
    """

    def __init__(self, place: Place, environment: Mapping[str, str]) -> None:
        self.config: Config = USUAL
        self.log = place.folder / "daemon.log"
        self.starts = 0
        self._place = place
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._ended_by_us = True

    @property
    def pid(self) -> int:
        """Of the broker that runs or has run last."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the broker has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self, change: Config | None = None) -> None:
        """The next daemon, with the usual configuration but for the change."""
        if change is not None:
            self.config = {**USUAL, **change}
        self.starts += 1
        self._ended_by_us = False
        arguments = ["serve"]
        for name, value in self.config.items():
            arguments += [f"--{name}", value]
        arguments += ["--runtime-dir", str(self._place.runtime_dir)]
        arguments += ["--pool-dir", str(self._place.pool_dir)]
        with self.log.open("ab") as sink:
            sink.write(f"--- start {self.starts}: {dict(self.config)}\n".encode())
        self._process = start_module("kvd", arguments, self.log, self._environment)

    def end(self, number: int) -> str:
        """Signal the broker and wait for its end; what was wrong with that, if anything was."""
        if self._process is None or not self.running:
            return ""
        self._ended_by_us = True
        self._process.send_signal(number)
        try:
            status = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
            return f"the daemon did not end within {STOP_SECONDS:g} s of signal {number}"
        if status == -number and (number == signal.SIGKILL or not self._serves()):
            return ""  # before it serves it has nothing to finish
        return f"the daemon ended with status {status}" if status else ""

    def _serves(self) -> bool:
        """Whether the last daemon has said that it serves."""
        return b"serving " in self.log.read_bytes().rpartition(b"--- start ")[2]

    def died(self) -> str:
        """What is wrong where the broker ended and nobody had asked for it."""
        if self._process is None or self.running or self._ended_by_us:
            return ""
        self._ended_by_us = True
        return f"the broker ended by itself, with status {self._process.returncode}"

    def refused_to_start(self) -> bool:
        """Whether the last daemon ended with status 1 before it served, with a reason."""
        return self._process is not None and self._process.returncode == 1 and not self._serves()

    def ask(self, message: Message, kind: type[M], seconds: float = ASK_SECONDS) -> M:
        """A request as an operator's tool makes it.

        Raises:
            NotRunning: no answer in time.
        """
        with Control(self._place.runtime_dir, seconds) as tool:
            return tool.ask(message, kind)

    def report(self) -> dict[str, Any]:
        """The status, or nothing where nobody answers."""
        try:
            return self.ask(Status(), StatusReport).status
        except NotRunning:
            return {}

    def lane_pids(self) -> list[int]:
        """Lanes that run now, found without asking anybody."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        try:
            return [pid for pid in map(int, children.read_text().split()) if _is_lane(pid)]
        except OSError:
            return []

    def wait_answer(self, seconds: float) -> bool:
        """Until it answers; whether it does in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.report():
                return True
            if not self.running:
                return False
            time.sleep(NAP_SECONDS)
        return False

    def __repr__(self) -> str:
        return f"<Daemon {self.starts}, {'running' if self.running else 'not running'}>"


def _is_lane(pid: int) -> bool:
    try:
        return b"kvd.lane" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
