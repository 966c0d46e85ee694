"""A tier's process: it waits for its orders, opens its medium, and serves.

The broker starts it before there is a pool, so that the imports are done when there is one.
"""

import logging
import os
import socket
import sys

from kvd.config.tiers import parse_tier
from kvd.errors import KvdError
from kvd.logs import configure, fault_text
from kvd.machine.files import hold_pool, map_pool, move_up, raise_descriptor_limit
from kvd.tier.backends import backend, options_of
from kvd.tier.batches import TEXT_LIMIT
from kvd.tier.service import TierService
from kvd.wire.first_order import first_order
from kvd.wire.tiering import TIERING, BeginTier, TierFailed
from kvd_proto.channel import Channel
from kvd_proto.errors import ChannelFull, ProtoError

log = logging.getLogger("kvd.tier")
_SWITCH_SECONDS = 0.0005  # a thread that computes holds up the loop for as long


def run(link_fd: int) -> int:
    """Serve until the broker is done; the exit status."""
    try:
        link = Channel(socket.socket(fileno=link_fd))
        begin, (pool_fd,) = first_order(link, TIERING, BeginTier)
    except EOFError:  # the broker had no use for it
        return 0
    kind = begin.setting.partition(":")[0]
    name = f"tier {begin.index} ({kind})"
    configure(begin.log_level, begin.log_style, f"tier {kind}#{begin.index}", tier=begin.index)
    raise_descriptor_limit()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        service = _service(link, begin, pool_fd, name)
    except Exception as error:
        text = str(error)
        if not isinstance(error, KvdError | OSError):
            text = fault_text(error)
            log.exception("%s: a bug in the backend", name)
        try:  # for the broker's log and the report
            link.send(TIERING.encode(TierFailed(error=text[:TEXT_LIMIT])))
        except (EOFError, ChannelFull):
            log.error("%s does not start: %s", name, text)  # noqa: TRY400  # no bug: no traceback
        return 1
    try:
        service.run()
    except (KvdError, ProtoError):
        log.exception("%s ends", name)
        return 1
    return 0


def _service(link: Channel, begin: BeginTier, pool_fd: int, name: str) -> TierService:
    """Open the medium.

    Raises:
        KvdError: it cannot be used now, or what the operator wrote cannot work.
    """
    pool_fd = move_up(pool_fd)
    hold_pool(pool_fd)
    setting = parse_tier(begin.setting)
    pool = map_pool(pool_fd, begin.pool_bytes)
    os.close(pool_fd)
    kind = backend(setting)
    options = options_of(setting)
    kind.check(options)
    tier = kind.open(options, pool)
    log.info("%s: %s; %s", name, setting.text, tier.described)
    return TierService(link, tier, pool, name)
