"""The main function of a tier's process: open the medium, then serve."""

import logging
import os
import sys

from kvd.config.values import parse_tier
from kvd.logs import configure
from kvd.machine.process import lock_pool, map_pool, to_high_number
from kvd.tier.backends import backend, options_of
from kvd.tier.service import TierService
from kvd.wire.child_process import serve_broker
from kvd.wire.tiering import TIERING, BeginTier, TierFailed
from kvd_proto.channel import Channel

log = logging.getLogger("kvd.tier")
_SWITCH_SECONDS = 0.0005  # a computing thread holds up the loop for so long


def run(link_fd: int) -> int:
    """Serve until the broker stops the process; return the exit status."""
    return serve_broker(link_fd, TIERING, _open, lambda error: TierFailed(error=error))


def _open(link: Channel, begin: BeginTier, fds: tuple[int, ...]) -> TierService:
    """Map the pool and open the medium; return the service.

    Raises:
        KvdError: the medium cannot be used now, or the setting is invalid.
    """
    kind = begin.setting.partition(":")[0]
    name = f"tier {begin.index} ({kind})"
    configure(begin.log_level, begin.log_style, f"tier {kind}#{begin.index}", tier=begin.index)
    sys.setswitchinterval(_SWITCH_SECONDS)
    pool_fd = to_high_number(fds[0])
    lock_pool(pool_fd)
    setting = parse_tier(begin.setting)
    pool = map_pool(pool_fd, begin.pool_bytes)
    os.close(pool_fd)
    implementation = backend(setting)
    options = options_of(setting)
    implementation.check(options)
    tier = implementation.open(options, pool)
    log.info("%s: %s; %s", name, setting.text, tier.described)
    return TierService(link, tier, pool, name)
