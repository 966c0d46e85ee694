"""What the indexes must hold, of what a directory has."""

from collections import defaultdict
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kvd_proto.directory import DirectoryView
from tests.daemon.slots import ready
from tests.routers.content import MAIN_GROUP, Block, chunks, line
from tests.routers.llmd import BlockSet, LlmdIndex, PublishedBlock, low64, pod_and_model

Held = dict[bytes, range]
"""Chunks of a directory by key, each with the numbers of those of its blocks that it has."""


def held(directory: bytes) -> Held:
    """The READY chunks, by the records of a whole directory."""
    return {
        bytes(row["key"])[: row["key_len"]]: range(row["first"], row["first"] + row["count"])
        for row in ready(directory)
    }


def held_below(directory: bytes) -> Held:
    """The chunks in tiers, by the tier table of a whole directory."""
    table = DirectoryView(directory).tiers
    places = [] if table is None else table.held_chunks(0, table.places)
    return {key: range(place.first, place.first + place.count) for key, place in places}


@dataclass
class Bounds:
    """What an index must hold, and what else it may hold."""

    must: set[Any] = field(default_factory=set)
    may: set[Any] = field(default_factory=set)

    def differences(self, actual: AbstractSet[Any]) -> int:
        """Count what is there and may not be, and what must be there and is not."""
        return len(actual - self.may - self.must) + len(self.must - actual)


@dataclass
class Expected:
    """Of one model's directory.

    Of a chunk in tiers all blocks are said, or of one whose description could not be read while it
    was in memory only its last block, without tokens. Which of both is the case cannot be known
    here; of what is in memory, too, all is said.

    Attributes:
        keys: of READY chunks.
        tier_keys: of chunks in tiers.
        plain: `PublishedBlock`s of `BlockSet`.
        llmd: request key, tier and group of `LlmdIndex`. It must have blocks whose prefix is in
            their group, in memory or tiers, and may have all that are described: it drops a block
            whose parent it does not know, and keeps one whose parent goes. A prefix ends there.
        dynamo: of Dynamo's indexer, tiers and hashes of described blocks of the main group.
    """

    keys: set[bytes] = field(default_factory=set)
    tier_keys: set[bytes] = field(default_factory=set)
    plain: Bounds = field(default_factory=Bounds)
    llmd: Bounds = field(default_factory=Bounds)
    dynamo: Bounds = field(default_factory=Bounds)

    @classmethod
    def of(cls, model: str, memory: Held, in_tiers: Held, llmd: LlmdIndex) -> "Expected":
        """What follows from chunks of a model; `llmd` has the request keys."""
        expected = cls(set(memory), set(in_tiers))
        prefixes = _certain_blocks(model, memory, in_tiers)
        for medium, tier, dynamo_tier, places in (
            ("CPU", "cpu", "host_pinned", memory),
            ("STORAGE", "storage", "disk", in_tiers),
        ):
            for key, numbers in places.items():
                chunk, certain = chunks(model)[key], key in memory
                group, is_main = chunk.group, chunk.group == MAIN_GROUP
                if medium == "STORAGE" and not is_main:
                    continue  # of tiers it is not published
                last = PublishedBlock(medium, group, low64(chunk.blocks[-1].hash))
                if medium == "STORAGE" or not chunk.described:
                    expected.plain.must.add(last)
                for number in numbers if chunk.described else ():
                    block = chunk.blocks[number]
                    block_hash = low64(block.hash)
                    entry = (_request_key(llmd, model, block), tier, group)
                    expected.plain.may.add(PublishedBlock(medium, group, block_hash))
                    expected.llmd.may.add(entry)
                    if is_main:
                        expected.dynamo.may.add((dynamo_tier, block_hash))
                    if certain:
                        expected.plain.must.add(PublishedBlock(medium, group, block_hash))
                        if prefixes[group].issuperset(line(block)):
                            expected.llmd.must.add(entry)
                        if is_main:
                            expected.dynamo.must.add((dynamo_tier, block_hash))
        return expected


def _certain_blocks(model: str, memory: Held, in_tiers: Held) -> dict[int, set[Block]]:
    """The blocks of described chunks of each group of which it is certain that they are said."""
    blocks: dict[int, set[Block]] = defaultdict(set)
    for places in (memory, in_tiers):
        for key, numbers in places.items():
            chunk = chunks(model)[key]
            published = places is memory or (key in memory and chunk.group == MAIN_GROUP)
            if chunk.described and published:
                blocks[chunk.group].update(chunk.blocks[number] for number in numbers)
    return blocks


@cache
def _request_key(llmd: LlmdIndex, model: str, block: Block) -> int:
    return llmd.chain(model, [token for each in line(block) for token in each.tokens])[-1]


@dataclass
class Indexes:
    """One of each kind, fed with the same messages."""

    plain: BlockSet = field(default_factory=BlockSet)
    llmd: LlmdIndex = field(default_factory=LlmdIndex)

    def take(self, topic: str, batch: object) -> None:
        """Take the events of one message."""
        self.plain.take(topic, batch)
        self.llmd.take(topic, batch)

    def forget(self, topic: str) -> None:
        """Forget all blocks of an engine that has left."""
        self.plain.blocks.pop(topic, None)
        self.llmd.forget(pod_and_model(topic)[0])

    def differences(self, topic: str, expected: Expected) -> dict[str, int]:
        """By kind: blocks that are promised and not there, and that are there and not promised."""
        return {
            "set": expected.plain.differences(self.plain.blocks[topic]),
            "llm-d": expected.llmd.differences(self.llmd.blocks(pod_and_model(topic)[0])),
        }
