"""CUDA lanes of daemons on the test driver: their switches and calls, their status."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Daemon, StartDaemon
from tests.daemon.cuda_engine import lane_of
from tests.fakecuda.harness import calls, write_control
from tests.waiting import eventually


@dataclass(frozen=True)
class Lanes:
    """Daemons whose lanes obey switches of the test driver, and the calls that these made."""

    start_daemon: StartDaemon
    control: Path
    log: Path

    def start(self, *flags: str, **settings: Any) -> Daemon:
        """A daemon; of the switches, ranks see nothing."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FAKECUDA_CONTROL", str(self.control))
            patch.setenv("FAKECUDA_LOG", str(self.log))
            return self.start_daemon(*flags, **settings)

    def switch(self, text: str) -> None:
        """A line of `key=value`; read before the lane's next call of the driver."""
        write_control(self.control, text)

    def wait_hanging(self) -> None:
        """Until a call of the driver hangs."""
        eventually(lambda: "@hang" in calls(self.log))


def cuda_lanes(daemon: Daemon) -> list[dict[str, Any]]:
    """The status of the CUDA lanes."""
    return [lane for lane in daemon.status()["lanes"] if lane["device"] != "host"]


def wait_next_lane(daemon: Daemon, pid: int, workers: int) -> None:
    """Until another CUDA lane than that of this pid has so many workers."""
    eventually(
        lambda: lane_of(daemon), lambda lane: lane["pid"] != pid and lane["workers"] == workers
    )


def in_copy(daemon: Daemon, nbytes: int = 1) -> None:
    """Until the CUDA lane has so many bytes in flight."""
    eventually(lambda: lane_of(daemon)["bytes_in_flight"], lambda found: found >= nbytes)


def holders(files: set[int]) -> set[str]:
    """Processes that have one of these files open or mapped, by their commands."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            mapped = {int(line.split()[4]) for line in (process / "maps").read_text().splitlines()}
            if not files.isdisjoint(mapped | inodes(process)):
                found.add((process / "cmdline").read_text())
    return found


def inodes(process: Path) -> set[int]:
    """Of the files that a process has open."""
    found = set()
    for entry in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(entry.stat().st_ino)
    return found
