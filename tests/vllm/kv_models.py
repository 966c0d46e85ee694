"""KV caches of kinds of models, as vLLM's own code makes them from the layers' specs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

from tests.vllm.configs import Engine, engine_config, placed

BLOCKS = 14
ATTENTION: dict[str, Any] = {"num_kv_heads": 4, "head_size": 32, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=16, **ATTENTION)
LATENT: dict[str, Any] = {"num_kv_heads": 1, "max_tp_shards": 1}


def named(**specs: tuple[int, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """So many layers of each spec, in turn, as a model's pattern repeats."""
    most = max(count for count, _ in specs.values())
    turns = [
        (number * most // count, kind, number, spec)
        for kind, (count, spec) in specs.items()
        for number in range(count)
    ]
    turns.sort(key=lambda turn: turn[:3])
    return {f"layers.{at}.{kind}": spec for at, (_, kind, _, spec) in enumerate(turns)}


def dense() -> dict[str, KVCacheSpec]:
    """Multi-head attention."""
    return named(attn=(5, FULL))


def grouped() -> dict[str, KVCacheSpec]:
    """Grouped queries at high tensor parallelism: one head is left for a rank."""
    return named(attn=(5, replace(FULL, num_kv_heads=1)))


def latent() -> dict[str, KVCacheSpec]:
    """DeepSeek-V2 and V3: one latent for all heads."""
    spec = MLAAttentionSpec(block_size=16, head_size=576, dtype=torch.bfloat16, **LATENT)
    return named(attn=(4, spec))


def window() -> dict[str, KVCacheSpec]:
    """Gemma-3: five of six layers look back a little; the groups lie over each other."""
    return named(
        full=(2, FULL),
        window=(11, SlidingWindowSpec(block_size=16, sliding_window=64, **ATTENTION)),
    )


def unlike() -> dict[str, KVCacheSpec]:
    """A cache in 8 bits of which some layers have 16: pages of two sizes in one group."""
    quantized = replace(FULL, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    return named(attn=(5, quantized), whole=(2, FULL))


def indexed() -> dict[str, KVCacheSpec]:
    """DeepSeek-V3.2: latents in 656 bytes, and an indexer's keys, in one group."""
    common = LATENT | {"block_size": 64, "dtype": torch.uint8}
    latents = MLAAttentionSpec(head_size=576, state_content_bytes=656, **common)
    index = MLAAttentionSpec(head_size=132, cache_role=SparseCacheRole.INDEXER, **common)
    return named(attn=(3, latents), indexer=(3, index))


def compressed() -> dict[str, KVCacheSpec]:
    """DeepSeek-V4: compressed latents with an indexer beside windows, pages padded to 576 bytes."""
    common = LATENT | {"block_size": 256, "dtype": torch.uint8, "alignment": 576}
    sparse = MLAAttentionSpec(head_size=512, tokens_per_state=4, state_content_bytes=584, **common)
    index = MLAAttentionSpec(head_size=132, tokens_per_state=4, **common)
    swa = SlidingWindowMLASpec(
        head_size=512, state_content_bytes=584, sliding_window=128, **common | {"block_size": 64}
    )
    return named(attn=(4, sparse), indexer=(4, index), window=(8, swa))


def recurrent() -> dict[str, KVCacheSpec]:
    """Jamba: states, padded to the page of attention as vLLM's platforms do."""
    attention = replace(FULL, block_size=64)
    states = MambaSpec(
        block_size=64,
        shapes=((3, 512), (64, 100)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode="align",
    )
    return named(attn=(2, attention), mamba=(6, states))


def mixed() -> dict[str, KVCacheSpec]:
    """Qwen3-Next without padding: a state is no multiple of attention's page."""
    states = MambaSpec(
        block_size=32,
        shapes=((3, 256), (16, 300)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_cache_mode="align",
    )
    return named(attn=(2, replace(FULL, block_size=32)), mamba=(6, states))


def padded() -> dict[str, KVCacheSpec]:
    """Pages that are padded by half, as beside a larger page of other layers."""
    return named(attn=(3, replace(FULL, page_size_padded=12288)))


COMPACT = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
EVERY = (*COMPACT, "LHBNC", "BHLNC")
OUTERMOST = ("BLHNC", "BLNHC")
# What vLLM can make of each kind, whatever its attention backends accept.
MODELS: dict[str, tuple[Callable[[], dict[str, KVCacheSpec]], tuple[str, ...]]] = {
    "dense": (dense, EVERY),
    "grouped": (grouped, EVERY),
    "latent": (latent, EVERY),
    "window": (window, EVERY),
    "unlike": (unlike, COMPACT),
    "indexed": (indexed, COMPACT),
    "compressed": (compressed, OUTERMOST),
    "recurrent": (recurrent, COMPACT),
    "mixed": (mixed, COMPACT),
    "padded": (padded, COMPACT),
}


def made(
    folder: Path, model: str, layout: str, *, blocks_per_chunk: int = 1, blocks: int = BLOCKS
) -> Engine:
    """What an engine of this model has when it calls the connector.

    Raises:
        ValueError, AssertionError, NotImplementedError: vLLM cannot make it.
    """
    config = engine_config(folder, {"blocks_per_chunk": blocks_per_chunk}, layout=None)
    specs = MODELS[model][0]()
    config.cache_config.mamba_cache_mode = "align"
    resolve_kv_cache_layout(config, [[layout]], specs.values())
    return placed(config, specs, blocks)
