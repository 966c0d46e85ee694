"""This process's own figures, as the system has them."""

import contextlib
import os
import resource
import socket
import time
from dataclasses import replace
from pathlib import Path

from kvd.metrics.counts import ProcessUsage

_KEPT_SECONDS = 1.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class UsageReader:
    """Asks the system at most once a second: to count descriptors takes a while where many are."""

    def __init__(self) -> None:
        self._until = 0.0
        self._known = ProcessUsage(host=socket.gethostname())

    def read(self) -> ProcessUsage:
        """Return the time of now, and figures of now or of a second ago."""
        now = time.monotonic()
        if now >= self._until:
            self._until = now + _KEPT_SECONDS
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            with contextlib.suppress(OSError):
                # Where no descriptor is left to ask with, the figures stay.
                _, resident, *_ = Path("/proc/self/statm").read_bytes().split()
                self._known = replace(
                    self._known,
                    cpu_seconds=time.process_time(),
                    rss_bytes=int(resident) * _PAGE_BYTES,
                    open_fds=sum(1 for _ in Path("/proc/self/fd").iterdir())
                    - 1,  # less the asking one
                    max_fds=0 if most == resource.RLIM_INFINITY else most,
                )
        return replace(self._known, time=time.time())
