"""`kvd plan` and docs/vllm.md against vLLM's own code: groups, pages, fragments, backends."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.model_executor.models import ModelRegistry
from vllm.platforms.interface import Platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_offload.cpu.swap_blocks_triton import THRESHOLD_BYTES

from docs import generate_models
from kvd.plan.figures import BLOCKS, HEADS_OUTSIDE, PAGES, SMALL_BYTES
from kvd.plan.model import Model, read_model
from kvd_client.vllm.layout import SMALL_FRAGMENT, share_caches
from tests.vllm.configs import allocated, engine_config

MODELS: list[dict[str, Any]] = json.loads(generate_models.MODELS.read_text(encoding="utf-8"))
ARCHITECTURES = {"qwen3_next": "Qwen3NextForCausalLM", "nemotron_h": "NemotronHForCausalLM"}
PURE = [model for model in MODELS if model["config"]["model_type"] not in ARCHITECTURES]
WITH_STATES = [model for model in MODELS if model not in PURE]
NUM_BLOCKS = 4


class Backend:
    """An attention backend of which nothing is special."""

    @staticmethod
    def customize_spec(spec: AttentionSpec) -> AttentionSpec:
        """Leave it as it is."""
        return spec

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[MultipleOf]:
        """Take what most GPU backends take."""
        return [MultipleOf(16)]


class Gpus:
    """What vLLM's rule for block sizes asks its platform; a CPU's has rules of its own."""

    @staticmethod
    def _find_non_ssm_backends(vllm_config: VllmConfig) -> list[type[Backend]]:
        del vllm_config
        return [Backend]


def attention_specs(model: Model, ranks: int, block_size: int) -> dict[str, KVCacheSpec]:
    """What vLLM's attention layers of such a model say of their caches, in bfloat16."""
    given: dict[str, Any] = {"block_size": block_size, "dtype": torch.bfloat16}
    full = FullAttentionSpec
    if model.attention == "mla":
        full = MLAAttentionSpec
        given |= {"num_kv_heads": 1, "head_size": model.head_elements}
    else:
        heads = max(1, model.kv_heads // ranks)
        given |= {"num_kv_heads": heads, "head_size": model.head_elements // 2}
    return {
        f"model.layers.{index}.self_attn.attn": full(**given)
        if window is None
        else SlidingWindowSpec(sliding_window=window, **given)
        for index, window in enumerate(model.windows)
    }


def with_states(
    model: dict[str, Any], ranks: int, folder: Path
) -> tuple[VllmConfig, dict[str, KVCacheSpec]]:
    """A configuration of an engine with such a model, and what its layers say of their caches."""
    architecture = ARCHITECTURES[model["config"]["model_type"]]
    (folder / "config.json").write_text(
        json.dumps(model["config"] | {"architectures": [architecture]})
    )
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True),
        cache_config=CacheConfig(block_size=model["block_size"]),
        parallel_config=ParallelConfig(
            tensor_parallel_size=ranks, distributed_executor_backend="mp"
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvdConnector",
            kv_connector_module_path="kvd_client.vllm",
            kv_role="kv_both",
        ),
    )
    cache = config.cache_config
    if "mamba_ssm_cache_dtype" not in model["config"]:
        cache.mamba_ssm_cache_dtype = "auto"  # a CPU's platform has set its own
    align = Platform._align_hybrid_block_size  # the rule itself is asked
    align.__func__(Gpus, config, Backend)
    found = read_model(model["config"])
    assert found.states is not None
    cls, _ = ModelRegistry.resolve_model_cls(architecture, model_config=config.model_config)
    state = MambaSpec(
        block_size=cache.mamba_block_size,
        shapes=cls.get_mamba_state_shape_from_config(config),
        dtypes=cls.get_mamba_state_dtype_from_config(config),
        page_size_padded=cache.mamba_page_size_padded,
        mamba_cache_mode=cache.mamba_cache_mode,
    )
    specs = attention_specs(found, ranks, cache.block_size)
    return config, specs | {f"state.{index}": state for index in range(found.states.layers)}


def placed(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> KVCacheConfig:
    """The KV cache as vLLM groups and places it."""
    config.cache_config.num_gpu_blocks_override = NUM_BLOCKS
    groups = get_kv_cache_groups(config, specs)
    return get_kv_cache_config_from_groups(config, groups, available_memory=0)


def registered(config: VllmConfig, cache: KVCacheConfig) -> list[list[int]]:
    """Bytes of a block's fragments, for each group, as a rank registers them."""
    offloading = build_offloading_config(config, cache)
    shared, layout = share_caches(allocated(config, cache), offloading, cache)
    shared.close()
    return [[ref.page_bytes for ref in group.refs] for group in layout.groups]


def check(model: dict[str, Any], ranks: int, config: VllmConfig, cache: KVCacheConfig) -> None:
    """Compare groups, pages and fragments with those of the plan."""
    plan = generate_models.planned(model, ranks)
    layout = config.cache_config.get_resolved_kv_cache_layout().name
    found = [
        (
            len(group.layer_names),
            group.kv_cache_spec.block_size,
            group.kv_cache_spec.page_size_bytes,
            fragments,
        )
        for group, fragments in zip(cache.kv_cache_groups, registered(config, cache), strict=True)
    ]
    told = [
        (group.layers, plan.block_size, group.page_bytes, [item.nbytes] * item.per_block)
        for group in plan.groups
        for item in [group.fragments[layout]]
    ]
    assert sorted(found) == sorted(told)


@pytest.mark.parametrize("layout", [*PAGES, *BLOCKS, *HEADS_OUTSIDE])
@pytest.mark.parametrize("model", PURE, ids=[model["name"] for model in PURE])
def test_groups_and_fragments_are_those_of_vllm(
    model: dict[str, Any], layout: str, tmp_path: Path
) -> None:
    """Groups and pages are as the engine makes them, and lie where the plan says."""
    config = engine_config(tmp_path, layout=layout)
    for ranks in model["tensor_parallel"]:
        specs = attention_specs(read_model(model["config"]), ranks, model["block_size"])
        check(model, ranks, config, placed(config, specs))


@pytest.mark.parametrize("model", WITH_STATES, ids=[model["name"] for model in WITH_STATES])
def test_states_and_blocks_are_those_of_vllm(model: dict[str, Any], tmp_path: Path) -> None:
    """Blocks are as large as the engine makes them for its states, in layouts of both kinds."""
    for ranks in model["tensor_parallel"]:
        config, specs = with_states(model, ranks, tmp_path)
        for layout in ("LBHNC", "BLHNC"):
            config.cache_config.kv_cache_layout = layout
            check(model, ranks, config, placed(config, specs))


def test_the_layouts_are_those_that_vllm_has() -> None:
    """No layout is left out, and what the plan says of each follows from its name."""
    assert {*PAGES, *BLOCKS, *HEADS_OUTSIDE} == {layout.name for layout in KVCacheLayout}
    for layout in KVCacheLayout:
        assert layout.is_block_compact == (layout.name not in HEADS_OUTSIDE)
        assert layout.is_layer_compact == (layout.name in (*PAGES, "LHBNC"))
        assert layout.name.endswith("C")


def test_small_is_what_vllm_calls_so() -> None:
    """Plan and log call fragments small below the threshold under which vLLM uses a kernel."""
    assert SMALL_BYTES == SMALL_FRAGMENT == THRESHOLD_BYTES
