"""What the daemon knows of KV events: from engines' schedulers, and from its own publisher."""

from hypothesis import given
from hypothesis import strategies as st

from kvd.broker.kv_events import Published, Publisher
from kvd.metrics.counts import EventCounts
from kvd_proto.messages import KvEvents, Ping, Status, StatusReport
from tests.broker.brokers import join, make_broker, replies


def told(published: int, snapshots: int = 1, overruns: int = 0, lag_us: int = 0) -> KvEvents:
    """What a publisher says."""
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
    known, published = EventCounts(), Published()
    for report in data.draw(st.permutations(reports * 2)):
        published.report(known, report, 0.0)
    assert published.counts == EventCounts(*grown)


def test_the_lag_is_the_largest_of_the_last_minute() -> None:
    """A long one is shown for a minute and no longer."""
    known, published = EventCounts(), Published()
    for now, lag_us in ((0.0, 2_000_000), (30.0, 900), (59.0, 0)):
        published.report(known, told(1, lag_us=lag_us), now)
        assert published.lag.get(now) == 2.0
    assert published.lag.get(60.5) == 0.0009


def test_a_publisher_that_is_replaced_goes_on_counting() -> None:
    """Each process counts from zero, the totals do not; the state says whether one serves."""
    publisher = Publisher("tcp://127.0.0.1:5557")
    assert publisher.state == "starting"
    for pid in (11, 12):
        publisher.started(pid)
        assert (publisher.state, publisher.pid) == ("up", pid)
        publisher.report(told(100, 1, 1, 5), 0.0)
        publisher.report(told(250, 2, 1, 5), 1.0)
        publisher.lost("signal 9")
        assert (publisher.state, publisher.last_error) == ("down", "signal 9")
    assert publisher.published.counts == EventCounts(500, 4, 2)
    assert publisher.restarts == 2


def test_the_report_says_who_published_how_much() -> None:
    """Engines by what their schedulers tell, and the publisher; the sum holds those gone, too."""
    broker = make_broker()
    schedulers = [join(broker, "scheduler", name) for name in ("a", "b")]
    worker = join(broker, "worker", "a")
    for session, report in zip(
        [*schedulers, worker], [told(70, lag_us=1500), told(30, 2, 1), told(900)], strict=True
    ):
        broker.request(session, 5, Ping(kv_events=report), 1.0)
    broker.state.publisher = Publisher("ipc:///run/kvd/events.sock")
    broker.state.publisher.started(77)
    broker.state.publisher.report(told(1000), 1.0)
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
    assert status["publisher"]["published"]["kv_events"] == 1000
    assert (status["publisher"]["state"], status["publisher"]["pid"]) == ("up", 77)
    sums = [status["counters"][f"kv_event{what}"] for what in ("s", "_snapshots", "_overruns")]
    assert sums == [1100, 4, 1]
