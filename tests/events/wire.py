"""KV events as vLLM publishes them (vLLM 0.32, distributed/kv_events.py), decoded.

Three frames: the topic, a sequence number of 8 bytes, big-endian, and a msgpack array of a
timestamp, events and the data-parallel rank. Each event is a map that names its type. vLLM's own
classes have the same names and fields, so that the indexes beside this file take either.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

BlockHash = int | bytes
LOW_64 = 2**64 - 1


class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Blocks are held from now on, each the parent of the next one."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Blocks are held no more."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """No block is held any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True):
    """What one message tells."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class Message(NamedTuple):
    """A message, decoded."""

    topic: str
    sequence: int
    batch: Batch


_decoder = msgspec.msgpack.Decoder(Batch)


def decode(frames: Sequence[bytes]) -> Message:
    """Decode the frames of one message.

    Raises:
        ValueError: there are not three frames, or the sequence number has not 8 bytes.
        msgspec.MsgspecError: the payload is no batch of events.
    """
    if len(frames) != 3 or len(frames[1]) != 8:
        raise ValueError(f"frames of {[len(frame) for frame in frames]} bytes")
    topic, sequence, payload = frames
    return Message(topic.decode(), int.from_bytes(sequence, "big"), _decoder.decode(payload))


def low64(block_hash: BlockHash) -> int:
    """A block hash as routers keep it: of bytes the last eight, of a number the lowest 64 bits."""
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    return block_hash & LOW_64
