"""From the KV caches that vLLM hands over to the layout that a daemon serves."""

import dataclasses
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from vllm.v1.kv_offload.config import OffloadingCacheConfig

from kvd_client import RankLayout, TensorRef, TensorSpec
from kvd_client.torch_memory import SharedTensors
from kvd_client.vllm.layout import rank_layout, share_caches
from kvd_proto.errors import LayoutError
from kvd_proto.layout import (
    validate_layout,
)
from tests.vllm.configs import (
    BLOCKS,
    PAGE,
    canonical,
    engine_config,
    full,
    latent,
    offloading_config,
    sized,
    window,
)


def laid_out(
    folder: Path,
    *groups: KVCacheGroupSpec,
    extra: dict[str, Any] | None = None,
    layout: str = "LBHNC",
) -> RankLayout:
    """What a rank with these groups registers; a daemon would take it."""
    vllm_config = engine_config(folder, extra, layout=layout)
    kv_cache_config = sized(vllm_config, *groups)
    caches = canonical(vllm_config, kv_cache_config)
    shared = share_caches(caches)
    registered = rank_layout(
        caches, shared, offloading_config(vllm_config, kv_cache_config), kv_cache_config
    )
    shared.close()
    validate_layout(registered)
    return registered


def by_hand(tensors: Sequence[torch.Tensor], groups: Sequence[Sequence[int]]) -> CanonicalKVCaches:
    """Canonical caches of whole rows; `groups[g]` lists the tensors of a group."""
    pages = [tensor.shape[1] * tensor.element_size() for tensor in tensors]
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(t, page) for t, page in zip(tensors, pages, strict=True)],
        [[CanonicalKVCacheRef(index, pages[index]) for index in group] for group in groups],
    )


def seen_by_others(shared: SharedTensors) -> list[mmap.mmap]:
    """Each storage as a process maps it that was given the descriptor."""
    return [mmap.mmap(memory.fd, memory.nbytes) for memory in shared.memory]


def test_layers_of_two_groups_that_lie_over_each_other(tmp_path: Path) -> None:
    """Full and window layers share their bytes: two tensors of one storage, both in each group."""
    layout = laid_out(tmp_path, full(["a", "b"]), window(["c", "d"]))
    assert layout.storages == (2 * PAGE * BLOCKS,)
    assert layout.tensors == (
        TensorSpec(storage=0, offset=0, page_bytes=PAGE, block_stride=PAGE),
        TensorSpec(storage=0, offset=PAGE * BLOCKS, page_bytes=PAGE, block_stride=PAGE),
    )
    both = (TensorRef(0, PAGE), TensorRef(1, PAGE))
    assert [group.refs for group in layout.groups] == [both, both]
    assert [group.kind for group in layout.groups] == ["FullAttentionSpec", "SlidingWindowSpec"]
    assert [group.sliding_window for group in layout.groups] == [None, 64]
    assert layout.share_bytes == layout.group_bytes(0) == layout.group_bytes(1) == 2 * PAGE


def test_a_group_with_fewer_layers_uses_fewer_tensors(tmp_path: Path) -> None:
    """Of three tensors the second group refers to the one that it lies over."""
    layout = laid_out(tmp_path, full(["a", "b", "c"]), window(["d"]))
    assert len(layout.tensors) == 3
    assert layout.groups[1].refs == (TensorRef(0, PAGE),)
    assert layout.group_bytes(1) == PAGE < layout.share_bytes == 3 * PAGE


def test_padding_is_counted_and_not_moved(tmp_path: Path) -> None:
    """Pages are as far apart as they are padded; refs name the bytes in use."""
    padded = PAGE + 2048
    layout = laid_out(tmp_path, full(["a", "b"], padded=padded))
    assert {(t.page_bytes, t.block_stride) for t in layout.tensors} == {(padded, padded)}
    assert layout.groups[0].refs == (TensorRef(0, PAGE), TensorRef(1, PAGE))
    assert layout.group_bytes(0) == 2 * PAGE
    assert layout.share_bytes == 2 * padded


def test_packed_blocks_are_one_page(tmp_path: Path) -> None:
    """Where a block holds all layers' pages, a chunk of any group is whole blocks."""
    layout = laid_out(tmp_path, full(["a", "b"]), window(["c"]), layout="BLHNC")
    assert layout.storages == (2 * PAGE * BLOCKS,)
    assert layout.tensors == (TensorSpec(0, 0, 2 * PAGE, 2 * PAGE),)
    assert [group.refs for group in layout.groups] == [(TensorRef(0, 2 * PAGE),)] * 2
    assert layout.share_bytes == layout.group_bytes(1) == 2 * PAGE


