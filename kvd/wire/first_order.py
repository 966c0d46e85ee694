"""The broker's first order to a process that it has started: what it is to do."""

import select
from typing import TypeVar

from kvd_proto.channel import Channel
from kvd_proto.codec import Codec

Order = TypeVar("Order")


def first_order(link: Channel, codec: Codec, kind: type[Order]) -> tuple[Order, tuple[int, ...]]:
    """Wait for it. Returns the order and the descriptors that it carries, which are the caller's.

    Raises:
        EOFError: the broker has ended, or has no use for the process any more.
        TypeError: it is another order: a bug in kvd.
    """
    while (received := link.receive()) is None:
        if not link.more:
            select.select([link], [], [])
    _, order = codec.decode(received[0])
    if not isinstance(order, kind):
        raise TypeError(f"{type(order).__name__} came before {kind.__name__}")
    return order, received[1]
