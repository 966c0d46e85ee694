"""From the KV caches that vLLM hands over to the layout that a daemon serves, to the last byte."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.worker.utils import allocate_kv_cache

from kvd_client import RankLayout, TensorRef, UnsupportedMemory
from kvd_client.vllm.layout import share_caches
from kvd_proto.layout import validate_layout
from tests.vllm import configs
from tests.vllm.configs import PAGE, allocated, configured, full, latent, whole
from tests.vllm.kv_models import ATTENTION, BLOCKS, MODELS, OUTERMOST, made
from tests.vllm.moving import Lane, Views, owned, pages

SOURCE, TARGET = [9, 10, 3, 4, 5], [2, 6, 7, 8, 12]  # neighbours and not, no block twice
EACH = [(model, layout) for model, (_, layouts) in MODELS.items() for layout in layouts]


def registered(views: Views, config: OffloadingConfig, cache: KVCacheConfig) -> RankLayout:
    """What a rank registers; a daemon would take it."""
    shared, layout = share_caches(views, config, cache)
    shared.close()
    validate_layout(layout)
    return layout


def fragments(layout: RankLayout) -> list[int]:
    """How many a block has, group by group."""
    return [len(group.refs) for group in layout.groups]


def check_bytes(views: Views, cache: KVCacheConfig, layout: RankLayout, index: int) -> None:
    """Store blocks of each group from this index on, overwrite all, load them into others."""
    memory = whole(views)
    for number, group in enumerate(cache.kv_cache_groups):
        lane, layers = Lane(layout, memory, slots=8), list(group.layer_names)
        memory.random_(-128, 128)
        before = pages(views, layers, SOURCE, cache.num_blocks)
        lane.move(lane.job(number, index, SOURCE), store=True)
        memory.random_(-128, 128)
        wiped = memory.clone()
        lane.move(lane.job(number, index, TARGET), store=False)
        after = pages(views, layers, TARGET, cache.num_blocks)
        assert all(map(torch.equal, before, after))
        used, theirs = owned(views, cache, layers, TARGET)
        changed = memory != wiped
        assert not bool((changed & ~theirs).any())  # a block's padding is its own
        padding = int((changed & ~used).sum())
        assert padding <= int(used.sum()) // 32
    assert not bool((lane.pool[: layout.slot_bytes] != 0x55).any())  # no slot before the first


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize(("model", "name"), EACH)
def test_blocks_come_back_as_they_were(tmp_path: Path, model: str, name: str, factor: int) -> None:
    """Through vLLM's views: pages of other blocks get the bytes, and nothing else changes."""
    vllm_config, cache, config = made(tmp_path, model, name, blocks_per_chunk=factor)
    views = allocated(vllm_config, cache)
    layout = registered(views, config, cache)
    check_bytes(views, cache, layout, index=4)  # with a factor of 3 in the middle of a chunk


@pytest.mark.parametrize("factor", [1, 4])
@pytest.mark.parametrize(
    ("model", "fragments_of"),
    [
        ("dense", [1]),
        ("grouped", [1]),
        ("latent", [1]),
        ("window", [1] * 7),
        ("unlike", [1]),
        ("indexed", [1]),
        ("compressed", [1] * 3),
        ("mixed", [1] * 7),
        ("recurrent", [1, 2, 2, 2]),  # a state is an eighth shorter than its page
        ("padded", [3]),
    ],
)
def test_a_block_of_all_layers_is_one_fragment(
    tmp_path: Path, model: str, fragments_of: list[int], factor: int
) -> None:
    """Pages that follow each other are one, with every chunk size; much padding is left out."""
    for name in OUTERMOST:
        vllm_config, cache, config = made(tmp_path, model, name, blocks_per_chunk=factor)
        layout = registered(allocated(vllm_config, cache), config, cache)
        assert fragments(layout) == fragments_of


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC"])
def test_blocks_in_parts_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    """A backend that takes 16 tokens gets a block of 64 as four: the page is the same bytes."""
    vllm_config, cache, config = made(tmp_path, "recurrent", name)
    layout_of = vllm_config.cache_config.get_resolved_kv_cache_layout()
    kernels = [16, *(64 for _ in cache.kv_cache_groups[1:])]
    views = allocate_kv_cache(cache, torch.device("cpu"), layout_of, kernels)
    assert views["layers.0.attn"].shape[0] == 4 * BLOCKS
    layout = registered(views, config, cache)
    check_bytes(views, cache, layout, index=0)
    plain = registered(allocated(vllm_config, cache), config, cache)
    assert layout.pages == plain.pages
    assert layout.contents != plain.contents  # another order of heads and tokens


def test_engines_whose_bytes_are_in_another_order_share_nothing(tmp_path: Path) -> None:
    """Blocks of equal size differ by the order of layers, heads and tokens in them."""
    seen = {}
    for name in KVCacheLayout.__members__:
        vllm_config, cache, config = made(tmp_path, "dense", name)
        seen[name] = registered(allocated(vllm_config, cache), config, cache)
    assert seen["BLHNC"].pages == seen["BLNHC"].pages == seen["BHLNC"].pages
    digests = {(layout.pages, layout.contents) for layout in seen.values()}
    assert len(digests) == len(seen)


def test_more_blocks_are_the_same_bytes(tmp_path: Path) -> None:
    """Engines with more or less memory share chunks, wherever layers and heads lie."""
    for name in KVCacheLayout.__members__:
        layouts = []
        for blocks in (BLOCKS, 3 * BLOCKS):
            vllm_config, cache, config = made(tmp_path, "dense", name, blocks=blocks)
            layouts.append(registered(allocated(vllm_config, cache), config, cache))
        assert layouts[0].pages == layouts[1].pages
        assert layouts[0].contents == layouts[1].contents


