"""What vLLM's state of a request says of its chunks: descriptions, and which blocks they have.

A stored chunk is described as vLLM's own events describe the same blocks on the GPU.
"""

import struct
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from vllm import SamplingParams
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    RequestOffloadState,
    SchedulerOffloadConfig,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
)
from vllm.v1.kv_offload.base import (
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    make_offload_key,
)
from vllm.v1.request import Request

from kvd_client.vllm import KvdOffloadingSpec
from kvd_client.vllm.chunks import BlockRanges, ChunkDescriber, skipped_tokens
from kvd_proto.descriptions import Description, decode
from tests.vllm.configs import BLOCK, configured, full, window

PROMPT_BLOCKS = 16
CHUNK = 4 * BLOCK  # tokens of a chunk, where ranges of its blocks matter
REQUESTS: dict[str, dict[str, Any]] = {
    "text": {},
    "salt": {"cache_salt": "pepper"},
    "lora": {"lora_request": LoRARequest("adapter", 3, "/adapters/3")},
    # The first image ends inside a block, the second begins in the same one, the third is in two.
    "images": {"mm_features": [(5, 30, "a"), (40, 90, "b"), (160, 17, "a")]},
    "everything": {
        "mm_features": [(0, 100, "a")],
        "cache_salt": "pepper",
        "lora_request": LoRARequest("adapter", 3, "/adapters/3"),
    },
}


class Block(NamedTuple):
    """What an event says of one block."""

    group: int
    hash: object
    parent: object
    tokens: tuple[int, ...]
    extra: tuple[Any, ...] | None
    lora: str | None


