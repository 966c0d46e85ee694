"""vLLM's own configuration objects, without an engine: what the connector's parts are given."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.worker.utils import allocate_kv_cache

from kvd_client import RankLayout
from kvd_client.vllm.layout import describe_caches
from kvd_proto.layout import validate_layout
from kvd_tools.models import LLAMA

try:
    from vllm.v1.core import kv_cache_planning as planning  # since vLLM 0.33
except ImportError:
    from vllm.v1.core import kv_cache_utils as planning

BLOCK = 16  # tokens
PAGE = 4096  # bytes of a `full` or `window` layer's block
BLOCKS = 16
_KV_HEADS = 2
_HEAD_SIZE = 32


def engine_config(
    folder: Path,
    extra: dict[str, Any] | None = None,
    *,
    model: Mapping[str, Any] = LLAMA,
    tensor_parallel: int = 1,
    block_size: int = BLOCK,
    failure_policy: str = "recompute",
    hash_algorithm: str = "sha256",
    layout: str | None = "LBHNC",
    events: bool = False,
) -> VllmConfig:
    """A whole configuration of an engine that uses kvd; `folder` gets the model's config.json.

    With `events` it publishes KV events, which go nowhere.
    """
    (folder / "config.json").write_text(json.dumps(model))
    cache_config = CacheConfig(block_size=block_size, prefix_caching_hash_algo=hash_algorithm)
    cache_config.kv_cache_layout = layout  # as the engine's core does when it starts
    return VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True),
        cache_config=cache_config,
        parallel_config=ParallelConfig(
            tensor_parallel_size=tensor_parallel, distributed_executor_backend="mp"
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvdConnector",
            kv_connector_module_path="kvd_client.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=failure_policy,
            kv_connector_extra_config=dict(extra or {}),
            engine_id="engine",
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=events, publisher="null"),
    )


def full(layers: Sequence[str], padded: int | None = None) -> KVCacheGroupSpec:
    """A group of layers that attend to everything; a page may be padded to so many bytes."""
    spec = FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=_KV_HEADS,
        head_size=_HEAD_SIZE,
        dtype=torch.bfloat16,
        page_size_padded=padded,
    )
    return KVCacheGroupSpec(list(layers), spec)


def window(
    layers: Sequence[str], block_size: int = BLOCK, head_size: int = _HEAD_SIZE
) -> KVCacheGroupSpec:
    """A group of layers that attend to the last 64 tokens."""
    spec = SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=_KV_HEADS,
        head_size=head_size,
        dtype=torch.bfloat16,
        sliding_window=64,
    )
    return KVCacheGroupSpec(list(layers), spec)


def latent(layers: Sequence[str]) -> KVCacheGroupSpec:
    """A group of MLA layers."""
    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
    return KVCacheGroupSpec(list(layers), spec)


Engine = tuple[VllmConfig, KVCacheConfig, OffloadingConfig]
"""What a connector gets: the engine's configuration, its KV cache as it is placed, and both."""


def configured(
    folder: Path, *groups: KVCacheGroupSpec, blocks: int = BLOCKS, **engine: Any
) -> Engine:
    """What vLLM makes of `engine_config` and these groups, by default one of two layers."""
    return placed(engine_config(folder, **engine), groups or [full(["a", "b"])], blocks)


def placed(
    config: VllmConfig,
    specs: dict[str, KVCacheSpec] | Sequence[KVCacheGroupSpec],
    blocks: int = BLOCKS,
) -> Engine:
    """What vLLM makes of these layers' specs, or groups of them."""
    config.cache_config.num_gpu_blocks_override = blocks
    groups = planning.get_kv_cache_groups(config, specs) if isinstance(specs, dict) else [*specs]
    cache = planning.get_kv_cache_config_from_groups(config, groups, available_memory=0)
    return config, cache, build_offloading_config(config, cache)


def registered(
    views: Mapping[str, torch.Tensor], config: OffloadingConfig, cache: KVCacheConfig
) -> RankLayout:
    """What a rank registers; a daemon would take it."""
    _, layout = describe_caches(views, config, cache)
    validate_layout(layout)
    return layout


def allocated(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """The KV cache, allocated by vLLM, as it hands it to a rank's connector: by layer.

    Every byte is random.
    """
    layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
    views: dict[str, torch.Tensor] = allocate_kv_cache(kv_cache_config, torch.device("cpu"), layout)
    whole(views).random_(-128, 128)
    return views


def whole(views: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Every byte of the KV cache, in place."""
    storage = next(iter(views.values())).untyped_storage()
    return torch.empty(0, dtype=torch.int8).set_(storage)


def rows(view: torch.Tensor, block: int, num_blocks: int) -> torch.Tensor:
    """A layer's page of one block, as vLLM's view has it: all its kernel blocks."""
    count = view.shape[0] // num_blocks
    return view[block * count : (block + 1) * count]


def pages(
    views: Mapping[str, torch.Tensor], layers: list[str], blocks: list[int], num_blocks: int
) -> list[torch.Tensor]:
    """What attention finds in these blocks, layer by layer, as bytes: a number may be none."""
    return [
        rows(views[layer], block, num_blocks)
        .clone(memory_format=torch.contiguous_format)
        .view(torch.uint8)
        for layer in layers
        for block in blocks
    ]
