"""`kvd plan` and docs/vllm.md against vLLM's own code: groups, pages, fragments, backends."""

import ast
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.v1.attention.backends as backends_package
from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_offload.cpu.swap_blocks_triton import THRESHOLD_BYTES

from docs import generate_models
from kvd.plan.fragments import BLOCKS, PAGES, SMALL_BYTES
from kvd.plan.model import Model, read_model
from tests.vllm.configs import engine_config

MODELS: list[dict[str, Any]] = json.loads(generate_models.MODELS.read_text(encoding="utf-8"))
NUM_BLOCKS = 4


def layer_specs(model: Model, ranks: int, block_size: int) -> dict[str, KVCacheSpec]:
    """What vLLM's layers of such a model say of their caches, in bfloat16."""
    if model.attention == "mla":
        heads, common = 1, {"head_size": model.head_elements}
    else:
        heads, common = max(1, model.kv_heads // ranks), {"head_size": model.head_elements // 2}
    given: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": heads,
        "dtype": torch.bfloat16,
        **common,
    }
    full = MLAAttentionSpec if model.attention == "mla" else FullAttentionSpec
    return {
        f"model.layers.{index}.self_attn.attn": full(**given)
        if window is None
        else SlidingWindowSpec(sliding_window=window, **given)
        for index, window in enumerate(model.windows)
    }


def placed(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> KVCacheConfig:
    """The KV cache as vLLM groups and places it."""
    config.cache_config.num_gpu_blocks_override = NUM_BLOCKS
    groups = get_kv_cache_groups(config, specs)
    return get_kv_cache_config_from_groups(config, groups, available_memory=0)


def runs(cache: KVCacheConfig, group: int) -> list[int]:
    """Bytes of each run of block 1 of a group, by where vLLM puts the group's pages."""
    spec = cache.kv_cache_groups[group].kv_cache_spec
    names = set(cache.kv_cache_groups[group].layer_names)
    pages = sorted(
        tensor.offset + index * tensor.layer_stride + tensor.block_stride
        for tensor in cache.kv_cache_tensors
        for index, name in enumerate(tensor.layers)
        if name in names
    )
    found = [spec.page_size_bytes]
    for before, page in pairwise(pages):
        if page == before + spec.page_size_bytes:
            found[-1] += spec.page_size_bytes
        else:
            found.append(spec.page_size_bytes)
    return found


@pytest.mark.parametrize("layout", [*PAGES, "BLHNC", "BLNHC"])
@pytest.mark.parametrize("model", MODELS, ids=[model["name"] for model in MODELS])
def test_groups_and_fragments_are_those_of_vllm(
    model: dict[str, Any], layout: str, tmp_path: Path
) -> None:
    """Groups and pages are as the engine makes them, and lie where the plan says."""
    for ranks in model["tensor_parallel"]:
        plan = generate_models.planned(model, ranks)
        specs = layer_specs(read_model(model["config"]), ranks, model["block_size"])
        cache = placed(engine_config(tmp_path, layout=layout), specs)
        found = [
            (len(group.layer_names), group.kv_cache_spec.page_size_bytes, runs(cache, index))
            for index, group in enumerate(cache.kv_cache_groups)
        ]
        told = [
            (group.layers, group.page_bytes, [item.nbytes] * item.per_block)
            for group in plan.groups
            for item in [group.fragments[layout]]
        ]
        assert sorted(found) == sorted(told)


def test_the_layouts_are_those_that_vllm_has() -> None:
    """No layout is left out, and what the plan says of each follows from its name."""
    outside = {layout.name for layout in KVCacheLayout if layout.name.index("H") < 2}
    assert outside == {"LHBNC", "BHLNC"}
    assert {*PAGES, *BLOCKS, "LHBNC"} == {layout.name for layout in KVCacheLayout}
    assert set(BLOCKS) == {layout.name for layout in KVCacheLayout if layout.is_block_outermost}
    assert all(layout.name.endswith("C") for layout in KVCacheLayout)


def test_small_is_what_vllm_calls_so() -> None:
    """Fragments are small below the threshold under which vLLM copies with a kernel."""
    assert SMALL_BYTES == THRESHOLD_BYTES


def restricted() -> dict[str, set[tuple[str, ...]]]:
    """The layouts of each registered backend that does not take any, read from its source.

    Most of these modules cannot be imported without their devices.
    """
    (folder,) = backends_package.__path__
    classes = {
        node.name: node
        for file in Path(folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    found = {}
    for backend in AttentionBackendEnum:
        path = str(backend.value)
        node = classes.get(path.rpartition(".")[2]) if path.startswith("vllm.v1.") else None
        while node and not declared(node):
            bases = [classes.get(ast.unparse(base)) for base in node.bases]
            node = next(filter(None, bases), None)
        if node:
            found[backend.name] = declared(node)
    return found


def declared(node: ast.ClassDef) -> set[tuple[str, ...]]:
    """The tuples of layouts that a class's own `supported_kv_cache_layouts` returns."""
    return {
        tuple(item.attr for item in inner.elts if isinstance(item, ast.Attribute))
        for function in node.body
        if isinstance(function, ast.FunctionDef) and function.name == "supported_kv_cache_layouts"
        for inner in ast.walk(function)
        if isinstance(inner, ast.Tuple) and isinstance(inner.ctx, ast.Load)
        if any(isinstance(item, ast.Attribute) for item in inner.elts)
    }


def test_the_table_of_backends_is_what_vllm_says() -> None:
    """docs/vllm.md names the layouts of each backend that does not take any, and no others."""
    page = generate_models.PAGE.read_text(encoding="utf-8")
    section = page.partition("| backend | layouts")[2].partition("\n\n")[0]
    told: dict[str, tuple[str, ...]] = {}
    for line in section.splitlines()[2:]:
        _, backends, layouts, _ = line.split("|")
        names = re.findall(r"`(\w+)`", backends)
        told |= dict.fromkeys(names, tuple(re.findall(r"`(\w+)`", layouts)))
    assert told.pop("FLASH_ATTN") == told.pop("TRITON_ATTN") == ()
    found = restricted()
    assert told.keys() == found.keys()
    for name, taken in told.items():
        assert taken in found[name]
