"""SGLang's device pools as pages that kvd can move, and the fingerprint of their bytes.

SGLang itself describes the pools of some models for linkers (`resolve_hybrid_device_pool_group`).
The pools of plain models are described here in the same form. Pools with a common page numbering,
such as KV and the index keys of sparse attention, become one `PagePool`: a page is in all of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    _mamba_device_pool_entry,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvd_client import Fingerprint, UnsupportedMemory
from kvd_client.adapters import digest, hub_commits, weight_files
from kvd_client.sglang.pages import LayerPages, PagePool

PLAIN_POOLS = {MHATokenToKVPool, MLATokenToKVPool}


@dataclass(frozen=True, slots=True)
class DevicePools:
    """The pools of a rank.

    Attributes:
        by_name: by SGLang's names.
        replicated: all ranks of tensor parallelism hold the same bytes.
        entries: SGLang's descriptions.
    """

    by_name: dict[str, PagePool]
    replicated: bool
    entries: dict[PoolName, DevicePoolEntry]


def find_pools(params: Any, components: set[Any]) -> DevicePools:
    """Return the pools to offload.

    Args:
        params: SGLang's `CacheInitParams`.
        components: of SGLang's tree.

    Raises:
        UnsupportedMemory: kvd or SGLang's linkers cannot offload this model's KV cache.
    """
    cache = params.token_to_kv_pool_allocator.get_kvcache()
    page_tokens = params.page_size
    if params.pp_size > 1:
        raise UnsupportedMemory(
            f"pp_size={params.pp_size}: the stages of SGLang's pipelines do not agree on what a"
            " linker has found; use tensor parallelism"
        )
    if type(cache) in PLAIN_POOLS:
        group = _plain_group(cache, params, page_tokens)
    elif type(cache) is SWAKVPool and PoolName.MAMBA not in {c.name.lower() for c in components}:
        group = _sliding_window_group(cache, page_tokens)
    else:
        try:
            if type(cache) is HybridLinearKVPool and type(cache.full_kv_pool) is MHATokenToKVPool:
                group = _hybrid_group(cache, params, page_tokens)
            else:
                group = resolve_hybrid_device_pool_group(
                    kvcache=cache, page_size=page_tokens, params=params, components=components
                )
        except (ValueError, AssertionError) as error:
            raise UnsupportedMemory(f"{type(cache).__name__}: {error}") from error
    if params.sidecar_draft_device_pools and PoolName.DRAFT not in group.entry_map:
        raise UnsupportedMemory("the KV cache of this model's draft cannot be offloaded")
    return DevicePools(
        {name: _page_pool(name, group) for name in dict.fromkeys(group.sources.values())},
        group.rank_replicated,
        group.entry_map,
    )


def _plain_group(cache: Any, params: Any, page_tokens: int) -> DevicePoolGroup:
    """Describe the KV pool of a plain model and, if it has draft models, their pools.

    Draft pools use the target's page indices, so one page number moves both.
    """
    entries = [_entry(PoolName.KV, cache, _identity_layer_map(cache.layer_num), page_tokens)]
    drafts = (*params.sidecar_draft_device_pools, *params.mtp_draft_device_pools)
    draft_classes = {type(pool) for pool in drafts}
    if drafts:
        if len(draft_classes) > 1 or not draft_classes <= PLAIN_POOLS:
            raise UnsupportedMemory("the KV cache of this model's draft cannot be offloaded")
        layers = _identity_layer_map(sum(pool.layer_num for pool in drafts))
        first, *others = drafts
        entries.append(
            _entry(
                PoolName.DRAFT,
                first,
                layers,
                page_tokens,
                indices_from=PoolName.KV,
                more_pools=others,
            )
        )
    replicated = {type(cache), *draft_classes} == {MLATokenToKVPool}
    return DevicePoolGroup(entries, cache.layer_num, page_tokens, rank_replicated=replicated)


def _sliding_window_group(cache: SWAKVPool, page_tokens: int) -> DevicePoolGroup:
    """Describe the pool of full attention and that of sliding windows."""
    if type(cache.full_kv_pool) is not MHATokenToKVPool or (
        type(cache.swa_kv_pool) is not MHATokenToKVPool
    ):
        raise UnsupportedMemory(
            f"{type(cache.full_kv_pool).__name__} and {type(cache.swa_kv_pool).__name__} cannot be"
            " offloaded together"
        )
    full = {n: i for n, (i, is_swa) in cache.layers_mapping.items() if not is_swa}
    windowed = {n: i for n, (i, is_swa) in cache.layers_mapping.items() if is_swa}
    entries = [
        _entry(PoolName.KV, cache.full_kv_pool, full, page_tokens),
        _entry(PoolName.SWA, cache.swa_kv_pool, windowed, page_tokens),
    ]
    return DevicePoolGroup(entries, max(cache.layers_mapping) + 1, page_tokens)


def _hybrid_group(cache: HybridLinearKVPool, params: Any, page_tokens: int) -> DevicePoolGroup:
    """Describe attention with states. SGLang itself does so only if attention is MLA."""
    if params.mtp_draft_device_pools:
        raise UnsupportedMemory("the KV cache of this model's draft cannot be offloaded")
    start = cache.start_layer
    full = {n - start: i for n, i in cache.full_attention_layer_id_mapping.items()}
    entries = [
        _entry(PoolName.KV, cache.full_kv_pool, full, page_tokens),
        _mamba_device_pool_entry(params.req_to_token_pool, start),
    ]
    last_layer = max(layer for entry in entries for layer in entry.layer_mapping)
    return DevicePoolGroup(entries, last_layer + 1, page_tokens)


def _entry(
    name: PoolName,
    pool: Any,
    layers: dict[int, int],
    page_tokens: int,
    *,
    indices_from: PoolName | None = None,
    more_pools: Sequence[Any] = (),
) -> DevicePoolEntry:
    """Return SGLang's description of a pool.

    Args:
        name: of the pool.
        pool: a plain pool of SGLang's.
        layers: by layer of the forward pass, the number of its tensors.
        page_tokens: tokens of a page.
        indices_from: the pool whose indices name its pages; default: itself.
        more_pools: further pools of `pool`'s Python class; their layers come after its own.
    """
    if pool.page_size != page_tokens:
        raise UnsupportedMemory(
            f"a page has {page_tokens} tokens in SGLang's tree and {pool.page_size} in the {name}"
            " pool; KV caches that are split among ranks by tokens (dcp_size) cannot be offloaded"
        )
    num_tokens = pool.size + pool.page_size
    tensors = zip(*map(_tensors, (pool, *more_pools)), strict=True)
    components = [list(chain(*pool_tensors)) for pool_tensors in tensors]
    return DevicePoolEntry(
        name=name,
        indices_from_pool=indices_from or name,
        device_pool=pool,
        components=components,
        layer_mapping=layers,
        page_size=page_tokens,
        rows_are_pages=components[0][0].shape[0] != num_tokens,  # heads may come before tokens
    )


def _tensors(pool: Any) -> list[list[torch.Tensor]]:
    """Return the tensors of a plain pool, by kind and layer: keys and values, or MLA's latents."""
    if type(pool) is MLATokenToKVPool:
        return [pool.kv_buffer]
    if pool.k_scale_buffer is not None or pool.native_k_scale_buffer is not None:
        raise UnsupportedMemory("KV caches with scales beside them cannot be offloaded")
    return [pool.k_buffer, pool.v_buffer]


