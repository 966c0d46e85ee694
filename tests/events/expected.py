"""What the indexes must hold, of what a directory has."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from kvd_proto.directory import DirectoryView
from tests.daemon.slots import ready
from tests.events.blocks import Block as Said
from tests.events.blocks import BlockSet
from tests.events.content import MAIN_GROUP, Block, Chunk, chunks, line
from tests.events.llmd import LlmdIndex, pod_and_model
from tests.events.wire import low64

DYNAMO_TIERS = ("host_pinned", "disk")

Held = dict[bytes, range]
"""The READY chunks of a directory, each with the numbers of those of its blocks that it has."""


def held(directory: bytes) -> Held:
    """What the records of a whole directory say.

    Raises:
        DirectoryError: it is none.
    """
    return {
        bytes(row["key"])[: row["key_len"]]: range(row["first"], row["first"] + row["count"])
        for row in ready(directory)
    }


def held_below(directory: bytes) -> Held:
    """The chunks in tiers, by what the tier table of a whole directory says.

    Raises:
        DirectoryError: it is none.
    """
    table = DirectoryView(directory).tiers
    found = [] if table is None else table.held_chunks(0, table.places)
    return {key: range(place.first, place.first + place.count) for key, place in found}


Entry = tuple[int, str, int | None]
"""Of llm-d: request key, tier, group."""


@dataclass
class InTiers:
    """What is to be said of chunks in tiers.

    Of such a chunk all blocks are said, or of one whose description could not be read while it was
    in memory only its last block, without tokens. Which of both is the case cannot be known here;
    of what is in memory, too, all is said.

    Attributes:
        keys: of the chunks.
        plain, llmd, dynamo: blocks that may be said, as in `Expected`.
        plain_must, llmd_must, dynamo_must: those of them that must be.
    """

    keys: set[bytes] = field(default_factory=set)
    plain: set[Said] = field(default_factory=set)
    plain_must: set[Said] = field(default_factory=set)
    llmd: set[Entry] = field(default_factory=set)
    llmd_must: set[Entry] = field(default_factory=set)
    dynamo: set[int] = field(default_factory=set)
    dynamo_must: set[int] = field(default_factory=set)

    @classmethod
    def of(
        cls, model: str, in_tiers: Held, memory: Held, prefixes: "Prefixes", llmd: LlmdIndex
    ) -> "InTiers":
        """What follows from these chunks in tiers, and those in memory."""
        expected, content = cls(keys=set(in_tiers)), chunks(model)
        for key, numbers in in_tiers.items():
            chunk = content[key]
            if chunk.group != MAIN_GROUP:
                continue  # of tiers it is not published
            expected.plain_must.add(Said("STORAGE", chunk.group, low64(chunk.blocks[-1].hash)))
            for block in _blocks(chunk, numbers) if chunk.described else ():
                said = Said("STORAGE", chunk.group, low64(block.hash))
                entry = (_request_key(llmd, model, block), "storage", chunk.group)
                expected.plain.add(said)
                expected.llmd.add(entry)
                expected.dynamo.add(said.hash)
                if key in memory:
                    expected.plain_must.add(said)
                    expected.dynamo_must.add(said.hash)
                    if prefixes.has(chunk.group, block):
                        expected.llmd_must.add(entry)
        expected.plain |= expected.plain_must
        return expected

    def differences(self, plain: set[Said], llmd: set[Entry]) -> dict[str, int]:
        """By kind: blocks that are said and may not be, and that must be said and are not."""
        return {
            "set": len(plain - self.plain) + len(self.plain_must - plain),
            "llm-d": len(llmd - self.llmd) + len(self.llmd_must - llmd),
        }


class Prefixes:
    """The described blocks of each group, in memory or in tiers; those of which it is certain."""

    def __init__(self, model: str, memory: Held, in_tiers: Held) -> None:
        content = chunks(model)
        certain = {
            key: numbers
            for key, numbers in in_tiers.items()
            if key in memory and content[key].group == MAIN_GROUP  # others are not published
        }
        self._blocks: dict[int, set[Block]] = defaultdict(set)
        for places in (memory, certain):
            for group, blocks in _described(model, places).items():
                self._blocks[group] |= blocks

    def has(self, group: int, block: Block) -> bool:
        """Whether the group has the block, and all blocks before it."""
        return self._blocks[group].issuperset(line(block))


def _described(model: str, places: Held) -> dict[int, set[Block]]:
    """The blocks of described chunks, by group."""
    content = chunks(model)
    described: dict[int, set[Block]] = defaultdict(set)
    for key, numbers in places.items():
        if (chunk := content[key]).described:
            described[chunk.group].update(_blocks(chunk, numbers))
    return described


@dataclass
class Expected:
    """Of one model's directory.

    Attributes:
        keys: of READY chunks.
        in_tiers: what lies in tiers.
        plain: for `BlockSet`, all blocks.
        llmd_must: for `LlmdIndex`, blocks whose prefix is in their group, in memory or tiers.
        llmd_may: all that are described. llm-d drops a block whose parent it does not know, and
            keeps one whose parent goes; nothing is lost by either, for a prefix ends there.
        dynamo: for Dynamo's indexer, hashes of described blocks of the main group.
    """

    keys: set[bytes] = field(default_factory=set)
    in_tiers: InTiers = field(default_factory=InTiers)
    plain: set[Said] = field(default_factory=set)
    llmd_must: set[Entry] = field(default_factory=set)
    llmd_may: set[Entry] = field(default_factory=set)
    dynamo: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, model: str, memory: Held, in_tiers: Held, llmd: LlmdIndex) -> "Expected":
        """What follows from these chunks of a model, in memory and in tiers.

        `llmd` has the request keys.
        """
        prefixes = Prefixes(model, memory, in_tiers)
        expected = cls(set(memory), InTiers.of(model, in_tiers, memory, prefixes, llmd))
        content = chunks(model)
        for key in memory:
            chunk = content[key]
            if not chunk.described:
                expected.plain.add(Said("CPU", chunk.group, low64(chunk.blocks[-1].hash)))
        for group, blocks in _described(model, memory).items():
            for block in blocks:
                expected.plain.add(Said("CPU", group, low64(block.hash)))
                entry = (_request_key(llmd, model, block), "cpu", group)
                expected.llmd_may.add(entry)
                if prefixes.has(group, block):
                    expected.llmd_must.add(entry)
                if group == MAIN_GROUP:
                    expected.dynamo.add(low64(block.hash))
        return expected

    def dynamo_differences(self, blocks: Mapping[str, set[int]]) -> int:
        """Count keys by which Dynamo's indexer differs; `blocks` by Dynamo's name of the tier."""
        memory, disk = blocks.get("host_pinned", set()), blocks.get("disk", set())
        return (
            len(memory ^ self.dynamo)
            + len(disk - self.in_tiers.dynamo)
            + len(self.in_tiers.dynamo_must - disk)
            + sum(len(hashes) for tier, hashes in blocks.items() if tier not in DYNAMO_TIERS)
        )


@cache
def _request_key(llmd: LlmdIndex, model: str, block: Block) -> int:
    return llmd.chain(model, [token for each in line(block) for token in each.tokens])[-1]


def _blocks(chunk: Chunk, numbers: range) -> list[Block]:
    return [chunk.blocks[number] for number in numbers]


@dataclass
class Indexes:
    """One of each kind, fed with the same messages."""

    plain: BlockSet = field(default_factory=BlockSet)
    llmd: LlmdIndex = field(default_factory=LlmdIndex)

    def take(self, topic: str, batch: object) -> None:
        """Take the events of one message."""
        for index in (self.plain, self.llmd):
            index.take(topic, batch)

    def forget(self, topic: str) -> None:
        """Forget all blocks of an engine that has left."""
        self.plain.forget(topic)
        self.llmd.forget(pod_and_model(topic)[0])

    def differences(self, topic: str, expected: Expected) -> dict[str, int]:
        """By kind: blocks that are promised and not there, and that are there and not promised."""
        plain, llmd = self.plain.held(topic), self.llmd.held(pod_and_model(topic)[0])
        plain_in_tiers = {block for block in plain if block.medium != "CPU"}
        llmd_in_tiers = {entry for entry in llmd if entry[1] != "cpu"}
        plain, llmd = plain - plain_in_tiers, llmd - llmd_in_tiers
        found = {
            "set": len(plain ^ expected.plain),
            "llm-d": len(llmd - expected.llmd_may) + len(expected.llmd_must - llmd),
        }
        in_tiers = expected.in_tiers.differences(plain_in_tiers, llmd_in_tiers)
        return {kind: count + in_tiers[kind] for kind, count in found.items()}
