"""What the daemon's publisher of KV events is told: which engines are attached, and to what."""

from typing import Any

from kvd.broker.broker import Broker
from kvd.broker.effects import Effect, Event, NamespaceFds, Notify, ToPublisher
from kvd.broker.kv_events import Publisher
from kvd.broker.publishing import Publishing
from kvd.broker.sessions import Session
from kvd.wire.publishing import PublishEngine, PublisherReport, WithdrawEngine
from kvd_proto.messages import Attached, KvEvents
from tests.broker.brokers import join, lane_up, make_broker, mapped, register

REPORT = PublisherReport(
    totals=KvEvents(published=5, snapshots=1, overruns=0, lag_us=900), subscriptions=3, topics=1
)


def told(effects: list[Effect]) -> list[Any]:
    """What the publisher is told."""
    return [effect.message for effect in effects if isinstance(effect, ToPublisher)]


def registered(broker: Broker, name: str, **fields: Any) -> tuple[Session, list[Effect]]:
    """An engine of one rank is registered; its session, and what the broker does then."""
    session = join(broker, "worker", name)
    effects = broker.request(session, 2, register(**fields), 0.0, descriptors=2)
    return session, [*effects, *mapped(broker, session)]


def attached(broker: Broker, name: str, **fields: Any) -> Session:
    """The session of an engine of one rank that is attached."""
    return registered(broker, name, **fields)[0]


def orders(publishing: Publishing) -> list[tuple[str, str]]:
    """Kind and engine of what the publisher is told now."""
    return [(type(message).__name__, message.engine) for message in told(publishing.tick())]


def test_engines_are_published_while_they_are_attached() -> None:
    """With the namespace's descriptors; once each; withdrawn when they leave."""
    broker = make_broker()
    lane_up(broker)
    broker.publishing.begun()
    first = attached(broker, "a")
    (effect,) = broker.publishing.tick()
    assert isinstance(effect, ToPublisher)
    (namespace,) = broker.state.open_namespaces
    order = PublishEngine(engine="a", model="m", namespace=namespace.id)
    assert effect == ToPublisher(order, NamespaceFds(namespace.id))
    second = attached(broker, "b")
    assert orders(broker.publishing) == [("PublishEngine", "b")]
    assert orders(broker.publishing) == []
    broker.lost(first)
    assert orders(broker.publishing) == [("WithdrawEngine", "a")]
    broker.lost(second)
    assert told(broker.publishing.tick()) == [WithdrawEngine(engine="b")]


def test_an_engine_with_another_namespace_is_published_anew() -> None:
    """The one before is withdrawn first, though the name is the same."""
    broker = make_broker()
    lane_up(broker)
    broker.publishing.begun()
    broker.lost(attached(broker, "a"))
    attached(broker, "a")
    assert orders(broker.publishing) == [("PublishEngine", "a")]
    (namespace,) = broker.state.open_namespaces
    for session in list(broker.state.registry.sessions.values()):
        broker.lost(session)
    assert broker.state.namespaces is not None
    broker.state.namespaces.close(namespace)
    attached(broker, "a")
    assert orders(broker.publishing) == [("WithdrawEngine", "a"), ("PublishEngine", "a")]


def test_the_loss_of_a_lane_is_no_departure() -> None:
    """The engine's chunks are there, and found again once another lane serves."""
    broker = make_broker()
    lane_up(broker)
    broker.publishing.begun()
    attached(broker, "a")
    assert orders(broker.publishing) == [("PublishEngine", "a")]
    broker.supervision.lost("host", "killed by signal 9")
    assert orders(broker.publishing) == []


def test_temporary_engines_are_not_published() -> None:
    """A self-test is nobody's cache."""
    broker = make_broker()
    lane_up(broker)
    broker.publishing.begun()
    attached(broker, "a", temporary=True)
    assert orders(broker.publishing) == []


def test_the_next_process_is_told_everything() -> None:
    """Nothing is told while there is none; its end and its beginning are events."""
    broker = make_broker()
    lane_up(broker)
    publishing = broker.publishing
    assert publishing.lost("never was") == []
    broker.state.publisher = Publisher("tcp://127.0.0.1:5557")
    attached(broker, "a")
    assert publishing.tick() == []
    assert [type(each).__name__ for each in told(publishing.begun())] == ["PublishEngine"]
    (event,) = publishing.received(REPORT, 77, 1.0)
    assert isinstance(event, Event)
    assert "tcp://127.0.0.1:5557, pid 77" in event.text
    assert publishing.received(REPORT, 77, 2.0) == []
    publisher = broker.state.publisher
    assert (publisher.pid, publisher.subscriptions, publisher.topics) == (77, 3, 1)
    assert publisher.published.counts.kv_events == 5
    (event,) = publishing.lost("killed by signal 9")
    assert isinstance(event, Event)
    assert (event.level, publisher.subscriptions, publisher.restarts) == ("error", 0, 1)
    assert publishing.tick() == []
    assert [each.engine for each in told(publishing.begun())] == ["a"]


def test_engines_are_told_to_describe_where_the_daemon_publishes() -> None:
    """Otherwise nobody would read it, unless they publish themselves."""
    for publisher in (None, Publisher("tcp://127.0.0.1:5557")):
        broker = make_broker()
        broker.state.publisher = publisher
        lane_up(broker)
        scheduler = join(broker, "scheduler", "a")
        _, effects = registered(broker, "a")
        notices = [
            effect.message
            for effect in effects
            if isinstance(effect, Notify) and effect.session == scheduler.number
        ]
        (notice,) = [notice for notice in notices if isinstance(notice, Attached)]
        assert notice.describe is (publisher is not None)
