"""The broker process: sockets, descriptors and child processes around `kvd.broker`.

`serve` runs a daemon. This module stays cheap to import: the host lane starts before the loop is
imported.
"""

import contextlib
import errno
from pathlib import Path

from kvd.config.sources import LoadedSettings, Sources
from kvd.doctor.start import StartFacts, check_start
from kvd.errors import KvdError
from kvd.machine.process import gc_paused
from kvd.server.child import start_process
from kvd.server.runtime_dir import RuntimeDir


def serve(loaded: LoadedSettings, sources: Sources, version: str, *, cold: bool) -> int:
    """Run a daemon until a signal ends it; return the exit status.

    1. Lock the runtime directory; wait for a previous daemon that is just ending.
    2. Check settings and machine, as `kvd doctor` does.
    3. Start the host lane, then import and run the broker's loop.

    Args:
        loaded: the settings.
        sources: where the settings came from, to reload them.
        version: name and version of the daemon.
        cold: begin without the kept pool.

    Raises:
        KvdError: the daemon cannot start; names the remedy.
    """
    first_lane = None
    runtime = RuntimeDir(Path(loaded.settings.runtime_dir))
    try:
        runtime.lock()
        warnings = check_start(StartFacts(loaded.settings, loaded.warnings))
        # The lane and the loop import about as much: in parallel that takes half the time.
        # If the daemon fails to start, the lane's process exits with this one.
        with contextlib.suppress(OSError):  # retried once there is a pool
            first_lane = start_process("kvd.lane")
        with gc_paused():
            from kvd.server.loop import BrokerService  # noqa: PLC0415

            service = BrokerService(loaded, sources, version, runtime, first_lane, cold=cold)
            service.warn(warnings)
    except KvdError:
        runtime.release()
        raise
    except OSError as error:
        runtime.release()
        if error.errno not in {errno.EMFILE, errno.ENFILE}:
            raise
        raise KvdError(
            f"no file can be opened ({error})", "raise LimitNOFILE (ulimit -n) of kvd serve"
        ) from error
    return service.run()
