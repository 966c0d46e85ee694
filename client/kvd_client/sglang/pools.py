"""SGLang's device pools, as pages that kvd can move.

SGLang describes the pools of some models for linkers itself (`resolve_hybrid_device_pool_group`);
those of plain models are described here in the same form. Pools whose pages have the same numbers
(KV and the index keys of sparse attention, say) are one `PagePool`: a page is in all of them.
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
from kvd_client.engine_options import digest, hub_commits, weight_files
from kvd_client.sglang.pages import LayerPages, PagePool

PLAIN = {MHATokenToKVPool, MLATokenToKVPool}


@dataclass(frozen=True, slots=True)
class Pools:
    """All of a rank.

    Attributes:
        by_name: SGLang's names.
        num_layers: that loads are reported by.
        replicated: every rank of tensor parallelism holds the same bytes.
        entries: SGLang's own descriptions.
    """

    by_name: dict[str, PagePool]
    num_layers: int
    replicated: bool
    entries: dict[PoolName, DevicePoolEntry]


def find_pools(params: Any, components: set[Any]) -> Pools:
    """Return the pools that are offloaded.

    Args:
        params: SGLang's `CacheInitParams`.
        components: of its tree.

    Raises:
        UnsupportedMemory: kvd or SGLang's linkers cannot offload this model's KV cache.
    """
    cache = params.token_to_kv_pool_allocator.get_kvcache()
    page = params.page_size
    if params.pp_size > 1:
        raise UnsupportedMemory(
            f"pp_size={params.pp_size}: the stages of SGLang's pipelines do not agree on what a"
            " linker has found; use tensor parallelism"
        )
    if type(cache) in PLAIN:
        group = _plain(cache, params, page)
    elif type(cache) is SWAKVPool and PoolName.MAMBA not in {c.name.lower() for c in components}:
        group = _sliding(cache, page)
    else:
        try:
            if type(cache) is HybridLinearKVPool and type(cache.full_kv_pool) is MHATokenToKVPool:
                group = _with_states(cache, params, page)
            else:
                group = resolve_hybrid_device_pool_group(
                    kvcache=cache, page_size=page, params=params, components=components
                )
        except (ValueError, AssertionError) as error:
            raise UnsupportedMemory(f"{type(cache).__name__}: {error}") from error
    if params.sidecar_draft_device_pools and PoolName.DRAFT not in group.entry_map:
        raise UnsupportedMemory("the KV cache of this model's draft cannot be offloaded")
    return Pools(
        {name: _page_pool(name, group) for name in dict.fromkeys(group.sources.values())},
        group.num_layers,
        group.rank_replicated,
        group.entry_map,
    )


def _plain(cache: Any, params: Any, page: int) -> DevicePoolGroup:
    """One pool, and those of the model's drafts, if any.

    Pages of a draft have the numbers of the target's, so both are moved together. A draft's KV
    never decides a token: the target checks what a draft proposes.
    """
    entries = [_entry(PoolName.KV, cache, _every(cache.layer_num), page)]
    drafts = (*params.sidecar_draft_device_pools, *params.mtp_draft_device_pools)
    kinds = {type(pool) for pool in drafts}
    if drafts:
        if len(kinds) > 1 or not kinds <= PLAIN:
            raise UnsupportedMemory("the KV cache of this model's draft cannot be offloaded")
        layers = _every(sum(pool.layer_num for pool in drafts))
        first, *more = drafts
        entries.append(
            _entry(PoolName.DRAFT, first, layers, page, numbered_as=PoolName.KV, more=more)
        )
    replicated = {type(cache), *kinds} == {MLATokenToKVPool}
    return DevicePoolGroup(entries, cache.layer_num, page, rank_replicated=replicated)


def _page_pool(name: PoolName, group: DevicePoolGroup) -> PagePool:
    """The pools whose pages are numbered as those of `name`."""
    entries = [entry for entry in group.entries if entry.indices_from_pool == name]
    layers = [part for entry in entries for part in _layers(entry)]
    return PagePool(
        name.value, entries[0].page_size, tuple(sorted(layers, key=lambda part: part.layer))
    )


def _layers(entry: DevicePoolEntry) -> Iterator[LayerPages]:
    for layer, mapped in entry.layer_mapping.items():
        for number in (mapped,) if isinstance(mapped, int) else mapped:
            for component, meta in zip(entry.components, entry.buffer_meta, strict=True):
                tensor = component[number]
                _, _, page_bytes = meta[number]
                yield LayerPages(layer, tensor, page_bytes * tensor.shape[0] // tensor.nbytes)


def _sliding(cache: SWAKVPool, page: int) -> DevicePoolGroup:
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
        _entry(PoolName.KV, cache.full_kv_pool, full, page),
        _entry(PoolName.SWA, cache.swa_kv_pool, windowed, page),
    ]
    return DevicePoolGroup(entries, max(cache.layers_mapping) + 1, page)


def _with_states(cache: HybridLinearKVPool, params: Any, page: int) -> DevicePoolGroup:
    """Attention and states; SGLang itself describes them together only where attention is MLA."""
    if params.mtp_draft_device_pools:
        raise UnsupportedMemory("the KV cache of this model's draft cannot be offloaded")
    start = cache.start_layer
    full = {n - start: i for n, i in cache.full_attention_layer_id_mapping.items()}
    entries = [
        _entry(PoolName.KV, cache.full_kv_pool, full, page),
        _mamba_device_pool_entry(params.req_to_token_pool, start),
    ]
    last = max(layer for entry in entries for layer in entry.layer_mapping)
    return DevicePoolGroup(entries, last + 1, page)


def _tensors(pool: Any) -> list[list[torch.Tensor]]:
    """Those of a plain pool, by kind and layer: keys and values, or MLA's latents."""
    if type(pool) is MLATokenToKVPool:
        return [pool.kv_buffer]
    if pool.k_scale_buffer is not None or pool.native_k_scale_buffer is not None:
        raise UnsupportedMemory("KV caches with scales beside them cannot be offloaded")
    return [pool.k_buffer, pool.v_buffer]


