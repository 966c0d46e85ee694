"""Every byte of every kind of KV cache, in each layout: stored, and loaded into other blocks."""

import itertools
from pathlib import Path

import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.worker.utils import allocate_kv_cache

from kvd_client import RankLayout
from kvd_client.vllm.layout import share_caches
from kvd_proto.layout import validate_layout
from tests.vllm.configs import allocated, whole
from tests.vllm.kv_models import ATTENTION, BLOCKS, MODELS, OUTERMOST, made
from tests.vllm.moving import Lane, Views, owned, pages

SOURCE, TARGET = [9, 10, 3, 4, 5], [2, 6, 7, 8, 12]  # neighbours and not, no block twice
EACH = [(model, layout) for model, (_, layouts) in MODELS.items() for layout in layouts]
REFUSED = [
    (model, layout)
    for model, layout in itertools.product(MODELS, KVCacheLayout.__members__)
    if layout not in MODELS[model][1]
]


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
