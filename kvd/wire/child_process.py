"""The main function of lane and tier processes: wait for the first order, open, serve.

The broker may start a process before the pool exists, so that its imports are done by then.
"""

import logging
import select
import socket
from collections.abc import Callable
from typing import Any, Protocol

from kvd.errors import KvdError
from kvd.logs import safe_repr
from kvd.machine.process import open_files_remedy, raise_descriptor_limit
from kvd_proto.channel import Channel
from kvd_proto.codec import Codec
from kvd_proto.errors import ChannelFull, DescriptorsLost, ProtoError
from kvd_proto.messages import Message

log = logging.getLogger("kvd.wire")
_TEXT_LIMIT = 1000


class ChildService(Protocol):
    """The service of a child process."""

    def run(self) -> None:
        """Serve until the broker stops it."""


def serve_broker(
    link_fd: int,
    codec: Codec,
    open_service: Callable[[Channel, Any, tuple[int, ...]], ChildService],
    failure: Callable[[str], Message],
) -> int:
    """Serve the broker; return the exit status.

    1. Wait for the first order; exit with 0 if the broker closes the link instead.
    2. Call `open_service` with the link, the order and its descriptors.
    3. If that fails, send the broker `failure(why)` and exit with 1.
    4. Run the service.
    """
    try:
        link = Channel(socket.socket(fileno=link_fd))
        while (received := link.receive()) is None:
            if not link.more:
                select.select([link], [], [])
    except EOFError:
        return 0
    raise_descriptor_limit()
    try:
        service = open_service(link, codec.decode(received[0])[1], received[1])
    except Exception as error:
        text = str(error)
        if not isinstance(error, KvdError | OSError):
            text = safe_repr(error)
            log.exception("this process does not start: a bug in kvd")
        try:
            link.send(codec.encode(failure(text[:_TEXT_LIMIT])))
        except (EOFError, ChannelFull):
            log.error("this process does not start: %s", text)  # noqa: TRY400  # no bug: no traceback
        return 1
    try:
        service.run()
    except DescriptorsLost as error:
        log.error("this process ends: %s; %s", error, open_files_remedy())  # noqa: TRY400  # no bug
        return 1
    except (KvdError, ProtoError):
        log.exception("this process ends")
        return 1
    return 0
