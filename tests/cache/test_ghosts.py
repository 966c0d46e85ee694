"""What is remembered of chunks that left memory, and why keys are missed."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvd.cache.chunks import ChunkTable
from kvd.cache.ghosts import Ghost, GhostCause, Ghosts, MissReasons
from kvd.metrics.counts import MissReason
from kvd_proto.messages import Label
from tests.cache.tables import make_table

CAPACITY = 6

keys = st.integers(0, 11).map(lambda number: b"key%d" % number)


class GhostMachine(RuleBasedStateMachine):
    """Ghosts beside a dictionary that is ordered by age."""

    def __init__(self) -> None:
        super().__init__()
        self.ghosts = Ghosts(CAPACITY)
        self.model: dict[bytes, Ghost] = {}
        self.now = 0.0

    @rule(
        key=keys,
        cause=st.sampled_from(GhostCause),
        seen=st.integers(0, 3),
        label=st.sampled_from(Label),
        used=st.floats(0, 1e9),
    )
    def add(self, key: bytes, cause: GhostCause, seen: int, label: Label, used: float) -> None:
        """The newest replaces the key's older one, or the oldest of all where there is no room."""
        self.now += 1.0
        self.ghosts.add(key, cause, self.now, used=used, seen=seen, label=label)
        older = self.model.pop(key, None)
        ghost = Ghost(cause, seen, label, used, self.now)
        if older is not None and not seen:
            ghost = older._replace(cause=cause, left_at=self.now)
        if len(self.model) == CAPACITY:
            del self.model[next(iter(self.model))]
        self.model[key] = ghost

    @rule(key=keys)
    def take(self, key: bytes) -> None:
        """A key that is taken is found no more."""
        assert self.ghosts.take(key) == self.model.pop(key, None)

    @invariant()
    def every_key_is_found_or_not(self) -> None:
        """All that the model has are found as they were added, and no others."""
        self.ghosts.check_integrity()
        assert len(self.ghosts) == len(self.model)
        for number in range(12):
            key = b"key%d" % number
            assert self.ghosts.find(key) == self.model.get(key)


TestGhostMachine: Any = GhostMachine.TestCase


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
