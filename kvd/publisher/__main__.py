"""`python -m kvd.publisher LINK_FD`: the publisher's process, which only the broker starts."""

import gc
import logging
import signal
import socket
import sys

import zmq

from kvd.logs.setup import configure_child
from kvd.machine.process import be_spared_last
from kvd.publisher.service import Service
from kvd.wire.first_order import first_order
from kvd.wire.publishing import PUBLISHING, BeginPublisher
from kvd.wire.seqpacket import Channel

log = logging.getLogger("kvd.publisher")
_NEVER = 2**31 - 1


def main() -> int:
    """Publish until the broker is done; the exit status."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        # They may reach the whole group; the link's end of file says when it is time to end.
        signal.signal(number, signal.SIG_IGN)
    be_spared_last()
    # What is known of 100,000 chunks takes a full collection a second, in which nothing is sent. It
    # has no cycles, and what has is found while it is young.
    gc.set_threshold(*gc.get_threshold()[:2], _NEVER)
    configure_child("publisher")
    link = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        begin, fds = first_order(link, PUBLISHING, BeginPublisher)
    except EOFError:  # the broker has just ended
        return 0
    try:
        service = Service(link, begin, fds)
    except (zmq.ZMQError, OSError) as error:
        log.error("KV events cannot be published on %s: %s", begin.events, error)  # noqa: TRY400  # the text has the reason
        return 1
    service.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
