"""Which vLLM engines may share chunks: everything that the KV's bytes depend on.

Prompt tokens, LoRA, images and cache salts are in vLLM's block hashes; layers,
pages and ranks are in the registered layout. The rest is here. A difference too many
costs misses, a difference too few wrong tokens.
"""

import os

import vllm
from vllm.config import VllmConfig
from vllm.v1.kv_offload.config import OffloadingConfig

from kvd_client import Fingerprint
from kvd_client.adapters import digest, hub_commits, weight_files
from kvd_client.vllm.upstream import attention_backends
from kvd_client.vllm.versions import release


def fingerprint(config: OffloadingConfig, vllm_config: VllmConfig, label: str) -> Fingerprint:
    """Return the fingerprint of one engine, the same in all its ranks."""
    model, cache, load = vllm_config.model_config, vllm_config.cache_config, vllm_config.load_config
    speculative = vllm_config.speculative_config
    parallel = config.parallel
    return Fingerprint(
        model=str(model.model),
        revision=digest(
            model.revision,
            weight_files(model.model),
            hub_commits(model.model, model.revision, load.download_dir),
            model.hf_config.to_dict(),
            model.quantization,
            [load.load_format, model.seed if load.load_format == "dummy" else None],
            speculative and [speculative.model, speculative.revision, speculative.method],
        ),
        dtype=(
            f"{model.dtype} weights, {config.model.dtype} cache,"
            f" {cache.mamba_cache_dtype} and {cache.mamba_ssm_cache_dtype} states"
        ).replace("torch.", ""),
        kv_layout=(
            f"{config.kv_cache_layout}, {cache.prefix_caching_hash_algo},"
            f" vllm {release(vllm.__version__)}"
        ),
        attention_backend=", ".join(attention_backends(vllm_config)),
        parallelism=(
            f"tp {parallel.tp_size} pp {parallel.pp_size} pcp {parallel.pcp_size}"
            f" dcp {parallel.dcp_size}"
            f" interleave {vllm_config.parallel_config.cp_kv_cache_interleave_size}"
            f" {os.environ.get('VLLM_PP_LAYER_PARTITION', '')}".strip()
        ),
        label=label,
    )


def random_hash_seed(vllm_config: VllmConfig) -> str:
    """Return a warning where block hashes differ from process to process, else ""."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if not algorithm.startswith("xxhash") or os.environ.get("PYTHONHASHSEED") is not None:
        return ""
    return (
        f"prefix_caching_hash_algo={algorithm} is seeded anew in every process, so that no other"
        " and no restarted engine finds this engine's chunks; use sha256 (vLLM's default), or set"
        " PYTHONHASHSEED to the same value for all engines"
    )