def _identity_layer_map(num_layers: int) -> dict[int, int]:
    """Return the map for a pool whose tensors are numbered as the layers are."""
    return {number: number for number in range(num_layers)}


def _page_pool(name: PoolName, group: DevicePoolGroup) -> PagePool:
    """Return the pages of all pools with the numbering of pool `name`."""
    entries = [entry for entry in group.entries if entry.indices_from_pool == name]
    layers = [layer for entry in entries for layer in _layer_pages(entry)]
    return PagePool(
        name.value, entries[0].page_size, tuple(sorted(layers, key=lambda layer: layer.number))
    )


def _layer_pages(entry: DevicePoolEntry) -> Iterator[LayerPages]:
    for layer, mapped in entry.layer_mapping.items():
        for number in (mapped,) if isinstance(mapped, int) else mapped:
            for component, meta in zip(entry.components, entry.buffer_meta, strict=True):
                tensor = component[number]
                _, _, page_bytes = meta[number]
                yield LayerPages(layer, tensor, page_bytes * tensor.shape[0] // tensor.nbytes)


def fingerprint(
    server_args: Any, pool: PagePool, pool_class: str, parallelism: str, label: str
) -> Fingerprint:
    """Return the fingerprint of one pool of one rank: all that the bytes of its KV depend on.

    SGLang's page hashes cover prompt tokens, LoRA and cache salts; the registered layout covers
    layers and pages. The fingerprint covers the rest. What it has in excess costs misses; what it
    lacks costs wrong tokens. Each rank of tensor parallelism has its own chunks, unless all ranks
    hold the same bytes.

    Args:
        server_args: SGLang's.
        pool: the pool.
        pool_class: class and layout of the device pool.
        parallelism: the rank, as text.
        label: the operator's label.
    """
    args = server_args
    model = str(args.model_path)
    draft = args.speculative_draft_model_path
    return Fingerprint(
        model=model,
        revision=digest(
            args.revision,
            weight_files(model),
            hub_commits(model, args.revision, args.download_dir),
            args.quantization,
            args.json_model_override_args,
            [args.load_format, args.random_seed if args.load_format == "dummy" else None],
            draft and [args.speculative_algorithm, draft, args.speculative_draft_model_revision],
        ),
        dtype=f"{args.dtype} weights, {args.kv_cache_dtype} cache",
        kv_layout=f"sglang {release(sglang.__version__)}, {pool.name}, {pool_class}",
        attention_backend=", ".join(
            str(name)
            for name in (
                args.attention_backend,
                args.prefill_attention_backend,
                args.decode_attention_backend,
            )
            if name
        ),
        parallelism=parallelism,
        label=label,
    )


def release(version: str) -> str:
    """Return the version without build tags: every release may change interfaces and bytes."""
    return version.partition("+")[0]
