"""What the daemon knows of engines' KV events, from their schedulers' Pings."""

from hypothesis import given
from hypothesis import strategies as st

from kvd.broker.broker import event_counts
from kvd.metrics.counts import EventCounts
from kvd_proto.messages import KvEvents, Ping, Status, StatusReport
from tests.broker.brokers import join, make_broker, replies


def told(published: int, snapshots: int = 1, overruns: int = 0, lag_us: int = 0) -> KvEvents:
    """The figures that a Ping carries."""
    return KvEvents(published=published, snapshots=snapshots, overruns=overruns, lag_us=lag_us)


@given(st.lists(st.tuples(*[st.integers(0, 1000)] * 3), max_size=20), st.data())
def test_events_count_once_however_often_they_are_told(
    steps: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """Totals told twice, late or out of order add up to the greatest that was told."""
    grown, reports = (0, 0, 0), []
    for step in steps:
        grown = (grown[0] + step[0], grown[1] + step[1], grown[2] + step[2])
        reports.append(told(*grown))
    known, published = EventCounts(), EventCounts()
    for report in data.draw(st.permutations(reports * 2)):
        published.add(known.catch_up(event_counts(report)))
    assert published == EventCounts(*grown)


def test_the_lag_is_the_largest_of_the_last_minute() -> None:
    """A long one is shown for a minute and no longer."""
    broker = make_broker()
    session = join(broker, "scheduler", "a")
    assert session.engine is not None
    for now, lag_us in ((0.0, 2_000_000), (30.0, 900), (59.0, 0)):
        broker.request(session, 5, Ping(kv_events=told(1, lag_us=lag_us)), now)
        assert session.engine.publish_lag.get(now) == 2.0
    assert session.engine.publish_lag.get(60.5) == 0.0009


def test_a_session_that_follows_another_goes_on_counting() -> None:
    """Each session counts from zero; the engine's figures are the sum of all its sessions."""
    broker = make_broker()
    engine = join(broker, "worker", "a").engine
    for _ in range(2):
        session = join(broker, "scheduler", "a")
        broker.request(session, 5, Ping(kv_events=told(100, 1, 1, 5)), 0.0)
        broker.request(session, 6, Ping(kv_events=told(250, 2, 1, 5)), 1.0)
        broker.lost(session)
    assert engine is not None
    assert engine.published == EventCounts(500, 4, 2)


def test_the_report_says_which_engine_published_how_much() -> None:
    """By what their schedulers report; the sums include engines that have left."""
    broker = make_broker()
    schedulers = [join(broker, "scheduler", name) for name in ("a", "b")]
    worker = join(broker, "worker", "a")
    for session, report in zip(
        [*schedulers, worker], [told(70, lag_us=1500), told(30, 2, 1), told(900)], strict=True
    ):
        broker.request(session, 5, Ping(kv_events=report), 1.0)
    broker.lost(schedulers[1])
    (reply,) = replies(broker.request(schedulers[0], 6, Status(), 3.0))
    assert isinstance(reply.message, StatusReport)
    status = reply.message.status
    (engine,) = status["engines"]
    assert engine["published"] == {
        "kv_events": 70,
        "kv_event_snapshots": 1,
        "kv_event_overruns": 0,
        "lag_max_seconds": 0.0015,
    }
    sums = [status["counters"][f"kv_event{what}"] for what in ("s", "_snapshots", "_overruns")]
    assert sums == [100, 3, 1]
