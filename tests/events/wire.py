"""KV events as vLLM publishes them (vLLM 0.32, distributed/kv_events.py), decoded.

vLLM's own classes have the same names and fields, so that the indexes beside this file take either.
"""

from typing import Any

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


Event = BlockStored | BlockRemoved


class Batch(msgspec.Struct, array_like=True):
    """What one message tells."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def low64(block_hash: BlockHash) -> int:
    """A block hash as routers keep it: of bytes the last eight, of a number the lowest 64 bits."""
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    return block_hash & LOW_64