def make_request(mm_features: Iterable[tuple[int, int, str]] = (), **fields: Any) -> Request:
    """A request of some blocks and a half, with these images (place, length, identifier)."""
    init_none_hash(sha256)
    features = [
        MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))
        for offset, length, identifier in mm_features
    ]
    return Request(
        "request",
        list(range(1000, 1000 + PROMPT_BLOCKS * BLOCK + BLOCK // 2)),
        SamplingParams(max_tokens=100),
        None,
        mm_features=features,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        **fields,
    )


class Tracked:
    """The offloading logic's state of one request, and what kvd reads from it.

    Attributes:
        keys: of its chunks, group by group.
    """

    def __init__(
        self, folder: Path, request: Request, *groups: KVCacheGroupSpec, blocks_per_chunk: int
    ) -> None:
        vllm_config, kv_cache_config, config = configured(
            folder, *groups, extra={"blocks_per_chunk": blocks_per_chunk}
        )
        spec = KvdOffloadingSpec(config, vllm_config, kv_cache_config)
        self.config = SchedulerOffloadConfig.from_spec(spec, vllm_config, kv_cache_config)
        self.context = ReqContext("request")
        self.state = RequestOffloadState(
            self.config, request, self.context, RequestOffloadingContext()
        )
        self.state.update_offload_keys()
        self.keys = [group.offload_keys for group in self.state.group_states]
        self.ranges = BlockRanges(self.config, {"request": self.state})
        self._describer = ChunkDescriber(self.config, {"request": self.state})

    def described(self, key: OffloadKey) -> Description:
        """Of a chunk, as the daemon gives it back."""
        return decode(self._describer.encoded(key, self.context))

    def blocks(self) -> list[Block]:
        """Of all chunks, group by group."""
        return [
            block
            for keys in self.keys
            for key in keys
            for block in taken_apart(self.described(key))
        ]


def taken_apart(chunk: Description) -> list[Block]:
    """The blocks of a described chunk."""
    tokens = struct.unpack(f"<{len(chunk.tokens) // 4}I", chunk.tokens)
    hashes = [maybe_convert_block_hash(value) for value in chunk.hashes]
    parents = [maybe_convert_block_hash(chunk.parent) if chunk.parent else None, *hashes]
    size = chunk.block_size
    return [
        Block(
            chunk.group,
            value,
            parents[i],
            tokens[i * size : (i + 1) * size],
            chunk.extra[i] if chunk.extra else None,
            chunk.lora,
        )
        for i, value in enumerate(hashes)
    ]


def on_gpu(request: Request, group: int, block_size: int = BLOCK, at_once: int = 5) -> list[Block]:
    """What vLLM publishes of the request's blocks, so many of them cached in one step."""
    pool = BlockPool(64, True, BLOCK, enable_kv_cache_events=True)
    count = request.num_tokens // block_size
    cached = pool.get_new_blocks(count)
    for begin in range(0, count, at_once):
        end = min(begin + at_once, count)
        pool.cache_full_blocks(request, cached, begin, end, block_size, group)
    blocks: list[Block] = []
    for event in pool.take_events():
        assert isinstance(event, BlockStored)
        assert (event.group_idx, event.block_size) == (group, block_size)
        assert event.extra_keys is not None
        parents = [event.parent_block_hash, *event.block_hashes]
        blocks += [
            Block(
                group,
                value,
                parents[i],
                tuple(event.token_ids[i * block_size : (i + 1) * block_size]),
                event.extra_keys[i],
                event.lora_name,
            )
            for i, value in enumerate(event.block_hashes)
        ]
    return blocks


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
@pytest.mark.parametrize("kind", REQUESTS)
def test_chunks_are_described_as_vllm_describes_their_blocks(
    tmp_path: Path, kind: str, blocks_per_chunk: int
) -> None:
    """Hashes, parents, tokens, extra keys and adapter, of a full group and one with a window."""
    request = make_request(**REQUESTS[kind])
    groups = [full(["a", "b"]), window(["c", "d"])]
    tracked = Tracked(tmp_path, request, *groups, blocks_per_chunk=blocks_per_chunk)
    assert tracked.blocks() == [block for group in (0, 1) for block in on_gpu(request, group)]
    assert len(tracked.blocks()) == 2 * PROMPT_BLOCKS
    for number, group in enumerate(groups):
        first = tracked.described(tracked.keys[number][0])
        assert first.kind == get_kv_cache_spec_kind(group.kv_cache_spec).value
        assert first.window == (64 if number else None)
        assert (first.extra is None) == (kind == "text")


def test_blocks_of_several_hashes_have_the_last_one(tmp_path: Path) -> None:
    """Where a group's blocks are larger than another's, as vLLM resolves its hashes."""
    request = make_request(**REQUESTS["images"])
    wide = window(["c", "d"], 2 * BLOCK, 16)
    tracked = Tracked(tmp_path, request, full(["a", "b"]), wide, blocks_per_chunk=2)
    assert tracked.blocks() == [*on_gpu(request, 0), *on_gpu(request, 1, 2 * BLOCK)]


def test_a_tail_is_one_block_of_its_tokens(tmp_path: Path) -> None:
    """A recurrent state inside a chunk is of use only for a prompt that has all of its tokens."""
    request = make_request(**REQUESTS["images"])
    tracked = Tracked(tmp_path, request, full(["a", "b"]), blocks_per_chunk=4)
    end = 7 * BLOCK
    key = make_offload_key(request.block_hashes[6], 0)
    tracked.context.set_offload_key_position(key, end)
    (tail,) = taken_apart(tracked.described(key))
    (hash_of_chunk,) = {maybe_convert_block_hash(request.block_hashes[3])}
    assert tail == Block(
        group=0,
        hash=maybe_convert_block_hash(request.block_hashes[6]),
        parent=hash_of_chunk,
        tokens=tuple(request.all_token_ids[4 * BLOCK : end]),
        extra=(("b", 40 - 4 * BLOCK),),
        lora=None,
    )


# ------------------------------------------------------- blocks that are offered and needed


def spec_of(kind: type, **fields: Any) -> Any:
    """One of vLLM's specs with these fields alone."""
    spec: Any = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(spec, name, value)
    return spec


def test_tokens_out_of_sight_are_those_of_vllms_managers() -> None:
    """For every kind of window and every number of tokens."""
    window_spec = spec_of(SlidingWindowSpec, sliding_window=40, extra_retained_tokens=3)
    local_spec = spec_of(ChunkedLocalAttentionSpec, attention_chunk_size=48)
    for manager, spec in (
        (SlidingWindowManager, window_spec),
        (ChunkedLocalAttentionManager, local_spec),
        (MambaManager, spec_of(MambaSpec)),
    ):
        group: Any = SimpleNamespace(kv_cache_spec=spec)
        for computed in range(1, 200):
            num_skipped = manager.get_num_skipped_tokens(spec, computed)
            assert skipped_tokens(group, computed) == max(0, num_skipped)


@pytest.mark.parametrize(
    ("computed", "tokens", "needed"),
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
    tmp_path: Path, computed: int, tokens: int, needed: dict[int, tuple[int, int]]
) -> None:
    """Up to the end that is to be loaded, from the window's edge or what is computed on."""
    groups = full(["a", "b"]), window(["c", "d"])
    tracked = Tracked(tmp_path, make_request(), *groups, blocks_per_chunk=4)
    tracked.state.num_locally_computed_tokens = computed
    assert tracked.ranges.needed("request", tokens) == {
        tracked.keys[1][chunk]: blocks for chunk, blocks in needed.items()
    }


def test_a_request_offers_the_blocks_that_it_has(tmp_path: Path) -> None:
    """Of a chunk at a window's edge those behind it, of a recurrent state the last one."""
    tracked = Tracked(tmp_path, make_request(), window(["c", "d"]), blocks_per_chunk=4)
    tracked.state.group_states[0].block_ids = [0, 0, 0, 0, 0, 0, 7, 8, 9, 10, 11, 12, 0, 14, 15, 16]
    (keys,) = tracked.keys
    offered = [tracked.ranges.offered(key, tracked.context) for key in keys[1:]]
    assert offered == [(2, 2), (0, 4), (1, 3)]
    assert tracked.ranges.offered(keys[1], ReqContext("unknown")) == tracked.ranges.all_blocks
    (group,) = tracked.config.kv_group_configs
    recurrent: Any = SimpleNamespace(
        kv_group_configs=[group._replace(requires_cow_source=True)], blocks_per_chunk=4
    )
    assert BlockRanges(recurrent, {}).offered(keys[1], tracked.context) == (3, 1)
