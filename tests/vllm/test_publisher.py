"""What kvd's publisher writes is what vLLM's own encoder writes of the same blocks."""

from array import array

import msgspec
import pytest
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvd.publisher.wire import CLEARED, encode_event, payloads
from kvd_proto.announcements import RemovedBlocks, StoredBlocks
from tests.publisher.vectors import BLOCKS, PAYLOADS, TIME


def vllm_event(blocks: StoredBlocks | RemovedBlocks) -> KVCacheEvent:
    """The event as vLLM has it."""
    medium = MEDIUM_STORAGE if blocks.below else MEDIUM_CPU
    hashes = [maybe_convert_block_hash(BlockHash(each)) for each in blocks.hashes]
    if isinstance(blocks, RemovedBlocks):
        return BlockRemoved(hashes, medium, blocks.group, "LOCAL", "kvd")
    parent = maybe_convert_block_hash(BlockHash(blocks.parent)) if blocks.parent else None
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=array("I", blocks.tokens).tolist(),
        block_size=blocks.block_size,
        lora_id=None,
        medium=medium,
        lora_name=blocks.lora,
        extra_keys=None if blocks.extra is None else list(blocks.extra),
        group_idx=blocks.group,
        kv_cache_spec_kind=blocks.kind or None,
        kv_cache_spec_sliding_window=blocks.window,
        locality="LOCAL",
        ownership="kvd",
    )


def encoded(events: list[KVCacheEvent]) -> bytes:
    """The payload as vLLM's publisher encodes it."""
    batch = KVEventBatch(ts=TIME, events=events, data_parallel_rank=0)
    payload: bytes = msgspec.msgpack.Encoder().encode(batch)
    return payload


@pytest.mark.parametrize("name", BLOCKS)
def test_both_encoders_write_the_same(name: str) -> None:
    """And what tests/publisher holds against, where there is no vLLM, is that, too."""
    by_vllm = encoded(list(map(vllm_event, BLOCKS[name])))
    assert list(payloads(map(encode_event, BLOCKS[name]), TIME)) == [by_vllm]
    assert by_vllm.hex() == PAYLOADS[name]


def test_vllm_reads_what_is_published() -> None:
    """Its own structures decode the payload, AllBlocksCleared too."""
    everything = [encode_event(each) for blocks in BLOCKS.values() for each in blocks]
    (payload,) = payloads([*everything, CLEARED], TIME)
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    assert batch.ts == TIME
    assert batch.data_parallel_rank == 0
    assert msgspec.msgpack.encode(batch) == payload
    assert batch.events[-1] == AllBlocksCleared()
    assert encoded([AllBlocksCleared()]).hex() == PAYLOADS["cleared"]
