"""A stored chunk is described as vLLM's own events describe the same blocks on the GPU."""

import struct
from collections.abc import Iterable
from pathlib import Path
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
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, get_kv_cache_spec_kind
from vllm.v1.kv_offload.base import (
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    make_offload_key,
)
from vllm.v1.request import Request

from kvd_client.vllm import KvdOffloadingSpec
from kvd_client.vllm.chunks import ChunkDescriber
from kvd_proto.descriptions import Description, decode
from tests.vllm.configs import BLOCK, configured, full, window

PROMPT_BLOCKS = 12
SIZES = (1, 4)  # blocks of a chunk
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


def make_request(
    mm_features: Iterable[tuple[int, int, str]] = (), hash_tokens: int = BLOCK, **fields: Any
) -> Request:
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
        block_hasher=get_request_block_hasher(hash_tokens, sha256),
        **fields,
    )


class Described:
    """The offloading logic's state of one request, and what its chunks are described as."""

    def __init__(
        self, folder: Path, request: Request, *groups: KVCacheGroupSpec, blocks_per_chunk: int = 1
    ) -> None:
        vllm_config, kv_cache_config, config = configured(
            folder, *groups, extra={"blocks_per_chunk": blocks_per_chunk}
        )
        spec = KvdOffloadingSpec(config, vllm_config, kv_cache_config)
        self.config = SchedulerOffloadConfig.from_spec(spec, vllm_config, kv_cache_config)
        self.context = ReqContext("request")
        state = RequestOffloadState(self.config, request, self.context, RequestOffloadingContext())
        state.update_offload_keys()
        self.keys = [group.offload_keys for group in state.group_states]
        self.describer = ChunkDescriber(self.config, {"request": state})

    def read(self, key: OffloadKey) -> Description:
        """Of a chunk, as the daemon gives it back."""
        return decode(self.describer.encoded(key, self.context))

    def blocks(self) -> list[Block]:
        """Of all chunks, group by group."""
        return [
            block for keys in self.keys for key in keys for block in taken_apart(self.read(key))
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


@pytest.mark.parametrize("blocks_per_chunk", SIZES)
@pytest.mark.parametrize("kind", REQUESTS)
def test_chunks_are_described_as_vllm_describes_their_blocks(
    tmp_path: Path, kind: str, blocks_per_chunk: int
) -> None:
    """Hashes, parents, tokens, extra keys and adapter, of a full group and one with a window."""
    request = make_request(**REQUESTS[kind])
    groups = [full(["a", "b"]), window(["c", "d"])]
    described = Described(tmp_path, request, *groups, blocks_per_chunk=blocks_per_chunk)
    assert described.blocks() == [block for group in (0, 1) for block in on_gpu(request, group)]
    assert len(described.blocks()) == 2 * PROMPT_BLOCKS
    for number, group in enumerate(groups):
        found = described.read(described.keys[number][0])
        assert found.kind == get_kv_cache_spec_kind(group.kv_cache_spec).value
        assert found.window == (64 if number else None)
        assert (found.extra is None) == (kind == "text")


def test_blocks_of_several_hashes_have_the_last_one(tmp_path: Path) -> None:
    """Where a group's blocks are larger than another's, as vLLM resolves its hashes."""
    request = make_request(**REQUESTS["images"])
    wide = window(["c", "d"], 2 * BLOCK, 16)
    described = Described(tmp_path, request, full(["a", "b"]), wide, blocks_per_chunk=2)
    assert described.blocks() == [*on_gpu(request, 0), *on_gpu(request, 1, 2 * BLOCK)]


def test_a_tail_is_one_block_of_its_tokens(tmp_path: Path) -> None:
    """A recurrent state inside a chunk is of use only for a prompt that has all of its tokens."""
    request = make_request(**REQUESTS["images"])
    described = Described(tmp_path, request, full(["a", "b"]), blocks_per_chunk=4)
    end = 7 * BLOCK
    key = make_offload_key(request.block_hashes[6], 0)
    described.context.set_offload_key_position(key, end)
    (tail,) = taken_apart(described.read(key))
    (hash_of_chunk,) = {maybe_convert_block_hash(request.block_hashes[3])}
    assert tail == Block(
        group=0,
        hash=maybe_convert_block_hash(request.block_hashes[6]),
        parent=hash_of_chunk,
        tokens=tuple(request.all_token_ids[4 * BLOCK : end]),
        extra=(("b", 40 - 4 * BLOCK),),
        lora=None,
    )