@pytest.mark.parametrize("replicated", [False, True])
def test_replicas_are_passed_on(tmp_path: Path, replicated: bool) -> None:
    """Whether all ranks hold the same bytes is vLLM's to know, and the daemon's to use."""
    vllm_config = engine_config(tmp_path)
    kv_cache_config = sized(vllm_config, latent(["a", "b"]))
    caches = canonical(vllm_config, kv_cache_config)
    config = offloading_config(vllm_config, kv_cache_config)
    shared = share_caches(caches)
    layout = rank_layout(
        caches,
        shared,
        dataclasses.replace(config, replicated_layout=replicated),
        kv_cache_config,
    )
    shared.close()
    validate_layout(layout)
    assert layout.replicated is replicated
    assert layout.groups[0].kind == "MLAAttentionSpec"
    assert layout.group_bytes(0) == layout.share_bytes == 2 * 16 * 128 * 2


def test_groups_with_different_block_sizes(tmp_path: Path) -> None:
    """Each group has its own tokens per block; hashes cover what divides them all."""
    layout = laid_out(tmp_path, full(["a", "b"]), window(["c", "d"], block_size=32, head_size=16))
    assert [group.block_size for group in layout.groups] == [16, 32]
    assert layout.hash_block_size == 16
    assert len(layout.tensors) == 2


@pytest.mark.parametrize(
    ("extra", "factor"), [({"blocks_per_chunk": 3}, 3), ({"block_size": 64}, 4), ({}, 1)]
)
def test_chunks_of_several_blocks(tmp_path: Path, extra: dict[str, Any], factor: int) -> None:
    """A chunk has as many blocks as vLLM was told, in blocks or in tokens."""
    layout = laid_out(tmp_path, full(["a", "b"]), extra=extra)
    assert layout.blocks_per_chunk == factor
    assert layout.share_bytes == layout.slot_bytes == 2 * PAGE * factor


def test_blocks_are_as_many_as_configured_not_as_a_tensor_has_rows(tmp_path: Path) -> None:
    """With num_gpu_blocks_override below what was allocated the configured number counts."""
    vllm_config = engine_config(tmp_path)
    kv_cache_config = sized(vllm_config, full(["a", "b"]), blocks=BLOCKS - 3)
    rows = torch.zeros(2, BLOCKS, PAGE, dtype=torch.int8)
    caches = by_hand(list(rows), [[0, 1]])
    shared = share_caches(caches)
    config = offloading_config(vllm_config, kv_cache_config)
    layout = rank_layout(caches, shared, config, kv_cache_config)
    shared.close()
    validate_layout(layout)
    assert layout.num_blocks == BLOCKS - 3
    assert layout.used_bytes == rows.nbytes
    assert layout.share_bytes == rows.nbytes // (BLOCKS - 3)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_the_engine_and_the_daemon_see_the_same_bytes(tmp_path: Path, layout: str) -> None:
    """Contents survive the move, and what is written on either side the other one reads."""
    vllm_config = engine_config(tmp_path, layout=layout)
    kv_cache_config = sized(vllm_config, full(["a", "b"]), window(["c", "d"]))
    caches = canonical(vllm_config, kv_cache_config)
    before = [cache.tensor.clone() for cache in caches.tensors]
    shared = share_caches(caches)
    maps = seen_by_others(shared)
    shared.close()
    for cache, kept, spec in zip(caches.tensors, before, shared.tensors, strict=True):
        assert torch.equal(cache.tensor, kept)
        other = maps[spec.storage]
        for block in range(BLOCKS):
            start = spec.offset + block * spec.block_stride
            page = bytes(kept[block].view(torch.uint8).tolist())
            assert other[start : start + spec.page_bytes] == page
            other[start : start + spec.page_bytes] = page[::-1]
            assert bytes(cache.tensor[block].view(torch.uint8).tolist()) == page[::-1]
            cache.tensor[block].fill_(block)
            assert other[start : start + spec.page_bytes] == bytes([block]) * spec.page_bytes


def test_kvd_refuses_it_where_vllm_does_not(tmp_path: Path) -> None:
    """The same in kvd's own check, which names the remedy."""
    vllm_config = engine_config(tmp_path)
    kv_cache_config = sized(vllm_config, full(["a", "b"]))
    caches = canonical(vllm_config, kv_cache_config)
    config = dataclasses.replace(
        offloading_config(vllm_config, kv_cache_config),
        cache=OffloadingCacheConfig(tokens_per_hash=24, blocks_per_chunk=1),
    )
    shared = share_caches(caches)
    layout = rank_layout(caches, shared, config, kv_cache_config)
    shared.close()
    with pytest.raises(LayoutError, match=r"block size 16 .* hash block size 24") as refused:
        validate_layout(layout)
    assert "--enable-prefix-caching" in str(refused.value)
