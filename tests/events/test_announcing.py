"""Announcements of chunks that come and go, and repeat rounds, in indexes, at every step."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from kvd_client.announcer import Announcer
from kvd_client.block_chains import RemovedBlocks, StoredBlocks
from kvd_client.changes import NO_SLOT, ChunkLocation, Differences
from kvd_proto.descriptions import Description, decode
from tests.events.content import FACTOR, MAIN_GROUP, Chunk, conversation
from tests.events.expected import Expected, Held, Indexes
from tests.events.wire import Batch, BlockRemoved, BlockStored, Event

MODEL, TOPIC = "left", "kv@a@left"
CONVERSATIONS = 6  # few, so that they meet
STEPS = 40


class Change(Enum):
    """What happens to chunks."""

    COMES = auto()  # into memory
    GOES = auto()
    MOVES_DOWN = auto()  # tiers get it
    IS_RELEASED = auto()  # of tiers


class Step(NamedTuple):
    """Chunks begin..end - 1 of a conversation come or go.

    missing: so many blocks of the first one are not there.
    later: the next step is part of the same differences.
    repeat: so many chunks are said again, or a round begins, if it is not 0.
    lose: a router begins to lose messages, or hears again.
    """

    change: Change
    number: int
    group: int
    begin: int
    end: int
    missing: int
    later: bool
    repeat: int
    lose: bool


steps = st.builds(
    Step,
    change=st.sampled_from([Change.COMES, *Change]),
    number=st.integers(1, CONVERSATIONS),
    group=st.sampled_from((0, 0, 1)),
    begin=st.sampled_from((0, 0, 1, 2, 3, 5)),
    end=st.sampled_from((2, 4, 6, 6)),
    missing=st.sampled_from((0, 0, 1)),
    later=st.sampled_from((False, False, True)),
    repeat=st.sampled_from((0, 2, 2, 5, 10)),
    lose=st.sampled_from((False, False, False, True)),
)


@dataclass
class Listener:
    """A router's indexes.

    Attributes:
        is_deaf: it loses what is published now.
        exact: it has heard everything, or a whole round and all since.
        in_round: it has heard all of the round that is under way.
    """

    indexes: Indexes = field(default_factory=Indexes)
    exact: bool = False
    is_deaf: bool = False
    in_round: bool = False


@dataclass
class Published:
    """A pool, its announcer, and routers: one hears everything, one comes late, one loses some."""

    memory: Held = field(default_factory=dict)
    in_tiers: Held = field(default_factory=dict)
    slots: list[Chunk] = field(default_factory=list)
    listeners: list[Listener] = field(
        default_factory=lambda: [Listener(exact=True), Listener(exact=True)]
    )

    def __post_init__(self) -> None:
        self.announcer = Announcer(self.describe, [MAIN_GROUP])
        self._differences = Differences()

    def describe(self, place: ChunkLocation) -> Description | None:
        """What the side file has of a slot."""
        encoded = self.slots[place.slot].description()
        return None if encoded is None else decode(encoded)

    def step(self, step: Step) -> None:
        """Note a change, and announce what is noted unless there is more to come."""
        differences = self._differences
        line = conversation(MODEL, step.number, step.group)[step.begin : step.end]
        for chunk in reversed(line):
            missing = step.missing if chunk is line[0] else 0
            if step.change is Change.COMES:
                self.memory[chunk.key] = range(missing, FACTOR)
                self.slots.append(chunk)
                slot = len(self.slots) - 1
                differences.stored[chunk.key] = ChunkLocation(
                    slot, 1 + slot, missing, FACTOR - missing, 0
                )
                if chunk.key in differences.removed:  # net: it did not go
                    differences.removed.remove(chunk.key)
            elif step.change is Change.GOES:
                if self.memory.pop(chunk.key, None) is not None:
                    differences.stored.pop(chunk.key, None)
                    differences.removed.append(chunk.key)
            elif step.change is Change.MOVES_DOWN:
                if chunk.key in self.memory and chunk.key not in differences.removed_from_tiers:
                    blocks = self.in_tiers[chunk.key] = self.memory[chunk.key]
                    place = ChunkLocation(NO_SLOT, 0, blocks.start, len(blocks), 0)
                    differences.stored_in_tiers[chunk.key] = place
            elif self.in_tiers.pop(chunk.key, None) is not None:
                differences.stored_in_tiers.pop(chunk.key, None)
                differences.removed_from_tiers.append(chunk.key)
        if not step.later:
            self.announce()

    def announce(self) -> None:
        """Announce what is noted."""
        self._hear(self.announcer.announce(self._differences))
        self._differences = Differences()
        while self.announcer.waiting:
            self._hear(self.announcer.announce(Differences()))

    def begin_repeat(self) -> None:
        """A router comes, and everything is to be said again to all."""
        self.listeners[2:] = [Listener()]
        self.announcer.begin_repeat()
        for listener in self.listeners:
            listener.in_round = not listener.is_deaf

    def repeat(self, num_chunks: int) -> None:
        """Say some of it again."""
        self._hear(self.announcer.repeat(num_chunks))
        if not self.announcer.repeating:
            for listener in self.listeners:
                listener.exact |= listener.in_round

    def toggle_deaf(self) -> None:
        """A router loses what comes now, or hears again."""
        listener = self.listeners[1]
        listener.is_deaf = not listener.is_deaf
        listener.exact = listener.in_round = False

    def _hear(self, announced: list[StoredBlocks | RemovedBlocks]) -> None:
        batch = Batch(0.0, [event_of(each) for each in announced], 0)
        for listener in self.listeners:
            if not listener.is_deaf:
                listener.indexes.take(TOPIC, batch)

    def differences(self) -> dict[str, int]:
        """By kind of index, of routers that must have what is there."""
        index = self.listeners[0].indexes.llmd
        expected = Expected.of(MODEL, self.memory, self.in_tiers, index)
        total: Counter[str] = Counter()
        for listener in self.listeners:
            if listener.exact:
                total.update(listener.indexes.differences(TOPIC, expected))
        return dict(+total)


def event_of(blocks: StoredBlocks | RemovedBlocks) -> Event:
    """The event that says this."""
    medium = "STORAGE" if blocks.in_tiers else "CPU"
    if isinstance(blocks, RemovedBlocks):
        return BlockRemoved(list(blocks.hashes), medium, blocks.group)
    tokens = memoryview(blocks.tokens).cast("I").tolist()
    return BlockStored(
        list(blocks.hashes),
        blocks.parent or None,
        tokens,
        blocks.block_size,
        None,
        medium,
        blocks.lora,
        None if blocks.extra is None else list(blocks.extra),
        blocks.group,
        blocks.kind or None,
        blocks.window,
    )


@given(st.lists(steps, min_size=STEPS // 2, max_size=STEPS))
def test_every_index_has_what_is_there_after_every_step(todo: list[Step]) -> None:
    """Whatever comes and goes in whatever order, nothing is promised that is not there.

    Nor in an index that came late, or lost messages, once it has heard a whole repeat round.
    """
    published = Published()
    for step in todo:
        published.step(step)
        if step.lose:
            published.toggle_deaf()
        if published.announcer.repeating:
            published.repeat(step.repeat)
        elif step.repeat:
            published.begin_repeat()
        if not step.later:
            assert published.differences() == {}
    published.announce()
    published.listeners[1].is_deaf = False
    published.begin_repeat()
    while published.announcer.repeating:
        published.repeat(3)
    assert all(listener.exact for listener in published.listeners)
    assert published.differences() == {}
