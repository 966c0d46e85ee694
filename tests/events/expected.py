"""What the indexes must hold, of what a directory has."""

from dataclasses import dataclass, field
from functools import cache

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


@dataclass
class Expected:
    """Of one model's directory.

    Attributes:
        keys: of READY chunks.
        plain: for `BlockSet`, all blocks.
        dynamo: for `DynamoIndex`, the blocks of the main attention that are described.
        llmd_must: for `LlmdIndex`, blocks whose prefix is there: (request key, tier, group).
        llmd_may: all that are described. llm-d drops a block whose parent it does not know, and
            keeps one whose parent goes; nothing is lost by either, for a prefix ends there.
    """

    keys: set[bytes] = field(default_factory=set)
    plain: set[Said] = field(default_factory=set)
    dynamo: set[int] = field(default_factory=set)
    llmd_must: set[tuple[int, str, int | None]] = field(default_factory=set)
    llmd_may: set[tuple[int, str, int | None]] = field(default_factory=set)

    @classmethod
    def of(cls, model: str, there: Held, llmd: LlmdIndex) -> "Expected":
        """What follows from these chunks of a model. `llmd` has the request keys."""
        expected = cls(keys=set(there))
        content = chunks(model)
        described: dict[int, set[Block]] = {}
        for key, numbers in there.items():
            chunk = content[key]
            if not chunk.described:
                expected.plain.add(Said("CPU", chunk.group, low64(chunk.blocks[-1].hash)))
                continue
            for block in _blocks(chunk, numbers):
                described.setdefault(chunk.group, set()).add(block)
                expected.plain.add(Said("CPU", chunk.group, low64(block.hash)))
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
        promised = self.llmd.held(pod_and_model(topic)[0])
        return {
            "set": len(self.plain.held(topic) ^ expected.plain),
            "llm-d": len(promised - expected.llmd_may) + len(expected.llmd_must - promised),
            "Dynamo": len(self.dynamo.held(topic) ^ expected.dynamo),
        }
