"""The life of a process that the broker has started: its orders, what it opens, its service.

The broker may start one before there is a pool, so that the imports are done when there is one.
"""

import logging
import select
import socket
from collections.abc import Callable
from typing import Any, Protocol

from kvd.errors import KvdError
from kvd.logs import fault_text
from kvd.machine.files import open_files_remedy, raise_descriptor_limit
from kvd_proto.channel import Channel
from kvd_proto.codec import Codec
from kvd_proto.errors import ChannelFull, DescriptorsLost, ProtoError
from kvd_proto.messages import Message

log = logging.getLogger("kvd.wire")
_TEXT_LIMIT = 1000


class Service(Protocol):
    """What serves the broker."""

    def run(self) -> None:
        """Serve until the broker is done."""


def serve_broker(
    link_fd: int,
    codec: Codec,
    open_service: Callable[[Channel, Any, tuple[int, ...]], Service],
    failure: Callable[[str], Message],
) -> int:
    """Serve until the broker is done; return the exit status.

    1. Wait for the first order. None comes where the broker ends, or has no use for the process.
    2. Have `open_service` do what it says, with the descriptors that it brings.
    3. Where that fails, tell the broker why with a `failure`, for its log and those who wait.
    4. Serve.
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
            text = fault_text(error)
            log.exception("it does not start: a bug")
        try:
            link.send(codec.encode(failure(text[:_TEXT_LIMIT])))
        except (EOFError, ChannelFull):
            log.error("it does not start: %s", text)  # noqa: TRY400  # no bug: no traceback
        return 1
    try:
        service.run()
    except DescriptorsLost as error:
        log.error("it ends: %s; %s", error, open_files_remedy())  # noqa: TRY400  # no bug
        return 1
    except (KvdError, ProtoError):
        log.exception("it ends")
        return 1
    return 0
