"""Hashes that cover tokens after a block (EAGLE, MTP): descriptions and events say which."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.distributed.kv_events import BlockStored
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from kvd_client.announcer import Announcer
from kvd_client.changes import ChunkLocation, Differences
from kvd_client.vllm.chunks import describe
from kvd_client.vllm.events import event_hash_function, to_event
from kvd_proto.descriptions import decode, encode

BLOCK, BLOCKS, LOOKAHEAD = 16, 6, 2
GROUP: Any = SimpleNamespace(
    group_idx=0,
    tokens_per_block=BLOCK,
    tokens_per_chunk=2 * BLOCK,
    kv_event_group_spec=SimpleNamespace(
        kv_cache_spec_kind="full_attention", kv_cache_spec_sliding_window=None
    ),
)

pytestmark = pytest.mark.skipif(
    not hasattr(kv_cache_utils, "generate_lookahead_block_hash_extra_keys"),
    reason="vLLM 0.33 hashes tokens after a block, this one does not",
)


def test_events_of_chunks_have_vllms_lookahead_tokens() -> None:
    """Hashes, lookahead tokens and extra keys of each block are those of vLLM's own event."""
    kv_cache_utils.init_none_hash(sha256)
    request = Request(
        "request",
        list(range(1000, 1000 + BLOCKS * BLOCK + LOOKAHEAD)),
        SamplingParams(max_tokens=100),
        None,
        mm_features=[
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
            for offset, length, name in ((5, 12, "a"), (2 * BLOCK + 1, 10, "b"))
        ],
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, sha256, LOOKAHEAD),
    )
    pool = BlockPool(
        64, True, BLOCK, enable_kv_cache_events=True, num_hash_lookahead_tokens=LOOKAHEAD
    )
    blocks = pool.get_new_blocks(BLOCKS)
    pool.cache_full_blocks(request, blocks, 0, BLOCKS, BLOCK, 0)
    (own,) = pool.take_events()

    chunks = [
        describe(request, GROUP, end, BLOCK, LOOKAHEAD)
        for end in range(2 * BLOCK, BLOCKS * BLOCK + 1, 2 * BLOCK)
    ]
    places = {
        chunk.hashes[-1] + bytes(4): ChunkLocation(i, 1, 0, 2, 0) for i, chunk in enumerate(chunks)
    }
    announcer = Announcer(lambda place: decode(encode(chunks[place.slot])))
    events = [
        to_event(announced, event_hash_function())
        for announced in announcer.announce(Differences(places))
    ]
    assert all(isinstance(event, BlockStored) for event in events)

    def joined(name: str) -> list[Any]:
        return [value for event in events for value in getattr(event, name)]

    assert joined("block_hashes") == own.block_hashes
    assert joined("lookahead_token_ids") == own.lookahead_token_ids
    assert joined("token_ids") == own.token_ids
    extra = [value for event in events for value in event.extra_keys or [None, None]]
    assert extra == own.extra_keys
