"""The start of a daemon: what must come before the broker's loop is imported, and the loop.

The first lanes' processes were started before (see kvd.__main__), and import beside this one.
"""

import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.config.sources import Loaded, Sources
from kvd.config.tiers import parse_tiers
from kvd.errors import KvdError
from kvd.machine.process import starting
from kvd.server.lane_process import FirstLanes, first_lanes
from kvd.server.notify import Notifier
from kvd.server.runtime_dir import AllowList, RuntimeDir

if TYPE_CHECKING:
    from kvd.broker.tiers.tier import Tier


@dataclass(frozen=True, slots=True)
class Begun:
    """What a daemon has before its loop is imported."""

    allowed: AllowList
    notifier: Notifier
    runtime: RuntimeDir
    first: FirstLanes


def _tiers(texts: list[str]) -> "list[Tier]":
    """The tiers of the setting, which their backends have looked at."""
    if not texts:
        return []
    from kvd.broker.tiers.tier import tiers_of  # noqa: PLC0415
    from kvd.tier.backends import backend, check_tiers  # noqa: PLC0415

    settings = parse_tiers(texts)
    check_tiers(settings)
    found = [(setting, backend(setting)) for setting in settings]
    return tiers_of((setting, kind.medium, kind.shared) for setting, kind in found)


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
    first = first_lanes()
    try:
        allowed = AllowList(settings.allow_users, settings.allow_groups)
        notifier = Notifier.from_environment(os.environ)
        runtime = RuntimeDir(Path(settings.runtime_dir))
        runtime.lock()  # before what takes longer: who comes second learns it at once
        begun = Begun(allowed, notifier, runtime, first)
        with starting():
            from kvd.server.loop import Service  # noqa: PLC0415
            from kvd.server.pool_files import remember_pool_dir  # noqa: PLC0415

            remember_pool_dir(runtime.path, Path(settings.pool_dir))
            service = Service(
                loaded, sources, version, begun, tiers=_tiers(settings.tier), cold=cold
            )
    except OSError as error:
        if error.errno not in {errno.EMFILE, errno.ENFILE}:
            raise
        raise KvdError(
            f"no file can be opened ({error}); raise LimitNOFILE (ulimit -n) of kvd serve"
        ) from error
    else:
        return service.run()
    finally:
        for process in first.processes:  # of a start that failed
            process.kill()
            process.reap(time.monotonic())
