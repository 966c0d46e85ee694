"""Daemons for tests, always ended."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvd.errors import NotRunning
from kvd.machine.memory import pool_directory_name
from kvd.wire.tool import ToolConnection
from tests.waiting import PATIENCE, PAUSE, eventually

# The Python of a machine with a GPU may have no click, and then there is no `kvd`.
SERVE = (
    ("-m", "kvd", "serve")
    if importlib.util.find_spec("click")
    else (str(Path(__file__).parents[1] / "gpu" / "serve.py"),)
)

DOUBLES = Path(__file__).parents[1] / "tier/doubles"


def finding_doubles() -> dict[str, str]:
    """The environment in which a process finds the tests' doubles of tiers: `--tier memory:…`."""
    paths = [os.environ.get("PYTHONPATH", ""), str(DOUBLES)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@dataclass
class Daemon:
    """One `kvd serve` process."""

    runtime_dir: Path
    process: subprocess.Popen[str]
    log: Path

    def status(self) -> dict[str, Any]:
        """Its status as soon as it has one; fails with its log otherwise."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                with ToolConnection(self.runtime_dir) as control:
                    return control.status()
            except NotRunning as error:
                if self.process.poll() is not None or time.monotonic() >= end:
                    raise AssertionError(f"{error}\n{self.log.read_text()}") from None
                time.sleep(PAUSE)

    def wait_ready(self) -> dict[str, Any]:
        """The status once ready; fails with the daemon's log otherwise."""
        end = time.monotonic() + PATIENCE
        while not (report := self.status())["ready"]:
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(PAUSE)
        return report

    def wait_log(self, text: str) -> str:
        """Its log, once it has this text; a thread writes it, after what it tells of."""
        return eventually(self.log.read_text, lambda log: text in log)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=PATIENCE)


StartDaemon = Callable[..., Daemon]


@contextmanager
def started_daemons(runtime_dir: Path) -> Iterator[StartDaemon]:
    """Starts daemons (by default in `runtime_dir`, 64 MiB) and ends them with the block.

    A lane that gets no processor for a while is not replaced, unless settings of `extra` say so.

    before: of the command, what starts it elsewhere and is the daemon's process in the end.
    """
    daemons: list[Daemon] = []

    def start(
        *extra: str,
        cpu_bytes: str = "64MiB",
        where: Path | None = None,
        ready: bool = True,
        before: Sequence[str] = (),
    ) -> Daemon:
        path = where or runtime_dir
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.parent / f"{path.name}-{len(daemons)}.log"
        command = [*before, sys.executable, *SERVE, "--runtime-dir", str(path)]
        command += ["--cpu-bytes", cpu_bytes, "--http-listen", "off", "--keep-pool", "no"]
        if "--config" not in extra:  # whose settings a flag would hide
            command += ["--lane-timeout-seconds", f"{PATIENCE:g}"]
        command += extra
        with log.open("w") as sink:
            process = subprocess.Popen(command, stderr=sink, text=True, env=finding_doubles())
        daemon = Daemon(path, process, log)
        daemons.append(daemon)
        if ready:
            daemon.wait_ready()
        return daemon

    try:
        yield start
    finally:
        for daemon in daemons:
            if daemon.process.poll() is None:
                daemon.process.kill()
        for daemon in daemons:
            daemon.process.wait(timeout=PATIENCE)
        for daemon in daemons:  # several may share a place: now nobody writes there
            for place in Path("/dev/shm").glob(f"{pool_directory_name(daemon.runtime_dir)}*"):
                shutil.rmtree(place)


@contextmanager
def daemon_left_clean(*extra: str, cpu_bytes: str = "64MiB") -> Iterator[Daemon]:
    """A daemon that many tests share; fails at its end if one of them has left something there."""
    with (
        tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp") as path,
        started_daemons(Path(path) / "run") as start,
    ):
        daemon = start(*extra, cpu_bytes=cpu_bytes)
        yield daemon
        eventually(lambda: _left_behind(daemon), lambda left: left == {})


def left_over(report: dict[str, Any]) -> dict[str, int]:
    """What a daemon at rest does not have: chunks by state, leases, jobs."""
    left = Counter(leases=report["leases"])
    for namespace in report["namespaces"]:
        chunks = namespace["chunks"]
        left.update({name: chunks[name] for name in ("pinned", "doomed", "writing", "draining")})
    for lane in report["lanes"]:
        left.update({name: lane[name] for name in ("queued_jobs", "bytes_in_flight")})
    return {name: value for name, value in left.items() if value}


def _left_behind(daemon: Daemon) -> dict[str, object]:
    """What a daemon that is not used does not have."""
    report = daemon.status()
    left: dict[str, object] = {
        **left_over(report),
        "not ready": [check for check in report["checks"] if not check["ok"]],
        "engines": report["engines"],
        # This question's is one, the HTTP process may have another.
        "sessions": max(0, report["sessions"]["open"] - 2),
        "lanes lost": sum(lane["counters"]["restarts"] for lane in report["lanes"]),
    }
    return {name: value for name, value in left.items() if value}


def wait_state(daemon: Daemon, **chunks: int) -> dict[str, int]:
    """Ask until the namespace's chunks by state are as given."""
    return eventually(
        lambda: daemon.status()["namespaces"][0]["chunks"],
        lambda states: all(states[name] == value for name, value in chunks.items()),
    )


def run_kvd(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The `kvd` command, to its end: in this process and with patience, but for `serve`."""
    from click.testing import CliRunner  # noqa: PLC0415  # see SERVE

    from kvd.cli import cli  # noqa: PLC0415
    from tests.processes import python  # noqa: PLC0415

    if arguments[0] != "serve":
        with (
            patch.object(ToolConnection.__init__, "__defaults__", (PATIENCE,)),
            patch("kvd.cli.top._ANSWER_SECONDS", PATIENCE),
        ):
            done = CliRunner().invoke(cli, arguments, prog_name="kvd")
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)
    return python("-m", "kvd", *arguments)
