"""This process's own figures, as the system has them."""

import contextlib
import resource
import socket
import time

import psutil

from kvd.broker.measures import Surroundings

_KEPT_SECONDS = 1.0


class OwnFigures:
    """Asks the system at most once a second: to count descriptors takes a while where many are."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._until = 0.0
        self._host = socket.gethostname()
        self._known = Surroundings()

    def read(self, dropped_frames: int) -> Surroundings:
        """Time and figures of now, or of a second ago."""
        now = time.monotonic()
        if now >= self._until:
            self._until = now + _KEPT_SECONDS
            with contextlib.suppress(OSError, psutil.Error):  # no descriptor left to ask with
                self._known = self._ask()
        known = self._known
        return Surroundings(
            time=time.time(),
            host=self._host,
            cpu_seconds=known.cpu_seconds,
            rss_bytes=known.rss_bytes,
            open_fds=known.open_fds,
            max_fds=known.max_fds,
            dropped_frames=dropped_frames,
        )

    def _ask(self) -> Surroundings:
        with self._process.oneshot():
            times = self._process.cpu_times()
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return Surroundings(
                cpu_seconds=times.user + times.system,
                rss_bytes=self._process.memory_info().rss,
                open_fds=self._process.num_fds(),
                max_fds=0 if most == resource.RLIM_INFINITY else most,
            )

    def __repr__(self) -> str:
        return f"<OwnFigures {self._known}>"
