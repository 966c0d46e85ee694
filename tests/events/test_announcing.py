"""Announcements of a chunk's coming and going, in routers' indexes, at every step."""

from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from kvd_proto.announcements import RemovedBlocks, StoredBlocks
from kvd_proto.announcer import Announcer
from kvd_proto.descriptions import Description, decode
from kvd_proto.said import Differences, Place
from tests.events.content import CHUNKS, FACTOR, Chunk, chunks, conversation
from tests.events.expected import Expected, Held, Indexes
from tests.routers.wire import Batch, BlockRemoved, BlockStored, Event

MODEL, TOPIC = "left", "kv@a@left"
CONVERSATIONS = 6  # few, so that they meet
STEPS = 40


class Step(NamedTuple):
    """Chunks begin..end - 1 of a conversation come or go.

    missing: so many blocks of the first one are not there.
    later: the next step is part of the same differences.
    """

    comes: bool
    number: int
    group: int
    begin: int
    end: int
    missing: int
    later: bool


steps = st.builds(
    Step,
    comes=st.booleans(),
    number=st.integers(1, CONVERSATIONS),
    group=st.sampled_from((0, 0, 1)),
    begin=st.sampled_from((0, 0, 1, 2, 3, 5)),
    end=st.sampled_from((2, 4, 6, 6)),
    missing=st.sampled_from((0, 0, 1)),
    later=st.sampled_from((False, False, True)),
)


@dataclass
class Told:
    """A directory, its announcer, and indexes that hear all of it."""

    there: Held = field(default_factory=dict)
    slots: list[Chunk] = field(default_factory=list)
    indexes: list[Indexes] = field(default_factory=lambda: [Indexes()])

    def __post_init__(self) -> None:
        self.announcer = Announcer(self.describe)
        self._differences = Differences()

    def describe(self, place: Place) -> Description | None:
        """What the side file has of a slot."""
        encoded = self.slots[place.slot].description()
        return None if encoded is None else decode(encoded)

    def step(self, step: Step) -> None:
        """Note a change, and announce what is noted unless there is more to come."""
        found = self._differences
        line = conversation(MODEL, step.number, step.group)[step.begin : step.end]
        for chunk in reversed(line):
            missing = step.missing if chunk is line[0] else 0
            if step.comes:
                self.there[chunk.key] = range(missing, FACTOR)
                self.slots.append(chunk)
                slot = len(self.slots) - 1
                found.stored[chunk.key] = Place(slot, 1 + slot, missing, FACTOR - missing, 0)
                if chunk.key in found.removed:  # net: it did not go
                    found.removed.remove(chunk.key)
            elif self.there.pop(chunk.key, None) is not None:
                found.stored.pop(chunk.key, None)
                found.removed.append(chunk.key)
        if not step.later:
            self.announce()

    def announce(self) -> None:
        """Announce what is noted."""
        self._hear(self.announcer.announce(self._differences))
        self._differences = Differences()
        while self.announcer.waiting:
            self._hear(self.announcer.announce(Differences()))

    def late(self) -> None:
        """A subscriber comes, and everything is said again to all."""
        self.indexes.append(Indexes())
        for stored in self.announcer.everything():
            self._hear([RemovedBlocks(stored.hashes, stored.group), stored])

    def _hear(self, announced: list[StoredBlocks | RemovedBlocks]) -> None:
        batch = Batch(0.0, [event_of(each) for each in announced], 0)
        for indexes in self.indexes:
            indexes.take(TOPIC, batch)

    def differences(self) -> dict[str, int]:
        """By kind of index."""
        expected = Expected.of(MODEL, self.there, {}, self.indexes[0].llmd)
        total: dict[str, int] = {}
        for indexes in self.indexes:
            for kind, count in indexes.differences(TOPIC, expected).items():
                total[kind] = total.get(kind, 0) + count
        return {kind: count for kind, count in total.items() if count}


def event_of(blocks: StoredBlocks | RemovedBlocks) -> Event:
    """The event that says this."""
    if isinstance(blocks, RemovedBlocks):
        return BlockRemoved(list(blocks.hashes), "CPU", blocks.group)
    tokens = memoryview(blocks.tokens).cast("I").tolist()
    return BlockStored(
        list(blocks.hashes),
        blocks.parent or None,
        tokens,
        blocks.block_size,
        None,
        "CPU",
        blocks.lora,
        None if blocks.extra is None else list(blocks.extra),
        blocks.group,
        blocks.kind or None,
        blocks.window,
    )


@given(st.lists(steps, min_size=STEPS // 2, max_size=STEPS), st.integers(0, STEPS // 2))
def test_every_index_has_what_is_there_after_every_step(todo: list[Step], late_at: int) -> None:
    """Whatever comes and goes in whatever order, nothing is promised that is not there."""
    told = Told()
    for number, step in enumerate(todo):
        told.step(step)
        if number == late_at:
            told.announce()
            told.late()
        if not step.later:
            assert told.differences() == {}
    told.announce()
    assert told.differences() == {}


def test_conversations_meet_in_all_ways() -> None:
    """Of the chunks some share their first block, some all of a prefix, some are not described."""
    few = [conversation(MODEL, number, 0) for number in range(1, CONVERSATIONS + 1)]
    heads = {chunk.blocks[0].hash for line in few for chunk in line}
    keys = {chunk.key for line in few for chunk in line}
    assert len(heads) < len(keys) < CHUNKS * CONVERSATIONS
    assert any(not chunk.described for chunk in chunks(MODEL).values())
