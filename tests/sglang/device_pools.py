"""SGLang's own device pools on the CPU, and a linker over them, without an engine."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import KimiLinearCacheParams, KimiLinearStateShape
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from torch import Tensor

from kvd_client import Scheduler
from kvd_client.sglang.linker import KvdLinker
from tests.waiting import eventually

PAGE, TOKENS, STATES = 16, 512, 8
HEADS: dict[str, Any] = {"head_num": 2, "head_dim": 32}
LATENTS: dict[str, Any] = {"kv_lora_rank": 64, "qk_rope_head_dim": 16}
ON_CPU: dict[str, Any] = {"device": "cpu", "enable_memory_saver": False}
NODE = 8  # pages of the node that is stored
KEYS = [f"{number:064x}" for number in range(1, 40)]
FROM, TO = list(range(3, 3 + NODE)), [30 - 2 * i for i in range(NODE)]
"""Pages that are stored, and pages into which they are loaded."""


@dataclass
class Pool:
    """One pool of a model's cache, and which pages of a node the tree has there."""

    name: PoolName
    buffers: list[Tensor]  # rows first
    rows: int = PAGE  # of a page
    stored: list[int] = field(default_factory=lambda: FROM)  # pages of the node's last keys
    loaded: list[int] = field(default_factory=lambda: TO)  # into which as many are loaded

    def transfer(self, keys: list[str], pages: list[int]) -> PoolTransfer:
        """As the tree makes it."""
        device_indices = indices(pages, self.rows)
        return PoolTransfer(self.name, device_indices=device_indices, keys=keys[-len(pages) :])


@dataclass
class Kind:
    """One kind of model."""

    cache: Any  # as SGLang has it
    components: set[ComponentType]
    pools: list[Pool]  # first that of its full attention, with the buffers of its drafts
    requests: Any = None  # SGLang's pool of requests, of those that have states
    sidecar: tuple[Any, ...] = ()  # the pools of a draft model
    mtp: tuple[Any, ...] = ()  # the pools of layers of the model itself that draft

    def fill(self, seed: int) -> None:
        """Other bytes in every row."""
        generator = torch.Generator().manual_seed(seed)
        for pool in self.pools:
            for buffer in pool.buffers:
                buffer.copy_(torch.randn(buffer.shape, generator=generator))


def keys_and_values(layers: int) -> memory_pool.MHATokenToKVPool:
    """SGLang's pool for ordinary attention."""
    return memory_pool.MHATokenToKVPool(
        TOKENS, PAGE, torch.bfloat16, layer_num=layers, **HEADS, **ON_CPU
    )


def kv_pool(*caches: Any) -> Pool:
    """The pool of full attention that consists of these."""
    buffers = [b for cache in caches for b in (*cache.k_buffer, *cache.v_buffer)]
    return Pool(PoolName.KV, buffers)


def dense() -> Kind:
    """Keys and values of two layers."""
    cache = keys_and_values(2)
    return Kind(cache, {ComponentType.FULL}, [kv_pool(cache)])


def dense_with_mtp() -> Kind:
    """Keys and values, and two layers of the model that draft, each with a pool (as MiMo)."""
    cache, drafts = keys_and_values(2), (keys_and_values(1), keys_and_values(1))
    return Kind(cache, {ComponentType.FULL}, [kv_pool(cache, *drafts)], mtp=drafts)


def mla() -> Kind:
    """One latent vector for each token and layer."""
    cache = memory_pool.MLATokenToKVPool(
        TOKENS, PAGE, torch.bfloat16, layer_num=3, **LATENTS, **ON_CPU
    )
    return Kind(cache, {ComponentType.FULL}, [Pool(PoolName.KV, cache.kv_buffer)])


def mla_with_eagle() -> Kind:
    """MLA, and a draft model with keys and values in one layer (as EAGLE's for DeepSeek)."""
    kind, draft = mla(), keys_and_values(1)
    buffers = [*kind.cache.kv_buffer, *draft.k_buffer, *draft.v_buffer]
    return replace(kind, pools=[Pool(PoolName.KV, buffers)], sidecar=(draft,))


