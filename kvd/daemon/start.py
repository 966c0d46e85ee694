"""The start of a daemon, in the order in which it takes least time.

A lane's process has about as much to import as the broker. So it is started as soon as the
settings are good and the runtime directory is this daemon's, and only then does this process
import the broker's loop. What comes before that (this module, settings, the log, the command line)
imports neither numpy nor messages.
"""

import os
import select
import time
from dataclasses import dataclass
from pathlib import Path

from kvd.config.sources import Loaded, Sources
from kvd.daemon.allowed import AllowList
from kvd.daemon.lane_process import LaneProcess
from kvd.daemon.notify import Notifier
from kvd.daemon.runtime_dir import RuntimeDir

FIRST_LANES = ("host",)
"""Devices that are served from the start: HOST of kvd_proto.messages."""


@dataclass(frozen=True, slots=True)
class Begun:
    """What a daemon has before its loop is imported.

    lanes: their processes wait to be told what to serve.
    """

    allowed: AllowList
    notifier: Notifier
    runtime: RuntimeDir
    poller: select.epoll
    lanes: tuple[LaneProcess, ...]


def serve(loaded: Loaded, sources: Sources, version: str, *, cold: bool) -> int:
    """Run a daemon until a signal ends it; return the exit status.

    Args:
        loaded: the settings.
        sources: where they came from, to read them again.
        version: name and version of the daemon.
        cold: begin without the kept pool.

    Raises:
        KvdError: it cannot start, with the remedy.
    """
    settings = loaded.settings
    allowed = AllowList(settings.allow_users, settings.allow_groups)
    notifier = Notifier.from_environment(os.environ)
    runtime = RuntimeDir(Path(settings.runtime_dir))
    runtime.lock()
    poller = select.epoll()
    lanes = tuple(LaneProcess(device, poller) for device in FIRST_LANES)
    try:
        for lane in lanes:
            lane.spawn([], time.monotonic())
        from kvd.daemon.loop import Service  # noqa: PLC0415  # see above

        begun = Begun(allowed, notifier, runtime, poller, lanes)
        return Service(loaded, sources, version, begun, cold=cold).run()
    finally:
        for lane in lanes:  # of a start that failed
            lane.kill()
            lane.reap(time.monotonic())