def test_equal_sums_of_other_layers_are_other_contents(tmp_path: Path) -> None:
    """Which layers of a block have the larger pages is told apart, though it is one fragment."""
    of_each = []
    for larger in (0, 3):
        vllm_config, _, config = made(tmp_path, "dense", "BLHNC")
        specs: dict[str, KVCacheSpec] = {
            f"layers.{at}": FullAttentionSpec(
                block_size=16, **ATTENTION | {"num_kv_heads": 8 if at == larger else 4}
            )
            for at in range(4)
        }
        groups = get_kv_cache_groups(vllm_config, specs)
        cache = get_kv_cache_config_from_groups(vllm_config, groups, available_memory=0)
        of_each.append(registered(allocated(vllm_config, cache), config, cache))
    first, second = of_each
    assert (first.pages, first.kinds) == (second.pages, second.kinds)
    assert first.contents != second.contents


# ------------------------------------------------------------ what vLLM says of its memory


def laid_out(folder: Path, spoiled: str = "", **engine: Any) -> RankLayout:
    """What a rank with two layers registers, with something changed in what vLLM hands over."""
    vllm_config, kv_cache_config, config = configured(folder, full(["a", "b"]), **engine)
    views = allocated(vllm_config, kv_cache_config)
    spoil(spoiled, views, kv_cache_config)
    return registered(views, config, kv_cache_config)


def spoil(what: str, views: dict[str, torch.Tensor], config: KVCacheConfig) -> None:
    """Change what vLLM hands over, or its own description of it."""
    placed, layers = config.kv_cache_tensors, config.kv_cache_groups[0].layer_names
    match what:
        case "layer missing":
            del views["b"]
        case "layer elsewhere":
            views["b"] = views["a"]
        case "blocks farther apart":
            placed[0].block_stride += 512
        case "in host memory":
            placed[0].host_resident, config.hisparse_host_num_blocks = True, configs.BLOCKS
        case "fewer rows":
            views["a"] = views["a"][1:]
        case "pages in pieces":
            views["a"] = views["a"][..., ::2]
        case "layer with memory of its own":
            views["c"] = views["a"].clone()
            layers.append("c")
        case "layer with another's memory":
            views["c"] = views["a"]
            layers.append("c")
        case "no layer":
            placed.clear()
        case "two layers in one place":
            placed[0].layer_stride = 0
            views["b"] = views["a"]


@pytest.mark.parametrize(
    ("spoiled", "said"),
    [
        ("layer missing", "layer b: vLLM hands over NoneType"),
        (
            "layer elsewhere",
            rf"layer b begins at byte 0 .* configuration says {PAGE * configs.BLOCKS}",
        ),
        (
            "blocks farther apart",
            f"with blocks {PAGE} bytes apart, vLLM's configuration says 0 and {PAGE + 512}",
        ),
        ("in host memory", "in host memory; this KV cache cannot be offloaded"),
        ("fewer rows", rf"{configs.BLOCKS - 1} rows are no multiple of {configs.BLOCKS} blocks"),
        ("pages in pieces", "layer a: pages of shape .* cannot be moved"),
        ("layer with memory of its own", "layer c has no place in the KV cache's allocation"),
        ("no layer", "group 0 has no layer in this rank"),
        (
            "two layers in one place",
            "two layers of a group share bytes of their blocks at byte 0",
        ),
    ],
)
def test_pages_that_are_not_where_vllm_says_are_refused(
    tmp_path: Path, spoiled: str, said: str
) -> None:
    """Bytes that might be others' are never moved: the rank runs without offload."""
    with pytest.raises(UnsupportedMemory, match=said):
        laid_out(tmp_path, spoiled)


def test_layers_that_share_anothers_pages_are_counted_once(tmp_path: Path) -> None:
    """A layer without a place of its own is a name for the same view."""
    layout = laid_out(tmp_path, "layer with another's memory")
    assert layout.groups[0].refs == (TensorRef(0, PAGE), TensorRef(1, PAGE))


def test_replicas_are_passed_on(tmp_path: Path) -> None:
    """Whether all ranks hold the same bytes is vLLM's to know, and the daemon's to use."""
    vllm_config, cache, config = configured(tmp_path, latent(["a", "b"]))
    config = dataclasses.replace(config, replicated_layout=True)
    layout = registered(allocated(vllm_config, cache), config, cache)
    assert layout.replicated
    assert layout.groups[0].kind == "MLAAttentionSpec"


@pytest.mark.parametrize(
    ("extra", "factor"), [({"blocks_per_chunk": 3}, 3), ({"block_size": 64}, 4), ({}, 1)]
)
def test_chunks_of_several_blocks(tmp_path: Path, extra: dict[str, Any], factor: int) -> None:
    """A chunk has as many blocks as vLLM was told, in blocks or in tokens."""
    layout = laid_out(tmp_path, extra=extra)
    assert layout.blocks_per_chunk == factor
    assert layout.share_bytes == layout.slot_bytes == 2 * PAGE * factor


def test_the_null_block_is_the_one_that_vllm_never_hands_out(tmp_path: Path) -> None:
    """Its number in the layout is its number in vLLM's own block pool."""
    pool = BlockPool(configs.BLOCKS, enable_caching=True, hash_block_size=16)
    assert laid_out(tmp_path).null_block == pool.null_block.block_id
