"""A lane's process: it opens device and socket, and serves."""

import ctypes
import os

from kvd.lane.devices.device import Device
from kvd.lane.devices.host import HostDevice
from kvd.lane.loop import LaneService
from kvd.lane.queue import Limits
from kvd.logs import configure
from kvd.machine.process import lock_pool, to_high_number
from kvd.wire.child_process import serve_broker
from kvd.wire.link import LINK, BeginLane, LaneFailed
from kvd_proto.channel import Channel
from kvd_proto.messages import HOST

# Of glibc's mallopt(3): from how many freed bytes on memory is given back to the kernel, and from
# which size on an allocation has a mapping of its own.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 32 * 2**20


def run(link_fd: int) -> int:
    """Serve until the broker is done; the exit status."""
    return serve_broker(link_fd, LINK, _open, lambda error: LaneFailed(error=error))


def _open(link: Channel, begin: BeginLane, fds: tuple[int, ...]) -> LaneService:
    """Open device and socket.

    Raises:
        KvdError, OSError: that cannot be done now.
    """
    name = f"lane {begin.device}#{begin.incarnation}"
    context = {"lane": begin.device, "incarnation": begin.incarnation}
    configure(begin.log_level, begin.log_style, name, **context)
    _keep_freed_memory()
    pool_fd, pin_lock = map(to_high_number, fds)
    lifeline = open_lifeline()
    lock_pool(pool_fd)
    service = LaneService(
        incarnation=begin.incarnation,
        endpoint=begin.endpoint,
        link=link,
        device=_device(begin, pool_fd, pin_lock),
        pool_bytes=begin.pool_bytes,
        lifeline=lifeline,
        limits=Limits(begin.max_queued_jobs, begin.max_queued_bytes),
    )
    os.close(pool_fd)
    return service


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
    moved = to_high_number(read_end)
    lower = os.dup(write_end)
    if lower > write_end:
        os.close(lower)
    else:
        os.close(write_end)
    return moved
