"""What the daemon knows of engines' KV events, from their schedulers' Pings."""

from hypothesis import given
from hypothesis import strategies as st

from kvd.broker.broker import event_counts
from kvd.metrics.counts import EventCounts
from kvd_proto.messages import KvEvents


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
