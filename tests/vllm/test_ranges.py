"""Which blocks of their chunks requests offer and need, as vLLM's scheduler has them."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key

from kvd_client.vllm.chunks import BlockRanges, skipped_tokens

BLOCK, SIZE = 16, 4  # tokens of a block, blocks of a chunk
CHUNK = BLOCK * SIZE


def spec(kind: type, **fields: Any) -> Any:
    """One of vLLM's specs with these fields alone."""
    made: Any = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def window(tokens: int) -> Any:
    """A sliding window."""
    return spec(SlidingWindowSpec, sliding_window=tokens, extra_retained_tokens=0)


def group(number: int, kv_cache_spec: Any, *, sparse: bool = True, cow: bool = False) -> Any:
    """A group's configuration."""
    return SimpleNamespace(
        group_idx=number,
        tokens_per_block=BLOCK,
        tokens_per_chunk=CHUNK,
        sliding_window_size_in_chunks=1 if sparse else None,
        requires_cow_source=cow,
        kv_cache_spec=kv_cache_spec,
    )


def keys_of(number: int, count: int = 4) -> list[OffloadKey]:
    """A request's keys in a group."""
    return [make_offload_key(b"%032d" % index, number) for index in range(count)]


def ranges_of(
    *groups: Any, computed: int = 0, blocks: list[int] | None = None
) -> tuple[BlockRanges, ReqContext]:
    """Of one request with four chunks in every group."""
    request = ReqContext("request")
    states = []
    for each in groups:
        keys = keys_of(each.group_idx)
        for index, key in enumerate(keys, 1):
            request.set_offload_key_position(key, index * CHUNK)
        states.append(
            SimpleNamespace(offload_keys=keys, block_ids=blocks or list(range(1, 4 * SIZE + 1)))
        )
    state = SimpleNamespace(group_states=tuple(states), num_locally_computed_tokens=computed)
    config: Any = SimpleNamespace(kv_group_configs=groups, blocks_per_chunk=SIZE)
    requests: Any = {"request": state}
    return BlockRanges(config, requests), request


def test_tokens_out_of_sight_are_those_of_vllms_managers() -> None:
    """For every kind of window and every number of tokens."""
    kinds = [
        (
            SlidingWindowManager,
            spec(SlidingWindowSpec, sliding_window=40, extra_retained_tokens=3),
        ),
        (ChunkedLocalAttentionManager, spec(ChunkedLocalAttentionSpec, attention_chunk_size=48)),
        (MambaManager, spec(MambaSpec)),
    ]
    for manager, kind in kinds:
        for computed in range(1, 200):
            vllms = manager.get_num_skipped_tokens(kind, computed)
            assert skipped_tokens(group(0, kind), computed) == max(0, vllms)


@pytest.mark.parametrize(
    ("computed", "tokens", "wanted"),
    [
        (0, 2 * CHUNK, {1: (0, 4)}),  # the window of a chunk ends with a chunk
        (0, 2 * CHUNK + BLOCK, {1: (1, 3), 2: (0, 1)}),
        (0, 2 * CHUNK - 1, {1: (0, 4)}),  # the last token is computed
        (0, 2 * CHUNK - BLOCK, {0: (3, 1), 1: (0, 3)}),
        (CHUNK + BLOCK, CHUNK - BLOCK, {1: (1, 3)}),  # the engine has the first block
        (3 * CHUNK, CHUNK, {3: (0, 4)}),
    ],
)
def test_a_window_needs_the_blocks_in_sight(
    computed: int, tokens: int, wanted: dict[int, tuple[int, int]]
) -> None:
    """Up to the end that is to be loaded, from the window's edge or what is computed on."""
    full, narrow = group(0, None, sparse=False), group(1, window(CHUNK))
    ranges, _ = ranges_of(full, narrow, computed=computed)
    keys = keys_of(1)
    needed = {keys[index]: blocks for index, blocks in wanted.items()}
    assert ranges.needed("request", tokens) == needed


def test_a_request_offers_the_blocks_that_it_has() -> None:
    """Of a chunk at a window's edge those behind it, of a recurrent state the last one."""
    narrow, recurrent = group(0, window(CHUNK)), group(1, spec(MambaSpec), cow=True)
    ranges, request = ranges_of(
        narrow, recurrent, blocks=[0, 0, 0, 0, 0, 0, 7, 8, 9, 10, 11, 12, 0, 14, 15, 16]
    )
    offered = [ranges.offered(key, request) for key in keys_of(0)[1:]]
    assert offered == [(2, 2), (0, 4), (1, 3)]
    assert ranges.offered(keys_of(1)[1], request) == (3, 1)
    assert ranges.offered(keys_of(0)[1], ReqContext("unknown")) == ranges.all_blocks
