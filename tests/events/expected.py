"""What the indexes must hold, of what a directory has."""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache

from kvd_proto.directory import DirectoryView
from tests.daemon.slots import ready
from tests.events.content import Block, Chunk, chunks, line
from tests.routers.blocks import Block as Said
from tests.routers.blocks import BlockSet
from tests.routers.dynamo import DynamoIndex
from tests.routers.llmd import LlmdIndex, pod_and_model
from tests.routers.wire import low64

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
    """The chunks that tiers hold, by what the tier table of a whole directory says.

    Raises:
        DirectoryError: it is none.
    """
    table = DirectoryView(directory).tiers
    found = [] if table is None else table.held(0, table.places)
    return {key: range(place.first, place.first + place.count) for key, place in found}


@dataclass
class Below:
    """What is to be said of chunks in tiers.

    Of such a chunk all blocks are said, or of one whose description could not be read while it was
    in memory only its last block, without tokens. Which of both is the case nobody else can know;
    of what is in memory, too, all is said.

    Attributes:
        keys: of the chunks.
        plain, dynamo, llmd: blocks that may be said, as in `Expected`.
        plain_must, dynamo_must, llmd_must: those of them that must be.
    """

    keys: set[bytes] = field(default_factory=set)
    plain: set[Said] = field(default_factory=set)
    plain_must: set[Said] = field(default_factory=set)
    dynamo: set[int] = field(default_factory=set)
    dynamo_must: set[int] = field(default_factory=set)
    llmd: set[tuple[int, str, int | None]] = field(default_factory=set)
    llmd_must: set[tuple[int, str, int | None]] = field(default_factory=set)

    @classmethod
    def of(cls, model: str, there: Held, memory: Held, llmd: LlmdIndex) -> "Below":
        """What follows from these chunks in tiers, and those in memory."""
        below, content = cls(keys=set(there)), chunks(model)
        for key, numbers in there.items():
            chunk = content[key]
            below.plain_must.add(Said("STORAGE", chunk.group, low64(chunk.blocks[-1].hash)))
            for block in _blocks(chunk, numbers) if chunk.described else ():
                said = Said("STORAGE", chunk.group, low64(block.hash))
                entry = (_request_key(llmd, model, block), "storage", chunk.group)
                below.plain.add(said)
                below.llmd.add(entry)
                if chunk.group == 0:
                    below.dynamo.add(said.hash)
                if key in memory:
                    below.plain_must.add(said)
                    if chunk.group == 0:
                        below.dynamo_must.add(said.hash)
                    if set(line(block)) <= _described(model, memory)[chunk.group]:
                        below.llmd_must.add(entry)
        below.plain |= below.plain_must
        return below

    def differences(
        self,
        plain: set[Said],
        llmd: set[tuple[int, str, int | None]],
        dynamo: set[int],
    ) -> dict[str, int]:
        """By kind: blocks that are said and may not be, and that must be said and are not."""
        return {
            "set": len(plain - self.plain) + len(self.plain_must - plain),
            "llm-d": len(llmd - self.llmd) + len(self.llmd_must - llmd),
            "Dynamo": len(dynamo - self.dynamo) + len(self.dynamo_must - dynamo),
        }


def _described(model: str, there: Held) -> dict[int, set[Block]]:
    """The blocks of described chunks, by group."""
    content = chunks(model)
    found: dict[int, set[Block]] = defaultdict(set)
    for key, numbers in there.items():
        if (chunk := content[key]).described:
            found[chunk.group].update(_blocks(chunk, numbers))
    return found


@dataclass
class Expected:
    """Of one model's directory.

    Attributes:
        keys: of READY chunks.
        below: what lies in tiers.
        plain: for `BlockSet`, all blocks.
        dynamo: for `DynamoIndex`, the blocks of the main attention that are described.
        llmd_must: for `LlmdIndex`, blocks whose prefix is there: (request key, tier, group).
        llmd_may: all that are described. llm-d drops a block whose parent it does not know, and
            keeps one whose parent goes; nothing is lost by either, for a prefix ends there.
    """

    keys: set[bytes] = field(default_factory=set)
    below: Below = field(default_factory=Below)
    plain: set[Said] = field(default_factory=set)
    dynamo: set[int] = field(default_factory=set)
    llmd_must: set[tuple[int, str, int | None]] = field(default_factory=set)
    llmd_may: set[tuple[int, str, int | None]] = field(default_factory=set)

    @classmethod
    def of(cls, model: str, there: Held, below: Held, llmd: LlmdIndex) -> "Expected":
        """What follows from these chunks of a model, in memory and below it.

        `llmd` has the request keys.
        """
        expected = cls(keys=set(there), below=Below.of(model, below, there, llmd))
        content, described = chunks(model), _described(model, there)
        for key in there:
            chunk = content[key]
            if not chunk.described:
                expected.plain.add(Said("CPU", chunk.group, low64(chunk.blocks[-1].hash)))
        for group, blocks in described.items():
            expected.plain |= {Said("CPU", group, low64(block.hash)) for block in blocks}
        expected.dynamo = {low64(block.hash) for block in described.get(0, ())}
        for group, blocks in described.items():
            for block in blocks:
                entry = (_request_key(llmd, model, block), "cpu", group)
                expected.llmd_may.add(entry)
                if blocks.issuperset(line(block)):
                    expected.llmd_must.add(entry)
        return expected


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
    dynamo: DynamoIndex = field(default_factory=DynamoIndex)

    def take(self, topic: str, batch: object) -> None:
        """Take the events of one message."""
        for index in (self.plain, self.llmd, self.dynamo):
            index.take(topic, batch)

    def differences(self, topic: str, expected: Expected) -> dict[str, int]:
        """By kind: blocks that are promised and not there, and that are there and not promised."""
        said, promised = self.plain.held(topic), self.llmd.held(pod_and_model(topic)[0])
        said_below = {block for block in said if block.medium != "CPU"}
        promised_below = {entry for entry in promised if entry[1] != "cpu"}
        said, promised = said - said_below, promised - promised_below
        found = {
            "set": len(said ^ expected.plain),
            "llm-d": len(promised - expected.llmd_may) + len(expected.llmd_must - promised),
            "Dynamo": len(self.dynamo.held(topic) ^ expected.dynamo),
        }
        dynamo_below = self.dynamo.held(topic, "disk")
        below = expected.below.differences(said_below, promised_below, dynamo_below)
        return {kind: count + below[kind] for kind, count in found.items()}
