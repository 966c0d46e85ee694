"""From the KV caches that vLLM hands over to the layout that a daemon serves, to the last byte."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvd_client import RankLayout, TensorRef, UnsupportedMemory
from kvd_proto.expand import Expander
from kvd_proto.jobs import JobBlocks, chunks_per_group
from tests.vllm import configs
from tests.vllm.configs import (
    PAGE,
    allocated,
    configured,
    latent,
    pages,
    placed,
    registered,
    rows,
    whole,
)
from tests.vllm.kv_models import ATTENTION, BLOCKS, MODELS, OUTERMOST, made

SOURCE, TARGET = [9, 10, 3, 4, 5], [2, 6, 7, 8, 12]  # neighbours and not, no block twice
SLOTS = 8
EACH = [(model, layout) for model, (_, layouts) in MODELS.items() for layout in layouts]
LAYOUTS = [*KVCacheLayout.__members__]

Views = Mapping[str, torch.Tensor]


def job_of(layout: RankLayout, group: int, index: int, blocks: list[int]) -> JobBlocks:
    """Blocks of one group from this index on; its chunks are in the last slots."""
    sizes, indices = [0] * len(layout.groups), [0] * len(layout.groups)
    sizes[group], indices[group] = len(blocks), index
    count = sum(chunks_per_group(sizes, indices, layout.blocks_per_chunk))
    job = JobBlocks.of(blocks, sizes, indices, range(SLOTS - count, SLOTS), [1] * count)
    job.check(layout, SLOTS)
    return job


def runs_of(layout: RankLayout, job: JobBlocks) -> list[tuple[slice, slice]]:
    """Bytes of the memory and of the pool to copy; both ways to expand a job give the same."""
    expander = Expander(layout)
    copies = expander.expand_many(job)
    copies.check_bounds(layout.storages, SLOTS * layout.slot_bytes)
    assert sorted(copies.runs) == sorted(expander.expand_few(job))
    assert {storage for storage, *_ in copies.runs} == {0}
    return [
        (slice(offset, offset + nbytes), slice(slot_offset, slot_offset + nbytes))
        for _, offset, slot_offset, nbytes in copies.runs
    ]


def owned(
    views: Views, config: KVCacheConfig, layers: list[str], blocks: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which bytes are pages of these blocks, and which are theirs at all, padding included.

    bool[bytes of the cache] each.
    """
    used, slots = torch.zeros(2, whole(views).numel(), dtype=torch.bool)
    for tensor in config.kv_cache_tensors:
        for layer in set(tensor.layers).intersection(layers):
            view = views[layer]
            width = view.element_size()
            mask = used.as_strided(
                (*view.shape, width),
                (*(stride * width for stride in view.stride()), 1),
                view.storage_offset() * width,
            )
            for block in blocks:
                rows(mask, block, config.num_blocks)[:] = True
                if tensor.block_stride > tensor.layer_stride:  # all layers of a block are here
                    begin = block * tensor.block_stride
                    slots[begin : begin + tensor.block_stride] = True
    return used, slots | used


def layout_of(folder: Path, model: str, layout: str, **sizes: int) -> RankLayout:
    """What a rank of such an engine registers; see `made`."""
    vllm_config, cache, config = made(folder, model, layout, **sizes)
    return registered(allocated(vllm_config, cache), config, cache)


