"""`kvd plan` and docs/vllm.md against vLLM's own code: groups, pages, fragments, backends."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.models import ModelRegistry
from vllm.platforms.interface import Platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
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
from kvd_client.vllm.layout import SMALL_FRAGMENT
from tests.vllm.configs import allocated, engine_config, placed, registered

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
    config = engine_config(
        folder,
        model=model["config"] | {"architectures": [architecture]},
        tensor_parallel=ranks,
        block_size=model["block_size"],
    )
    cache = config.cache_config
    if "mamba_ssm_cache_dtype" not in model["config"]:
        cache.mamba_ssm_cache_dtype = "auto"  # a CPU's platform has set its own
    align = Platform._align_hybrid_block_size  # the rule itself is asked
    align.__func__(Gpus, config, Backend)
    planned = read_model(model["config"])
    assert planned.states is not None
    cls, _ = ModelRegistry.resolve_model_cls(architecture, model_config=config.model_config)
    state = MambaSpec(
        block_size=cache.mamba_block_size,
        shapes=cls.get_mamba_state_shape_from_config(config),
        dtypes=cls.get_mamba_state_dtype_from_config(config),
        page_size_padded=cache.mamba_page_size_padded,
        mamba_cache_mode=cache.mamba_cache_mode,
    )
    specs = attention_specs(planned, ranks, cache.block_size)
    return config, specs | {f"state.{index}": state for index in range(planned.states.layers)}


def check(
    model: dict[str, Any], ranks: int, config: VllmConfig, specs: dict[str, KVCacheSpec]
) -> None:
    """Compare groups, pages and fragments with those of the plan."""
    plan = generate_models.planned(model, ranks)
    layout_name = config.cache_config.get_resolved_kv_cache_layout().name
    _, cache, offloading = placed(config, specs, NUM_BLOCKS)
    layout = registered(allocated(config, cache), offloading, cache)
    of_vllm = [
        (
            len(group.layer_names),
            group.kv_cache_spec.block_size,
            group.kv_cache_spec.page_size_bytes,
            [ref.page_bytes for ref in fragments.refs],
        )
        for group, fragments in zip(cache.kv_cache_groups, layout.groups, strict=True)
    ]
    of_the_plan = [
        (group.layers, plan.block_size, group.page_bytes, [item.nbytes] * item.per_block)
        for group in plan.groups
        for item in [group.fragments[layout_name]]
    ]
    assert sorted(of_vllm) == sorted(of_the_plan)


@pytest.mark.parametrize("layout", [*PAGES, *BLOCKS, *HEADS_OUTSIDE])
@pytest.mark.parametrize("model", PURE, ids=[model["name"] for model in PURE])
def test_groups_and_fragments_are_those_of_vllm(
    model: dict[str, Any], layout: str, tmp_path: Path
) -> None:
    """Groups and pages are as the engine makes them, and lie where the plan says."""
    config = engine_config(tmp_path, layout=layout)
    for ranks in model["tensor_parallel"]:
        specs = attention_specs(read_model(model["config"]), ranks, model["block_size"])
        check(model, ranks, config, specs)


@pytest.mark.parametrize("model", WITH_STATES, ids=[model["name"] for model in WITH_STATES])
def test_states_and_blocks_are_those_of_vllm(model: dict[str, Any], tmp_path: Path) -> None:
    """Blocks are as large as the engine makes them for its states, in layouts of both kinds."""
    for ranks in model["tensor_parallel"]:
        config, specs = with_states(model, ranks, tmp_path)
        for layout in ("LBHNC", "BLHNC"):
            config.cache_config.kv_cache_layout = layout
            check(model, ranks, config, specs)


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
