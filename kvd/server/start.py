"""The start of a daemon: the host's lane first, beside which the broker's loop is imported."""

import contextlib
import errno
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.config.sources import Loaded, Sources
from kvd.config.tiers import parse_tiers
from kvd.errors import KvdError
from kvd.machine.process import starting
from kvd.server.child import start_process
from kvd.server.runtime_dir import RuntimeDir

if TYPE_CHECKING:
    from kvd.broker.tiers.tier import Tier


def _tiers(texts: list[str]) -> "list[Tier]":
    """The tiers of the setting, which their backends have looked at."""
    if not texts:
        return []
    from kvd.broker.tiers.tier import tiers_of  # noqa: PLC0415
    from kvd.tier.backends import check_tiers  # noqa: PLC0415

    settings = parse_tiers(texts)
    kinds = zip(settings, check_tiers(settings), strict=True)
    return tiers_of((setting, kind.medium, kind.shared) for setting, kind in kinds)


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
    runtime = RuntimeDir(Path(settings.runtime_dir))
    first_lane = None
    try:
        runtime.lock()
        # It and the loop have about as much to import: side by side that takes half the time.
        # Where no daemon comes of it, it ends with this process.
        with contextlib.suppress(OSError):  # then it is tried again once there is a pool
            first_lane = start_process("kvd.lane")
        with starting():
            from kvd.server.loop import Service  # noqa: PLC0415

            service = Service(
                loaded,
                sources,
                version,
                runtime,
                first_lane,
                tiers=_tiers(settings.tier),
                cold=cold,
            )
    except OSError as error:
        if error.errno not in {errno.EMFILE, errno.ENFILE}:
            raise
        raise KvdError(
            f"no file can be opened ({error}); raise LimitNOFILE (ulimit -n) of kvd serve"
        ) from error
    return service.run()
