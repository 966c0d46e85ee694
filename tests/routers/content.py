"""Conversations of a model: chains of chunks with tokens, as an engine would describe them.

Conversation n begins like conversation n // 2, up to a block which may be in the midst of a chunk:
then two chunks share their first block. All is a function of the model's name.
"""

import hashlib
from dataclasses import dataclass
from functools import cache

import numpy as np

from kvd_proto.descriptions import Description, encode
from tests.routers.llmd import BLOCK_TOKENS

FACTOR = 2  # blocks of a chunk
CHUNKS = 6  # of a conversation
BLOCKS = CHUNKS * FACTOR
CONVERSATIONS = 300
KINDS = (("full_attention", None), ("sliding_window", 64))  # by group
MAIN_GROUP = 0  # that of full attention
UNDESCRIBED = 8  # one in so many of conversations' last two chunks has no description


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a model's conversation."""

    hash: bytes  # as the engine has it, 32 bytes
    parent: "Block | None"  # the block before it
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a group: a key and what it stands for."""

    key: bytes
    group: int
    at: int  # in its conversation
    blocks: tuple[Block, ...]

    @property
    def described(self) -> bool:
        """Whether engines describe it; the same for all of them."""
        return self.at < CHUNKS - 2 or self.key[0] % UNDESCRIBED != 0

    def description(self) -> bytes | None:
        """What an engine gives to `prepare_store`."""
        if not self.described:
            return None
        kind, window = KINDS[self.group]
        parent = self.blocks[0].parent
        tokens = [token for block in self.blocks for token in block.tokens]
        return encode(
            Description(
                parent=b"" if parent is None else parent.hash,
                hashes=tuple(block.hash for block in self.blocks),
                tokens=np.array(tokens, "<u4").tobytes(),
                block_size=BLOCK_TOKENS,
                group=self.group,
                kind=kind,
                window=window,
            )
        )


@cache
def line(block: Block) -> tuple[Block, ...]:
    """From the conversation's first block to this one."""
    return (*(() if block.parent is None else line(block.parent)), block)


def _digest(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


@cache
def _block(model: str, conversation: int, at: int) -> Block:
    own_from = _digest(model, conversation)[0] % (BLOCKS - 1) + 1 if conversation > 1 else 0
    if at < own_from:
        return _block(model, conversation // 2, at)
    noise = _digest(model, conversation, at)
    tokens = tuple(int(each) for each in np.frombuffer(noise * 2, "<u4")[:BLOCK_TOKENS] % 50_000)
    parent = _block(model, conversation, at - 1) if at else None
    return Block(_digest(model, parent and parent.hash, tokens), parent, tokens)


def conversation(model: str, number: int, group: int) -> list[Chunk]:
    """The chunks of a conversation, numbered from 1 on, its head first."""
    blocks = [_block(model, number, at) for at in range(BLOCKS)]
    parts = [tuple(blocks[at : at + FACTOR]) for at in range(0, BLOCKS, FACTOR)]
    suffix = group.to_bytes(4, "big")
    return [Chunk(part[-1].hash + suffix, group, at, part) for at, part in enumerate(parts)]


@cache
def chunks(model: str) -> dict[bytes, Chunk]:
    """All chunks of a model, by key."""
    return {
        chunk.key: chunk
        for number in range(1, CONVERSATIONS + 1)
        for group in range(len(KINDS))
        for chunk in conversation(model, number, group)
    }
