"""What the broker is told, in order; shares of several jobs with one wake-up.

To wake the broker costs more than a small copy, so under load the shares of jobs wait a
little for each other. Nothing is said that is newer than a share which still waits: what was
written comes before what is said of it.
"""

import time
from collections.abc import Iterable

from kvd.wire.link import LINK, ShareDone
from kvd.wire.seqpacket import Channel
from kvd_proto.messages import Message

SHARES_WAIT_SECONDS = 1e-3


class Outbox:
    """The lane's side of the link that speaks.

    Args:
        link: the broker.
    """

    def __init__(self, link: Channel) -> None:
        self._link = link
        self._shares: list[ShareDone] = []
        self._since = 0.0

    def tell(self, message: Message) -> None:
        """Say it, after what waits.

        Raises:
            ChannelFull: the broker does not read what it must know.
            EOFError: it is gone.
        """
        self.tell_shares()
        self._link.send(LINK.encode(message))

    def add(self, shares: Iterable[ShareDone]) -> None:
        """These may wait a little."""
        if not self._shares:
            self._since = time.monotonic()
        self._shares += shares

    def due(self, *, idle: bool) -> bool:
        """Whether what waits is to be told: there is nothing else to do, or it waited enough."""
        return idle or time.monotonic() - self._since >= SHARES_WAIT_SECONDS

    def tell_shares(self) -> None:
        """Say what waits.

        Raises:
            ChannelFull, EOFError: see `tell`.
        """
        shares, self._shares = self._shares, []
        for share in shares:
            self._link.send(LINK.encode(share))

    def __len__(self) -> int:
        return len(self._shares)

    def __repr__(self) -> str:
        return f"<Outbox {len(self)} shares wait>"
