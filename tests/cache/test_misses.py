"""Why chunks were missed."""

from collections.abc import Callable

import pytest

from kvd.cache.chunks import ChunkTable
from kvd.cache.ghosts import GhostCause, MissReasons
from kvd.metrics.counts import MissReason
from tests.cache.tables import begin, make_table, names, store


def misses(table: ChunkTable, elsewhere: Callable[[bytes], bool] = lambda _: False) -> MissReasons:
    """What counts the missed keys of a table."""
    return MissReasons(table.directory, table.ghosts, table.counts, elsewhere)


def counted(table: ChunkTable) -> dict[str, int]:
    """The reasons that were counted."""
    return {reason: count for reason, count in table.counts.missed.items() if count}


@pytest.mark.parametrize("cause", list(GhostCause))
def test_a_ghost_says_why_its_key_is_missed(cause: GhostCause) -> None:
    """Evicted, refused, quota, reset and removed: each cause of a ghost is the reason of a miss."""
    table = make_table(4)
    table.ghosts.add(b"key 0", cause, 1.0)
    misses(table).count([b"key 0"], 2.0)
    assert counted(table) == {cause.name.lower(): 1}


def test_an_evicted_key_is_counted_with_the_time_since_it_left() -> None:
    """The histogram says how long ago evicted chunks had left; it counts no other reason."""
    table = make_table(4)
    store(table, names(4), now=10.0)
    store(table, names(2, first=10), now=100.0)
    gone = [key for key in names(4) if table.directory.find(key) < 0]
    assert len(gone) == 2
    misses(table).count([*gone, b"new"], 130.0)
    assert counted(table) == {MissReason.EVICTED: 2, MissReason.NEVER_SEEN: 1}
    assert (table.counts.missed_age.count, table.counts.missed_age.sum) == (2, 60.0)
    table.counts.check_integrity()


def test_what_is_on_its_way_or_here_is_told_apart() -> None:
    """A key whose chunk is being written, and one that is READY behind a missed one."""
    table = make_table(4)
    begin(table, [b"written"])
    store(table, [b"ready"])
    misses(table).count([b"written", b"ready"], 1.0)
    assert counted(table) == {MissReason.BEING_STORED: 1, MissReason.READY: 1}


def test_another_namespace_is_asked_last() -> None:
    """A key that another namespace has is of another layout, unless it was here itself."""
    table, asked = make_table(4), list[bytes]()
    table.ghosts.add(b"reset", GhostCause.RESET, 1.0)

    def elsewhere(key: bytes) -> bool:
        asked.append(key)
        return key == b"other"

    misses(table, elsewhere).count([b"other", b"reset", b"new"], 2.0)
    reasons = (MissReason.OTHER_LAYOUT, MissReason.RESET, MissReason.NEVER_SEEN)
    assert counted(table) == dict.fromkeys(reasons, 1)
    assert asked == [b"other", b"new"]
