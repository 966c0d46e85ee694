"""Messages between the broker and its publisher of KV events.

They travel as those between broker and lanes do; see `kvd.wire.link`. End of file tells the
publisher that the daemon has ended: it takes back what it has published.
"""

from kvd_proto.codec import Codec
from kvd_proto.messages import Count, KvEvents, Message, Name, NamespaceId, Text


class BeginPublisher(Message, frozen=True):
    """Broker → publisher, first. Carries the sockets that listen: for `events`, for `replay`.

    events: endpoint as ZeroMQ writes it.
    connects: connect to it; then there is no socket for it.
    replay: where requests for replay come; empty: nowhere, and there is no socket.
    note: path of the file that says what was published and not taken back.
    locality: of what lies in tiers, as events have it; None: they are of both kinds.
    """

    events: Text
    connects: bool
    replay: Text
    note: Text
    locality: Text | None


class PublishEngine(Message, frozen=True):
    """Broker → publisher: an engine is attached. Carries directory and descriptions, read-only."""

    engine: Name
    model: Text
    namespace: NamespaceId


class WithdrawEngine(Message, frozen=True):
    """Broker → publisher: an engine has left, or another namespace follows for it."""

    engine: Name


class PublisherReport(Message, frozen=True):
    """Publisher → broker, when it serves and once a second: alive, with what it has done.

    totals: since its start; the lag since its last report.
    subscriptions: that it has now.
    topics: that are open.
    """

    totals: KvEvents
    subscriptions: Count
    topics: Count


PUBLISHING = Codec(
    {
        0x201: BeginPublisher,
        0x202: PublishEngine,
        0x203: WithdrawEngine,
        0x204: PublisherReport,
    }
)
"""The codec of the publisher's link."""
