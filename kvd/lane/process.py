"""A lane's process: it waits for its orders, opens device and socket, and serves.

The broker starts it before there is a pool, so that the imports are done when there is one.
"""

import ctypes
import logging
import os
import socket

from kvd.errors import KvdError
from kvd.lane.devices.device import Device
from kvd.lane.devices.host import HostDevice
from kvd.lane.loop import LaneService
from kvd.lane.queue import Limits
from kvd.lane.reports import TEXT_LIMIT
from kvd.logs import configure
from kvd.machine.files import hold_pool, move_up, raise_descriptor_limit
from kvd.wire.first_order import first_order
from kvd.wire.link import LINK, BeginLane, LaneFailed
from kvd_proto.channel import Channel
from kvd_proto.errors import ChannelFull
from kvd_proto.messages import HOST

log = logging.getLogger("kvd.lane")

# Of glibc's mallopt(3): from how many freed bytes on memory is given back to the kernel, and from
# which size on an allocation has a mapping of its own.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 32 * 2**20


def run(link_fd: int) -> int:
    """Serve until the broker is done; the exit status."""
    try:
        link = Channel(socket.socket(fileno=link_fd))
        begin, (pool_fd, pin_lock) = first_order(link, LINK, BeginLane)
    except EOFError:  # the broker had no use for it
        return 0
    name = f"lane {begin.device}#{begin.incarnation}"
    context = {"lane": begin.device, "incarnation": begin.incarnation}
    configure(begin.log_level, begin.log_style, name, **context)
    raise_descriptor_limit()
    _keep_freed_memory()
    try:
        pool_fd, pin_lock = move_up(pool_fd), move_up(pin_lock)
        lifeline = open_lifeline()
        hold_pool(pool_fd)
        service = LaneService(
            incarnation=begin.incarnation,
            endpoint=begin.endpoint,
            link=link,
            device=_device(begin, pool_fd, pin_lock),
            pool_bytes=begin.pool_bytes,
            lifeline=lifeline,
            limits=Limits(begin.max_queued_jobs, begin.max_queued_bytes),
        )
    except (KvdError, OSError) as error:
        try:  # for the broker's log and the workers that wait
            link.send(LINK.encode(LaneFailed(error=str(error)[:TEXT_LIMIT])))
        except (EOFError, ChannelFull):
            log.error("the lane does not start: %s", error)  # noqa: TRY400  # no bug: no traceback
        return 1
    os.close(pool_fd)
    try:
        service.run()
    except (KvdError, ChannelFull):
        log.exception("the lane ends")
        return 1
    return 0


def _keep_freed_memory() -> None:
    """Keep what large jobs free for those that follow.

    The tables of a job of 64,000 runs take some MiB. Given back to the kernel after each job, their
    pages cost a third of the lane's processor time (256 MiB jobs of 4 KiB fragments, both ways).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)


def _device(begin: BeginLane, pool_fd: int, pin_lock: int) -> Device:
    if begin.device == HOST:
        return HostDevice(pool_fd, begin.pool_bytes)
    # The host's lane needs no CUDA; a daemon without cuda-bindings has only that one.
    from kvd.lane.devices.cuda.backend import CudaDevice, show_slice  # noqa: PLC0415

    show_slice(begin.device)
    return CudaDevice(begin.device, pool_fd, begin.pool_bytes, pin_lock=pin_lock)


def open_lifeline() -> int:
    """Return the read end of the pipe by whose end of file workers know that this process is gone.

    Its write end stays open here alone, for life. The kernel lets go of a dying process's
    descriptors from the highest number down (seen by timing it), and a device's driver stops
    its copies when its own descriptors go. So the write end takes the lowest number that is
    free, before a device is opened, and nothing below it may be closed while the process lives.
    End of file then means that nothing of this process moves bytes any more.

    Raises:
        PoolError: no descriptor is left.
    """
    read_end, write_end = os.pipe()
    moved = move_up(read_end)
    lower = os.dup(write_end)
    if lower > write_end:
        os.close(lower)
    else:
        os.close(write_end)
    return moved
