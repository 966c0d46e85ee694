"""`python -m kvd.lane`: a lane process, started by the broker and by nobody else."""

import argparse
import logging
import os
import socket
import sys
from pathlib import Path

from kvd.errors import ChannelFull, KvdError
from kvd.lane.devices.device import Device
from kvd.lane.devices.host import HostDevice
from kvd.lane.lifeline import hold_pool, move_up, open_lifeline
from kvd.lane.loop import LaneService
from kvd.lane.queue import Limits
from kvd.lane.reports import TEXT_LIMIT
from kvd.lane.sockets import Sockets
from kvd.logs.setup import configure_child
from kvd.machine.parent_death import tie_to_parent
from kvd.wire.link import LINK, LaneFailed, lane_socket
from kvd.wire.seqpacket import Channel
from kvd_proto.devices import HOST

log = logging.getLogger("kvd.lane")


def main() -> int:
    """Serve until the broker is done; the exit status."""
    parser = argparse.ArgumentParser(prog="kvd.lane", description=__doc__)
    parser.add_argument("--device", required=True, help="host, or cuda:<uuid>")
    parser.add_argument("--incarnation", required=True, type=int)
    parser.add_argument("--runtime-dir", required=True, type=Path)
    parser.add_argument("--link-fd", required=True, type=int)
    parser.add_argument("--pool-fd", required=True, type=int)
    parser.add_argument("--pool-bytes", required=True, type=int)
    parser.add_argument("--max-queued-jobs", type=int, default=Limits().jobs)
    parser.add_argument("--max-queued-bytes", type=int, default=Limits().nbytes)
    options = parser.parse_args()
    tie_to_parent()
    name = f"lane {options.device}#{options.incarnation}"
    configure_child(name, lane=options.device, incarnation=options.incarnation)
    endpoint = f"ipc://{options.runtime_dir / lane_socket(options.device, options.incarnation)}"
    link = Channel(socket.socket(fileno=options.link_fd))
    try:
        options.pool_fd = move_up(options.pool_fd)
        lifeline = open_lifeline()
        hold_pool(options.pool_fd)
        service = LaneService(
            name=options.device,
            incarnation=options.incarnation,
            endpoint=endpoint,
            sockets=Sockets(endpoint, link),
            device=_device(options),
            pool_bytes=options.pool_bytes,
            lifeline=lifeline,
            limits=Limits(options.max_queued_jobs, options.max_queued_bytes),
        )
    except (KvdError, OSError) as error:
        try:  # the broker says it, to the log and to the workers that wait
            link.send(LINK.encode(LaneFailed(error=str(error)[:TEXT_LIMIT])))
        except (EOFError, ChannelFull):
            log.error("the lane does not start: %s", error)  # noqa: TRY400  # the reason is said
        return 1
    os.close(options.pool_fd)
    try:
        service.run()
    except KvdError:
        log.exception("the lane ends")
        return 1
    return 0


def _device(options: argparse.Namespace) -> Device:
    if options.device == HOST:
        return HostDevice(options.pool_fd, options.pool_bytes)
    # The host's lane needs no CUDA; a daemon without cuda-bindings has only that one.
    from kvd.lane.devices.cuda.backend import CudaDevice, Options  # noqa: PLC0415
    from kvd.lane.devices.cuda.uuids import show_slice  # noqa: PLC0415

    show_slice(options.device)
    # Lanes that follow this one need not measure the device again.
    chosen = Options(state_dir=options.runtime_dir)
    return CudaDevice(options.device, options.pool_fd, options.pool_bytes, chosen)


if __name__ == "__main__":
    sys.exit(main())