def _every(layers: int) -> dict[int, int]:
    return {number: number for number in range(layers)}


def _entry(
    name: PoolName,
    pool: Any,
    layers: dict[int, int],
    page: int,
    *,
    numbered_as: PoolName | None = None,
    more: Sequence[Any] = (),
) -> DevicePoolEntry:
    """One pool as SGLang describes it.

    Args:
        name: of the pool.
        pool: of SGLang's.
        layers: by layer of the forward pass, the number of its tensors.
        page: tokens of a page.
        numbered_as: the pool whose indices name its pages; default: itself.
        more: pools of its kind, whose layers follow its own.
    """
    if pool.page_size != page:
        raise UnsupportedMemory(
            f"a page has {page} tokens in SGLang's tree and {pool.page_size} in the {name} pool; KV"
            " caches that are split among ranks by tokens (dcp_size) cannot be offloaded"
        )
    tokens = pool.size + pool.page_size
    tensors = zip(*map(_tensors, (pool, *more)), strict=True)
    components = [list(chain(*several)) for several in tensors]
    return DevicePoolEntry(
        name=name,
        indices_from_pool=numbered_as or name,
        device_pool=pool,
        components=components,
        layer_mapping=layers,
        page_size=page,
        rows_are_pages=components[0][0].shape[0] != tokens,  # some layouts put heads before tokens
    )


# TODO identity.py
# """Which SGLang engines may share chunks: everything that the KV's bytes depend on.
#
# Prompt tokens, LoRA and cache salts are in SGLang's page hashes; layers and pages are in the
# registered layout. The rest is here. A difference too many costs misses, a difference too few
# wrong tokens. Each rank of tensor parallelism has chunks of its own, but where all hold the same
# bytes: then ranks share them.
# """


def fingerprint(
    server_args: Any, pool: PagePool, pool_class: str, place: str, label: str
) -> Fingerprint:
    """Return the fingerprint of one pool of one rank.

    Args:
        server_args: SGLang's.
        pool: whose chunks are named.
        pool_class: of the device pool, and its layout.
        place: of the rank, in words.
        label: the operator's.
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
        parallelism=place,
        label=label,
    )


def release(version: str) -> str:
    """Return the version without build tags: every release may change interfaces and bytes."""
    return version.partition("+")[0]
