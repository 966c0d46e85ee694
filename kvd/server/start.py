"""The start of a daemon: the host's lane first, beside which the broker's loop is imported."""

import contextlib
import errno
from pathlib import Path

from kvd.config.sources import Loaded, Sources
from kvd.errors import KvdError
from kvd.machine.process import starting
from kvd.server.child import start_process
from kvd.server.runtime_dir import RuntimeDir


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
    first_lane = None
    try:
        runtime = RuntimeDir(Path(loaded.settings.runtime_dir))
        runtime.lock()
        # It and the loop have about as much to import: side by side that takes half the time.
        # Where no daemon comes of it, it ends with this process.
        with contextlib.suppress(OSError):  # then it is tried again once there is a pool
            first_lane = start_process("kvd.lane")
        with starting():
            from kvd.server.loop import Service  # noqa: PLC0415

            service = Service(loaded, sources, version, runtime, first_lane, cold=cold)
    except OSError as error:
        if error.errno not in {errno.EMFILE, errno.ENFILE}:
            raise
        raise KvdError(
            f"no file can be opened ({error}); raise LimitNOFILE (ulimit -n) of kvd serve"
        ) from error
    return service.run()
