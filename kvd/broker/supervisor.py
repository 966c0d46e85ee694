"""Lane processes: start, watch, end."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvd.link import lane_socket
from kvd.seqpacket import Channel

_FIRST_DELAY = 0.05
_LONGEST_DELAY = 5.0


class LaneProcess:
    """The process of one device's lane, restarted under a new incarnation when it ends.

    Restarts follow at once after a lane that had served; one that dies before
    it is ready is given growing pauses.

    Args:
        device: what it serves.
        runtime_dir: where its socket goes.
        incarnations: numbers that no lane of this daemon has had yet.
    """

    def __init__(self, device: str, runtime_dir: Path, incarnations: Iterator[int]) -> None:
        self.device = device
        self.incarnation = 0
        self._incarnations = incarnations
        self.channel: Channel | None = None
        self.lifeline = -1
        self.served = False
        self.start_at = 0.0
        self._delay = _FIRST_DELAY
        self._runtime_dir = runtime_dir
        self._process: subprocess.Popen[bytes] | None = None
        self.pidfd = -1

    @property
    def running(self) -> bool:
        """A process exists that has not been reaped."""
        return self._process is not None

    def start(self, pool_fd: int, pool_bytes: int) -> None:
        """Start the next incarnation.

        Raises:
            OSError: no process or descriptor is to be had now.
        """
        self.incarnation = next(self._incarnations)
        self.served = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            command = [sys.executable, "-m", "kvd.lane"]
            command += ["--device", self.device, "--incarnation", str(self.incarnation)]
            command += ["--runtime-dir", str(self._runtime_dir)]
            command += ["--link-fd", str(theirs.fileno())]
            command += ["--pool-fd", str(pool_fd), "--pool-bytes", str(pool_bytes)]
            self._process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(), pool_fd), stdin=subprocess.DEVNULL
            )
            undo.pop_all()
        self.channel = Channel(ours)
        self.pidfd = os.pidfd_open(self._process.pid)

    def kill(self) -> None:
        """End it without asking."""
        if self._process is not None:
            self._process.kill()

    def reap(self, now: float) -> str:
        """Collect the ended process; why it ended. Sets when the next may start."""
        if self._process is None:
            return ""
        code = self._process.wait()
        self._process = None
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        for name in ("pidfd", "lifeline"):
            fd = getattr(self, name)
            if fd >= 0:
                os.close(fd)
            setattr(self, name, -1)
        socket_path = self._runtime_dir / lane_socket(self.device, self.incarnation)
        with contextlib.suppress(FileNotFoundError):
            socket_path.unlink()
        self._delay = _FIRST_DELAY if self.served else min(2 * self._delay, _LONGEST_DELAY)
        self.start_at = now + (0.0 if self.served else self._delay)
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"

    def __repr__(self) -> str:
        state = f"pid {self._process.pid}" if self._process else "not running"
        return f"<LaneProcess {self.device}#{self.incarnation} {state}>"
