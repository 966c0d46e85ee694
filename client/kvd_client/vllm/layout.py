"""From vLLM's canonical KV caches to the layout that a daemon serves.

Canonical tensors are views (num_blocks, page) into the rank's storages: aliased
layers are one tensor, packed layouts one tensor whose page is the whole block,
and all of them may be views of one storage, which is counted once.
"""

from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingGroupConfig

from kvd_client import GroupSpec, RankLayout, TensorRef, UnsupportedMemory
from kvd_client.torch_memory import BlockTensor, SharedTensors, share_torch


def share_caches(caches: CanonicalKVCaches) -> SharedTensors:
    """Move the KV caches' storages into shared memory, in place.

    Raises:
        UnsupportedMemory: memory that another process cannot map.
    """
    return share_torch(
        [
            BlockTensor(
                cache.tensor,
                page_bytes=cache.page_size_bytes,
                block_stride=cache.tensor.stride(0) * cache.tensor.element_size(),
            )
            for cache in caches.tensors
        ]
    )


def rank_layout(
    caches: CanonicalKVCaches,
    shared: SharedTensors,
    config: OffloadingConfig,
    kv_cache_config: KVCacheConfig,
) -> RankLayout:
    """Return the layout of this rank.

    `num_blocks` is the engine's configured number, including the operator's override,
    and is not read from a tensor.

    Raises:
        UnsupportedMemory: canonical tensors that lack some of the layers.
    """
    groups = []
    for group, refs in zip(config.groups, caches.group_data_refs, strict=True):
        spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
        _check_whole(group, spec, sum(ref.page_size_bytes for ref in refs))
        groups.append(
            GroupSpec(
                refs=tuple(
                    TensorRef(part, ref.page_size_bytes)
                    for ref in refs
                    for part in shared.parts[ref.tensor_idx]
                ),
                block_size=group.tokens_per_block,
                kind=type(spec).__name__,
                sliding_window=getattr(spec, "sliding_window", None),
            )
        )
    return RankLayout(
        num_blocks=kv_cache_config.num_blocks,
        blocks_per_chunk=config.cache.blocks_per_chunk,
        hash_block_size=config.cache.tokens_per_hash,
        storages=shared.storages,
        tensors=shared.tensors,
        groups=tuple(groups),
        replicated=config.replicated_layout,
    )


def _check_whole(group: OffloadingGroupConfig, spec: Any, referred: int) -> None:
    """Refuse canonical tensors that do not hold all layers: the rest would never be restored.

    vLLM 0.32 takes layers with padded block strides for a packed layout, and hands over the
    first layer only.
    """
    layers = getattr(spec, "kv_cache_specs", dict.fromkeys(group.layer_names, spec))
    pages = [getattr(layers[name], "unpadded_page_size_bytes", 0) for name in group.layer_names]
    if referred < sum(pages):
        raise UnsupportedMemory(
            f"group {group.group_id}: vLLM hands over {referred} bytes a block, its"
            f" {len(pages)} layers have {sum(pages)}; this KV cache layout cannot be offloaded"
        )
