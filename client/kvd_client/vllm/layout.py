"""From vLLM's KV cache to shared memory and the layout that a daemon serves."""

from collections.abc import Mapping

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.config import OffloadingConfig

from kvd_client import GroupSpec, RankLayout, TensorRef
from kvd_client.torch_memory import BlockTensor, SharedTensors, share_torch
from kvd_client.vllm.fragments import Fragment, Pages

NULL_BLOCK = 0  # of vLLM's BlockPool: never handed out; 0 in a block table means "skipped"


def share_caches(
    views: Mapping[str, torch.Tensor], config: OffloadingConfig, kv_cache_config: KVCacheConfig
) -> tuple[SharedTensors, RankLayout]:
    """Move the KV cache's memory into shared memory, in place, and describe what is offloaded.

    `num_blocks` is the engine's configured number, including the operator's override. Groups that
    vLLM does not offload have no part in the layout; their bytes count, for all groups lie over
    each other.

    Args:
        views: of each layer, as vLLM hands them to a connector.
        config: which groups are offloaded, and the chunk's size.
        kv_cache_config: where vLLM placed the layers.

    Raises:
        UnsupportedMemory: memory that another process cannot map, or pages that lie elsewhere than
            configured.
    """
    pages = Pages(kv_cache_config, views)
    groups = [pages.group(group.group_id) for group in config.groups]
    of: dict[Fragment, int] = {}  # groups that lie over each other share them
    for group in groups:
        for fragment in group.fragments:
            of.setdefault(fragment, len(of))
    shared = share_torch([_rows(pages, fragment) for fragment in of])
    layout = RankLayout(
        num_blocks=pages.num_blocks,
        blocks_per_chunk=config.cache.blocks_per_chunk,
        hash_block_size=config.cache.tokens_per_hash,
        storages=shared.storages,
        tensors=shared.tensors,
        groups=tuple(
            GroupSpec(
                refs=tuple(TensorRef(of[part], part.nbytes) for part in found.fragments),
                block_size=group.tokens_per_block,
                kind=type(spec).__name__,
                sliding_window=getattr(spec, "sliding_window", None),
                contents=found.contents,
            )
            for group, found in zip(config.groups, groups, strict=True)
            for spec in (kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec,)
        ),
        replicated=config.replicated_layout,
        null_block=NULL_BLOCK,
    )
    return shared, layout


def _rows(pages: Pages, fragment: Fragment) -> BlockTensor:
    """A fragment's bytes as a tensor [blocks, bytes]."""
    storage = pages.storages[fragment.storage]
    rows = torch.empty(0, dtype=torch.int8, device=storage.device).set_(
        storage, fragment.offset, (pages.num_blocks, fragment.nbytes), (fragment.stride, 1)
    )
    return BlockTensor(rows, page_bytes=fragment.nbytes, block_stride=fragment.stride)
