"""From the KV caches that vLLM hands over to the layout that a daemon serves."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from kvd_client import RankLayout, TensorRef, UnsupportedMemory
from kvd_client.vllm.layout import share_caches
from kvd_proto.layout import validate_layout
from tests.vllm.configs import (
    BLOCKS,
    PAGE,
    allocated,
    configured,
    full,
    latent,
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