def check_bytes(views: Views, cache: KVCacheConfig, layout: RankLayout, index: int) -> None:
    """Store blocks of each group from this index on, overwrite all, load them into others."""
    memory = whole(views)
    content = memory.numpy().view(np.uint8)
    for number, group in enumerate(cache.kv_cache_groups):
        pool, layers = np.full(SLOTS * layout.slot_bytes, 0x55, np.uint8), list(group.layer_names)
        memory.random_(-128, 128)
        before = pages(views, layers, SOURCE, cache.num_blocks)
        for blocks, slots in runs_of(layout, job_of(layout, number, index, SOURCE)):
            pool[slots] = content[blocks]
        memory.random_(-128, 128)
        overwritten = memory.clone()
        for blocks, slots in runs_of(layout, job_of(layout, number, index, TARGET)):
            content[blocks] = pool[slots]
        after = pages(views, layers, TARGET, cache.num_blocks)
        assert all(map(torch.equal, before, after))
        used, owned_by_blocks = owned(views, cache, layers, TARGET)
        changed = memory != overwritten
        assert not bool((changed & ~owned_by_blocks).any())  # a block's padding is its own
        assert int((changed & ~used).sum()) <= int(used.sum()) // 32
        assert not bool((pool[: layout.slot_bytes] != 0x55).any())  # no slot before the first


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize(("model", "name"), EACH)
def test_blocks_come_back_as_they_were(tmp_path: Path, model: str, name: str, factor: int) -> None:
    """Through vLLM's views: pages of other blocks get the bytes, and nothing else changes."""
    vllm_config, cache, config = made(tmp_path, model, name, blocks_per_chunk=factor)
    views = allocated(vllm_config, cache)
    layout = registered(views, config, cache)
    assert layout.blocks_per_chunk == factor
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
        layout = layout_of(tmp_path, model, name, blocks_per_chunk=factor)
        assert [len(group.refs) for group in layout.groups] == fragments_of


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC"])
def test_blocks_in_parts_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    """A backend that takes 16 tokens gets a block of 64 as four: the page is the same bytes."""
    vllm_config, cache, config = made(tmp_path, "recurrent", name)
    kernels = [16, *(64 for _ in cache.kv_cache_groups[1:])]
    views = allocate_kv_cache(
        cache,
        torch.device("cpu"),
        vllm_config.cache_config.get_resolved_kv_cache_layout(),
        kernels,
    )
    assert views["layers.0.attn"].shape[0] == 4 * BLOCKS
    layout = registered(views, config, cache)
    check_bytes(views, cache, layout, index=0)
    plain = layout_of(tmp_path, "recurrent", name)
    assert layout.pages == plain.pages
    assert layout.contents != plain.contents  # another order of heads and tokens


def test_engines_whose_bytes_are_in_another_order_share_nothing(tmp_path: Path) -> None:
    """Blocks of equal size differ by the order of layers, heads and tokens in them.

    Engines with more or less memory share chunks, wherever layers and heads lie.
    """
    layouts = {name: layout_of(tmp_path, "dense", name) for name in LAYOUTS}
    assert layouts["BLHNC"].pages == layouts["BLNHC"].pages == layouts["BHLNC"].pages
    digests = {(layout.pages, layout.contents) for layout in layouts.values()}
    assert len(digests) == len(LAYOUTS)
    for name, layout in layouts.items():
        larger = layout_of(tmp_path, "dense", name, blocks=3 * BLOCKS)
        assert (larger.pages, larger.contents) == (layout.pages, layout.contents)


def test_equal_sums_of_other_layers_are_other_contents(tmp_path: Path) -> None:
    """Which layers of a block have the larger pages is told apart, though it is one fragment."""
    layouts = []
    for larger in (0, 3):
        vllm_config, *_ = made(tmp_path, "dense", "BLHNC")
        specs: dict[str, KVCacheSpec] = {
            f"layers.{at}": FullAttentionSpec(
                block_size=16, **ATTENTION | {"num_kv_heads": 8 if at == larger else 4}
            )
            for at in range(4)
        }
        _, cache, config = placed(vllm_config, specs)
        layouts.append(registered(allocated(vllm_config, cache), config, cache))
    first, second = layouts
    assert (first.pages, first.kinds) == (second.pages, second.kinds)
    assert first.contents != second.contents


# ------------------------------------------------------------ what vLLM says of its memory


def laid_out(folder: Path, spoiled: str = "") -> RankLayout:
    """What a rank with two layers registers, with something changed in what vLLM hands over."""
    vllm_config, cache, config = configured(folder)
    views = allocated(vllm_config, cache)
    tensors, layers = cache.kv_cache_tensors, cache.kv_cache_groups[0].layer_names
    match spoiled:
        case "layer missing":
            del views["b"]
        case "layer elsewhere":
            views["b"] = views["a"]
        case "blocks farther apart":
            tensors[0].block_stride += 512
        case "in host memory":
            tensors[0].host_resident, cache.hisparse_host_num_blocks = True, configs.BLOCKS
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
            tensors.clear()
        case "two layers in one place":
            tensors[0].layer_stride = 0
            views["b"] = views["a"]
    return registered(views, config, cache)


@pytest.mark.parametrize(
    ("spoiled", "message"),
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
    tmp_path: Path, spoiled: str, message: str
) -> None:
    """Bytes that might be others' are never moved: the rank runs without offload."""
    with pytest.raises(UnsupportedMemory, match=message):
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


def test_the_null_block_is_the_one_that_vllm_never_hands_out(tmp_path: Path) -> None:
    """Its number in the layout is its number in vLLM's own block pool."""
    pool = BlockPool(configs.BLOCKS, enable_caching=True, hash_block_size=16)
    assert laid_out(tmp_path).null_block == pool.null_block.block_id
