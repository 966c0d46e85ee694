"""Lane processes: start, watch, end."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from kvd.config.settings import Settings
from kvd.daemon.child import ChildProcess
from kvd.wire.link import lane_socket
from kvd.wire.seqpacket import Channel


class LaneProcess(ChildProcess):
    """The process of one device's lane, restarted under a new incarnation when it ends.

    Restarts follow at once after a lane that had served; one that dies before
    it is ready is given growing pauses.

    Args:
        device: what it serves.
        runtime_dir: where its socket goes.
        incarnations: numbers that no lane of this daemon has had yet.
        settings: of the daemon, for the lane's limits.
    """

    def __init__(
        self, device: str, runtime_dir: Path, incarnations: Iterator[int], settings: Settings
    ) -> None:
        super().__init__("kvd.lane")
        self.device = device
        self.incarnation = 0
        self._incarnations = incarnations
        self.channel: Channel | None = None
        self.lifeline = -1
        self._runtime_dir = runtime_dir
        self._limits = [
            *("--max-queued-jobs", str(settings.max_queued_jobs)),
            *("--max-queued-bytes", str(settings.queued_bytes)),
        ]

    def start(self, pool_fd: int, pool_bytes: int) -> None:
        """Start the next incarnation.

        Raises:
            OSError: no process or descriptor is to be had now.
        """
        self.incarnation = next(self._incarnations)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            arguments = ["--device", self.device, "--incarnation", str(self.incarnation)]
            arguments += ["--runtime-dir", str(self._runtime_dir)]
            arguments += ["--link-fd", str(theirs.fileno())]
            arguments += ["--pool-fd", str(pool_fd), "--pool-bytes", str(pool_bytes)]
            arguments += self._limits
            self.spawn(arguments, (theirs.fileno(), pool_fd), {})
            undo.pop_all()
        self.channel = Channel(ours)

    def reap(self, now: float) -> str:
        """Collect the ended process; why it ended. Sets when the next may start."""
        if not self.running:
            return ""
        reason = super().reap(now)
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1
        socket_path = self._runtime_dir / lane_socket(self.device, self.incarnation)
        with contextlib.suppress(FileNotFoundError):
            socket_path.unlink()
        return reason

    def __repr__(self) -> str:
        state = f"pid {self._process.pid}" if self._process else "not running"
        return f"<LaneProcess {self.device}#{self.incarnation} {state}>"
