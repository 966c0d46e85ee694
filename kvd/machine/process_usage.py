"""This process's own figures, as the system has them."""

import contextlib
import resource
import socket
import time
from dataclasses import replace

import psutil

from kvd.metrics.counts import ProcessUsage

_KEPT_SECONDS = 1.0


class UsageReader:
    """Asks the system at most once a second: to count descriptors takes a while where many are."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._until = 0.0
        self._known = ProcessUsage(host=socket.gethostname())

    def read(self) -> ProcessUsage:
        """Return the time of now, and figures of now or of a second ago."""
        now = time.monotonic()
        if now >= self._until:
            self._until = now + _KEPT_SECONDS
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            with contextlib.suppress(OSError, psutil.Error), self._process.oneshot():
                # Where no descriptor is left to ask with, the figures stay.
                times = self._process.cpu_times()
                self._known = replace(
                    self._known,
                    cpu_seconds=times.user + times.system,
                    rss_bytes=self._process.memory_info().rss,
                    open_fds=self._process.num_fds(),
                    max_fds=0 if most == resource.RLIM_INFINITY else most,
                )
        return replace(self._known, time=time.time())
