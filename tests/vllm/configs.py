"""vLLM's own configuration objects, without an engine: what the connector's parts are given."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.config import OffloadingConfig

BLOCK = 16  # tokens
PAGE = 4096  # bytes of a `full` or `window` layer's block
BLOCKS = 8
_HEADS = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "dtype": "bfloat16",
}


def engine_config(
    folder: Path,
    extra: dict[str, Any] | None = None,
    *,
    failure_policy: str = "recompute",
    hash_algorithm: str = "sha256",
    block_size: int = BLOCK,
) -> VllmConfig:
    """A whole configuration of an engine that uses kvd; `folder` gets the model's config.json."""
    (folder / "config.json").write_text(json.dumps(_MODEL))
    return VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True),
        cache_config=CacheConfig(block_size=block_size, prefix_caching_hash_algo=hash_algorithm),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvdConnector",
            kv_connector_module_path="kvd_client.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=failure_policy,
            kv_connector_extra_config=dict(extra or {}),
            engine_id="engine",
        ),
    )


def full(layers: Sequence[str], block_size: int = BLOCK, **more: Any) -> KVCacheGroupSpec:
    """A group of layers that attend to everything."""
    return KVCacheGroupSpec(
        list(layers), FullAttentionSpec(block_size=block_size, **_HEADS, **more)
    )


def window(layers: Sequence[str], block_size: int = BLOCK, tokens: int = 64) -> KVCacheGroupSpec:
    """A group of layers that attend to the last `tokens`."""
    return KVCacheGroupSpec(
        list(layers), SlidingWindowSpec(block_size=block_size, sliding_window=tokens, **_HEADS)
    )


def latent(layers: Sequence[str], block_size: int = BLOCK) -> KVCacheGroupSpec:
    """A group of MLA layers."""
    return KVCacheGroupSpec(
        list(layers),
        MLAAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=128, dtype=torch.bfloat16
        ),
    )


def cache_config(*groups: KVCacheGroupSpec, blocks: int = BLOCKS) -> KVCacheConfig:
    """A KV cache of so many blocks."""
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=list(groups))


def offloading_config(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> OffloadingConfig:
    """What vLLM makes of both for a connector."""
    return build_offloading_config(vllm_config, kv_cache_config)