def window() -> Kind:
    """Three layers in a window, one that attends to all."""
    cache = SWAKVPool(
        TOKENS,
        TOKENS,
        PAGE,
        torch.bfloat16,
        swa_attention_layer_ids=[0, 1, 3],
        full_attention_layer_ids=[2],
        device="cpu",
        **HEADS,
    )
    windowed = replace(
        kv_pool(cache.swa_kv_pool), name=PoolName.SWA, stored=[11, 12, 13], loaded=[21, 20]
    )
    components = {ComponentType.FULL, ComponentType.SWA}
    return Kind(cache, components, [kv_pool(cache.full_kv_pool), windowed])


def states_and_mla() -> Kind:
    """MLA in one layer, a state for each request in two (as Kimi Linear)."""
    return _states(use_mla=True, head_num=1, head_dim=80, **LATENTS)


def states() -> Kind:
    """Keys and values in one layer, a state for each request in two (as Falcon H1)."""
    return _states(use_mla=False, **HEADS)


def _states(**attention: Any) -> Kind:
    """One layer of attention between two of states."""
    shape = KimiLinearStateShape.create(tp_world_size=1, num_heads=2, head_dim=16)
    requests = memory_pool.HybridReqToTokenPool(
        size=STATES,
        mamba_size=STATES,
        mamba_spec_state_size=STATES,
        max_context_len=TOKENS,
        **ON_CPU,
        cache_params=KimiLinearCacheParams(shape=shape, layers=[0, 2]),
        mamba_layer_ids=[0, 2],
        enable_mamba_extra_buffer=False,
    )
    cache = memory_pool.HybridLinearKVPool(
        TOKENS,
        torch.bfloat16,
        PAGE,
        full_attention_layer_ids=[1],
        device="cpu",
        mamba_pool=requests.mamba_pool,
        **attention,
    )
    full, cached = cache.full_kv_pool, requests.mamba_pool.mamba_cache
    buffers = [part[layer] for part in (cached.temporal, *cached.conv) for layer in range(2)]
    return Kind(
        cache,
        {ComponentType.FULL, ComponentType.MAMBA},
        [
            Pool(PoolName.KV, full.kv_buffer) if attention["use_mla"] else kv_pool(full),
            Pool(PoolName.MAMBA, buffers, rows=1, stored=[2], loaded=[5]),
        ],
        requests,
    )


def indices(pages: list[int], rows: int) -> Tensor:
    """SGLang's indices of pages."""
    return torch.cat([torch.arange(page * rows, (page + 1) * rows) for page in pages])


def moved(source: Pool, target: Pool) -> list[Tensor]:
    """What the target's buffers are when they have been loaded from what the source stored."""
    copies = [buffer.clone() for buffer in target.buffers]
    begin = indices(source.stored[-len(target.loaded) :], source.rows)
    for buffer, copy in zip(source.buffers, copies, strict=True):
        copy[indices(target.loaded, target.rows)] = buffer[begin]
    return copies


ARGUMENTS = SimpleNamespace(
    model_path="/nowhere/model",
    revision=None,
    download_dir=None,
    quantization=None,
    json_model_override_args="{}",
    load_format="auto",
    random_seed=0,
    speculative_algorithm=None,
    speculative_draft_model_path=None,
    speculative_draft_model_revision=None,
    dtype="bfloat16",
    kv_cache_dtype="auto",
    attention_backend="none",
    prefill_attention_backend=None,
    decode_attention_backend=None,
    tp_size=1,
    port=1,
)


def parameters(kind: Kind, page_size: int = PAGE) -> SimpleNamespace:
    """SGLang's `CacheInitParams` of one rank."""
    return SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: kind.cache),
        req_to_token_pool=kind.requests,
        page_size=page_size,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        attn_cp_cache_group=None,
        attn_tp_cache_group=None,
        tp_cache_group=None,
        sidecar_draft_device_pools=kind.sidecar,
        mtp_draft_device_pools=kind.mtp,
    )


def make_linker(kind: Kind, **options: Any) -> KvdLinker:
    """A linker of one rank."""
    return KvdLinker(ARGUMENTS, parameters(kind), components=kind.components, extra_config=options)


def scheduler_of(linker: KvdLinker) -> Scheduler:
    """The session with the daemon, of a model without drafts."""
    return next(iter(linker._caches.values())).scheduler


def store(linker: KvdLinker, transfers: list[PoolTransfer]) -> bool:
    """Offload a node: whether all of it was stored."""
    assert linker.offload(transfers)
    eventually(lambda: linker.num_completed_offloads() == 1)
    return linker.pop_completed_offload()
