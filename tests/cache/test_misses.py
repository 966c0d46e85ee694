"""Why chunks were missed."""

from collections.abc import Callable

import pytest

from kvd.cache.chunks import ChunkTable
from kvd.cache.ghosts import GhostCause, MissReasons
from kvd.metrics.counts import MissReason
from tests.cache.tables import make_table


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
