"""Announcements of chunks that come and go, and repeat rounds, in indexes, at every step."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import SimpleNamespace
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from kvd_client.announcer import Announcer
from kvd_client.block_chains import RemovedBlocks, StoredBlocks
from kvd_client.changes import NO_SLOT, ChunkLocation, Differences
from kvd_proto.descriptions import Description, decode
from tests.events.content import FACTOR, MAIN_GROUP, Chunk, conversation
from tests.events.expected import Expected, Held, Indexes

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
    """Chunks begin..end - 1 of a conversation come or go."""

    change: Change
    number: int
    group: int
    begin: int
    end: int
    missing: int  # so many blocks of the first chunk are not there
    later: bool  # the next step is part of the same differences
    repeat: int  # so many chunks are said again, or a round begins, if it is not 0
    lose: bool  # a router begins to lose messages, or hears again


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
    """A router's indexes."""

    indexes: Indexes = field(default_factory=Indexes)
    exact: bool = False  # it has heard everything, or a whole round and all since
    is_deaf: bool = False  # it loses what is published now
    in_round: bool = False  # it has heard all of the round that is under way


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
        batch = SimpleNamespace(events=[event_of(blocks) for blocks in announced])
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


class BlockRemoved(NamedTuple):
    """What the indexes read of vLLM's event."""

    block_hashes: Sequence[bytes]
    medium: str
    group_idx: int | None


class BlockStored(NamedTuple):
    """What the indexes read of vLLM's event."""

    block_hashes: Sequence[bytes]
    medium: str
    group_idx: int | None
    parent_block_hash: bytes | None
    token_ids: list[int]
    lora_name: str | None


def event_of(blocks: StoredBlocks | RemovedBlocks) -> BlockStored | BlockRemoved:
    """The event that says this."""
    removed = BlockRemoved(blocks.hashes, "STORAGE" if blocks.in_tiers else "CPU", blocks.group)
    if isinstance(blocks, RemovedBlocks):
        return removed
    tokens = memoryview(blocks.tokens).cast("I").tolist()
    return BlockStored(*removed, blocks.parent or None, tokens, blocks.lora)


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
