"""What is remembered of chunks that are not in memory."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvd.cache.ghosts import Ghost, GhostCause, Ghosts
from kvd_proto.messages import Label

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
            ghost = older._replace(cause=cause, gone=self.now)
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
