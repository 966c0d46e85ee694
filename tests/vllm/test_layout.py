"""From the KV caches that vLLM hands over to the layout that a daemon serves."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from kvd_client import RankLayout, TensorRef, TensorSpec, UnsupportedMemory
from kvd_client.vllm.layout import share_caches
from kvd_proto.layout import validate_layout
from tests.vllm.configs import (
    BLOCKS,
    PAGE,
    allocated,
    configured,
    full,
    latent,
    window,
)

Views = dict[str, torch.Tensor]


def as_it_is(views: Views, config: KVCacheConfig) -> None:
    """What vLLM hands over, unchanged."""
    del views, config


def laid_out(
    folder: Path,
    *groups: KVCacheGroupSpec,
    changed: dict[str, Any] | None = None,
    spoil: Callable[[Views, KVCacheConfig], None] = as_it_is,
    **engine: Any,
) -> RankLayout:
    """What a rank with these groups registers; a daemon would take it.

    changed: fields of the offloading configuration; spoil: changes what vLLM hands over.
    """
    vllm_config, kv_cache_config, config = configured(folder, *groups, **engine)
    views = allocated(vllm_config, kv_cache_config)
    spoil(views, kv_cache_config)
    config = dataclasses.replace(config, **(changed or {}))
    shared, layout = share_caches(views, config, kv_cache_config)
    shared.close()
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
    """Pages are as far apart as they are padded; what is registered is the bytes in use."""
    padded = PAGE + 2048
    layout = laid_out(tmp_path, full(["a", "b"], padded=padded))
    assert {(t.page_bytes, t.block_stride) for t in layout.tensors} == {(PAGE, padded)}
    assert layout.groups[0].refs == (TensorRef(0, PAGE), TensorRef(1, PAGE))
    assert layout.group_bytes(0) == 2 * PAGE
    assert layout.share_bytes == 2 * padded


def test_a_group_has_its_part_of_a_block_of_all_layers(tmp_path: Path) -> None:
    """Layers side by side are one page; a group of fewer layers has the block's beginning."""
    layout = laid_out(tmp_path, full(["a", "b"]), window(["c"]), layout="BLHNC")
    assert layout.storages == (2 * PAGE * BLOCKS,)
    block = 2 * PAGE
    assert layout.tensors == (TensorSpec(0, 0, block, block), TensorSpec(0, 0, PAGE, block))
    assert [group.refs for group in layout.groups] == [
        (TensorRef(0, block),),
        (TensorRef(1, PAGE),),
    ]
    assert layout.share_bytes == layout.group_bytes(0) == 2 * layout.group_bytes(1)


def test_little_padding_is_moved_along(tmp_path: Path) -> None:
    """A hundred bytes between two pages cost less than a copy more; the end's are left out."""
    padded = PAGE + PAGE // 32
    layout = laid_out(tmp_path, full(["a", "b", "c"], padded=padded), layout="BLHNC")
    assert layout.groups[0].refs == (TensorRef(0, 3 * PAGE + 2 * (PAGE // 32)),)
    more = laid_out(tmp_path, full(["a", "b", "c"], padded=padded + 32), layout="BLHNC")
    assert more.groups[0].refs == tuple(TensorRef(number, PAGE) for number in range(3))


def test_layers_that_share_anothers_pages_are_counted_once(tmp_path: Path) -> None:
    """A layer without a place of its own is a name for the same view."""

    def share(views: Views, config: KVCacheConfig) -> None:
        views["c"] = views["a"]
        config.kv_cache_groups[0].layer_names.append("c")

    layout = laid_out(tmp_path, full(["a", "b"]), spoil=share)
    assert layout.groups[0].refs == (TensorRef(0, PAGE), TensorRef(1, PAGE))


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


def test_the_null_block_is_the_one_that_vllm_never_hands_out(tmp_path: Path) -> None:
    """Its number in the layout is its number in vLLM's own block pool."""
    pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=16)
    layout = laid_out(tmp_path, full(["a", "b"]))
    assert layout.null_block == pool.null_block.block_id


def test_blocks_are_as_many_as_configured(tmp_path: Path) -> None:
    """With num_gpu_blocks_override the configured number counts."""
    layout = laid_out(tmp_path, blocks=BLOCKS - 3)
    assert layout.num_blocks == BLOCKS - 3
    assert layout.used_bytes == 2 * PAGE * (BLOCKS - 3)


def lacks(views: Views, config: KVCacheConfig) -> None:
    """A layer was not handed over."""
    del config, views["b"]


def elsewhere(views: Views, config: KVCacheConfig) -> None:
    """A layer lies where another was placed."""
    del config
    views["b"] = views["a"]


def farther(views: Views, config: KVCacheConfig) -> None:
    """Blocks are not as far apart as configured."""
    del views
    config.kv_cache_tensors[0].block_stride += 512


def on_the_host(views: Views, config: KVCacheConfig) -> None:
    """The pages are not in the memory that is offloaded."""
    del views
    config.kv_cache_tensors[0].host_resident = True
    config.hisparse_host_num_blocks = BLOCKS


def fewer_rows(views: Views, config: KVCacheConfig) -> None:
    """The views have not a whole number of rows for a block."""
    del config
    views["a"] = views["a"][1:]


def torn(views: Views, config: KVCacheConfig) -> None:
    """A page's bytes are not in one piece anywhere."""
    del config
    views["a"] = views["a"][..., ::2]


def unplaced(views: Views, config: KVCacheConfig) -> None:
    """A layer of the group has memory of its own."""
    views["c"] = views["a"].clone()
    config.kv_cache_groups[0].layer_names.append("c")


def nothing(views: Views, config: KVCacheConfig) -> None:
    """This rank has no layer of the group."""
    del views
    config.kv_cache_tensors.clear()


def doubled(views: Views, config: KVCacheConfig) -> None:
    """Two layers of a group have the same bytes."""
    config.kv_cache_tensors[0].layer_stride = 0
    views["b"] = views["a"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lacks, "layer b: vLLM hands over NoneType"),
        (elsewhere, rf"layer b begins at byte 0 .* configuration says {PAGE * BLOCKS}"),
        (farther, f"with blocks {PAGE} bytes apart, vLLM's configuration says 0 and {PAGE + 512}"),
        (on_the_host, "in host memory; this KV cache cannot be offloaded"),
        (fewer_rows, rf"{BLOCKS - 1} rows are no multiple of {BLOCKS} blocks"),
        (torn, "layer a: pages of shape .* cannot be moved"),
        (unplaced, "layer c has no place in the KV cache's allocation"),
        (nothing, "group 0 has no layer in this rank"),
        (doubled, "two layers of a group share bytes of their blocks at byte 0"),
    ],
)
def test_pages_that_are_not_where_vllm_says_are_refused(
    tmp_path: Path, spoil: Callable[[Views, KVCacheConfig], None], said: str
) -> None:
    """Bytes that might be others' are never moved: the rank runs without offload."""
    with pytest.raises(UnsupportedMemory, match=said):
        laid_out(tmp_path, spoil=spoil)
