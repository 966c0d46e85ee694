"""The process of one device's lane, as it is started: before anybody knows what it is to do.

That it is told over its link. So those of the first lanes can be started before anything else of a
daemon is imported: what they import takes as long as what the broker does.
"""

import functools
import os
import select
import time
from typing import TYPE_CHECKING, NamedTuple

from kvd.server.child import ChildProcess

if TYPE_CHECKING:
    from pathlib import Path

FIRST_DEVICES = ("host",)
"""Devices that are served from the start: HOST of kvd_proto.messages."""


class LaneProcess(ChildProcess):
    """The process of one device's lane.

    Attributes:
        lifeline: a descriptor that reads end of file once nothing of the lane moves bytes.
        socket: where it serves workers; None until it has been told what to serve.
    """

    def __init__(self, device: str, poller: select.epoll) -> None:
        super().__init__("kvd.lane", f"lane {device}", poller)
        self.fields = {"lane": device}
        self.device = device
        self.lifeline = -1
        self.socket: Path | None = None

    def reap(self, now: float) -> str:
        """Also close its lifeline and remove its socket."""
        if self.socket is not None:
            self.socket.unlink(missing_ok=True)
            self.socket = None
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1
        return super().reap(now)


class FirstLanes(NamedTuple):
    """The lanes that a daemon has from its start, and where they are registered."""

    poller: select.epoll
    processes: tuple[LaneProcess, ...]


@functools.cache
def first_lanes() -> FirstLanes:
    """Start the processes of the first lanes, once in the life of this one; return them."""
    poller = select.epoll()
    processes = tuple(LaneProcess(device, poller) for device in FIRST_DEVICES)
    for process in processes:
        process.spawn([], time.monotonic())
    return FirstLanes(poller, processes)
