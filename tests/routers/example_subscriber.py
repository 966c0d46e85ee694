"""The structures by which vLLM's example subscriber decodes KV events.

vLLM ships the example (examples/features/kv_events/kv_events_subscriber.py) with its source only.
It declares fewer fields than vLLM's own structures: what a subscriber copied from it can decode.
"""

from typing import Any

import msgspec

BlockHash = bytes | int


class BlockStored(msgspec.Struct, tag=True):
    """Blocks are cached from now on."""

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


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks are cached no more."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """No block is cached any more."""


class Batch(msgspec.Struct, array_like=True):
    """The payload of one message."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


decode = msgspec.msgpack.Decoder(Batch).decode
