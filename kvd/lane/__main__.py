"""`python -m kvd.lane`: a lane process, started by the broker and by nobody else."""

import argparse
import ctypes
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from kvd.errors import KvdError
from kvd.lane.host import HostDevice
from kvd.lane.service import LaneService
from kvd.lane.sockets import Sockets
from kvd.seqpacket import Channel

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Serve until the broker is done; the exit status."""
    parser = argparse.ArgumentParser(prog="kvd.lane", description=__doc__)
    parser.add_argument("--device", required=True, choices=["host"])
    parser.add_argument("--incarnation", required=True, type=int)
    parser.add_argument("--runtime-dir", required=True, type=Path)
    parser.add_argument("--link-fd", required=True, type=int)
    parser.add_argument("--pool-fd", required=True, type=int)
    parser.add_argument("--pool-bytes", required=True, type=int)
    options = parser.parse_args()
    _die_with_the_broker()
    name = f"{options.device}#{options.incarnation}"
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s %(levelname)s lane {name}: %(message)s"
    )
    endpoint = f"ipc://{options.runtime_dir}/lane-{options.device}-{options.incarnation}.sock"
    try:
        service = LaneService(
            name=options.device,
            incarnation=options.incarnation,
            endpoint=endpoint,
            sockets=Sockets(endpoint, Channel(socket.socket(fileno=options.link_fd))),
            device=HostDevice(options.pool_fd, options.pool_bytes),
            pool_bytes=options.pool_bytes,
        )
        os.close(options.pool_fd)
        service.run()
    except KvdError:
        logging.getLogger(__name__).exception("the lane ends")
        return 1
    return 0


def _die_with_the_broker() -> None:
    """No lane outlives its broker, however that ends; and only the broker ends a lane.

    Signals that reach the whole process group or cgroup are for the broker,
    which lets its lanes finish what is queued.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
