"""From the KV caches that vLLM hands over to the layout that a daemon serves."""

import dataclasses
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

from kvd_client import RankLayout, TensorRef, TensorSpec, UnsupportedMemory
from kvd_client.vllm.layout import rank_layout, share_caches
from kvd_proto.layout import validate_layout
from tests.vllm.configs import (
    BLOCKS,
    PAGE,
    canonical,
    configured,
    full,
    latent,
    window,
)


def laid_out(
    folder: Path,
    *groups: KVCacheGroupSpec,
    caches: CanonicalKVCaches | None = None,
    changed: dict[str, Any] | None = None,
    **engine: Any,
) -> RankLayout:
    """What a rank with these groups registers; a daemon would take it.

    caches: instead of those that vLLM hands over; changed: fields of the offloading configuration.
    """
    vllm_config, kv_cache_config, config = configured(folder, *groups, **engine)
    caches = caches or canonical(vllm_config, kv_cache_config)
    shared = share_caches(caches)
    shared.close()
    config = dataclasses.replace(config, **(changed or {}))
    layout = rank_layout(caches, shared, config, kv_cache_config)
    validate_layout(layout)
    return layout


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


def test_replicas_are_passed_on(tmp_path: Path) -> None:
    """Whether all ranks hold the same bytes is vLLM's to know, and the daemon's to use."""
    layout = laid_out(tmp_path, latent(["a", "b"]), changed={"replicated_layout": True})
    assert layout.replicated
    assert layout.groups[0].kind == "MLAAttentionSpec"
    assert layout.group_bytes(0) == layout.share_bytes == 2 * 16 * 128 * 2


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
    rows = torch.zeros(2, BLOCKS, PAGE, dtype=torch.int8)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, PAGE) for tensor in rows],
        [[CanonicalKVCacheRef(index, PAGE) for index in range(2)]],
    )
    layout = laid_out(tmp_path, caches=caches, blocks=BLOCKS - 3)
    assert layout.num_blocks == BLOCKS - 3
    assert layout.used_bytes == rows.nbytes
    assert layout.share_bytes == rows.nbytes // (BLOCKS - 3)


def test_caches_that_lack_a_layer_are_refused(tmp_path: Path) -> None:
    """Layers that vLLM does not hand over would never be restored."""
    vllm_config, kv_cache_config, _ = configured(tmp_path)
    caches = canonical(vllm_config, kv_cache_config)
    caches.group_data_refs[0].pop()
    with pytest.raises(UnsupportedMemory, match=f"{PAGE} bytes a block, its 2 layers have"):
        laid_out(tmp_path, caches=caches)
