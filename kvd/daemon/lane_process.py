"""The process of one device's lane, as the broker starts it: before it knows what to do."""

import os
import select
from pathlib import Path

from kvd.daemon.child import ChildProcess


class LaneProcess(ChildProcess):
    """The process of one device's lane.

    Attributes:
        begun: the process that runs has been told what to serve.
        lifeline: a descriptor that reads end of file once nothing of the lane moves bytes.
        socket: where it serves workers.
    """

    def __init__(self, device: str, poller: select.epoll) -> None:
        super().__init__("kvd.lane", f"lane {device}", poller)
        self.fields = {"lane": device}
        self.device = device
        self.begun = False
        self.lifeline = -1
        self.socket = Path()

    def reap(self, now: float) -> str:
        """Also close its lifeline and remove its socket."""
        if self.begun:
            self.socket.unlink(missing_ok=True)
            self.begun = False
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1
        return super().reap(now)
