"""The layout that vLLM is asked for, whether it takes it, and what the worker's log says."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.utils import (
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)

from kvd_client import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_client.vllm import KvdConnector, OptionsError
from kvd_client.vllm.layout import layout_line
from kvd_client.vllm.options import KV_LAYOUTS
from tests.vllm.configs import engine_config

KIB = 1024


def unresolved(folder: Path, **extra: Any) -> VllmConfig:
    """An engine's configuration before vLLM has decided about the layout."""
    config = engine_config(folder, extra)
    config.cache_config.kv_cache_layout = None
    config.cache_config.user_specified_block_size = False
    return config


def registered(page: int, layers: int, *, window_layers: int = 0) -> RankLayout:
    """A layout of so many fragments a block, and of fewer for a second group."""
    tensors = tuple(TensorSpec(0, 2 * layer * page, page, page) for layer in range(layers))
    refs = tuple(TensorRef(layer, page) for layer in range(layers))
    groups: tuple[GroupSpec, ...] = (GroupSpec(refs, 16),)
    if window_layers:
        groups += (GroupSpec(refs[:window_layers], 16, "window", 64),)
    return RankLayout(2, 1, 16, (2 * layers * page,), tensors, groups)


def test_an_unknown_layout_ends_the_start_with_the_known_ones(tmp_path: Path) -> None:
    """One sentence names the value and what is possible, before vLLM makes a KV cache."""
    config = unresolved(tmp_path, kv_layout="HND")
    with pytest.raises(OptionsError, match="kv_layout='HND' is no layout of vLLM's") as refused:
        KvdConnector.get_required_kvcache_layout(config)
    assert all(name in str(refused.value) for name in KV_LAYOUTS)


@pytest.mark.parametrize(
    ("extra", "asked"),
    [
        ({}, "BLHNC"),
        ({"kv_layout": "auto"}, "BLHNC"),
        ({"kv_layout": "LBNHC"}, "LBNHC"),
        ({"kv_layout": "none"}, None),
    ],
)
def test_a_block_of_all_layers_is_asked_for_unless_told_otherwise(
    tmp_path: Path, extra: dict[str, str], asked: str | None
) -> None:
    """The engine gets the option's name, or none at all and chooses itself."""
    assert KvdConnector.get_required_kvcache_layout(unresolved(tmp_path, **extra)) == asked


@pytest.mark.parametrize(
    ("size", "given", "asked"), [(128, True, None), (64, True, "BLHNC"), (128, False, "BLHNC")]
)
def test_blocks_that_may_have_to_be_split_stay_as_vllm_has_them(
    tmp_path: Path, size: int, given: bool, asked: str | None
) -> None:
    """A size that no backend chose may need kernel blocks; vLLM cannot cut those from a row."""
    config = unresolved(tmp_path)
    config.cache_config.block_size = size
    config.cache_config.user_specified_block_size = given
    assert KvdConnector.get_required_kvcache_layout(config) == asked


@pytest.mark.parametrize("kind", ["is_hybrid", "use_mla", "types"])
def test_blocks_that_are_not_plain_attention_stay_as_vllm_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Recurrent states, latents, layers of several types; an explicit wish is passed on."""
    config = unresolved(tmp_path)
    if kind == "types":
        config.cache_config.kv_cache_dtype_skip_layers = ["0"]
    else:
        monkeypatch.setattr(type(config.model_config), kind, True)
    assert KvdConnector.get_required_kvcache_layout(config) is None
    config.kv_transfer_config.kv_connector_extra_config["kv_layout"] = "BLHNC"
    assert KvdConnector.get_required_kvcache_layout(config) == "BLHNC"


@pytest.mark.parametrize(
    ("backend", "taken"),
    [(FlashAttentionBackend, "BLHNC"), (CPUAttentionBackend, "LBHNC")],
    ids=["any layout", "the CPU's"],
)
def test_vllm_takes_the_wish_where_its_backends_can(
    tmp_path: Path, backend: type[Any], taken: str
) -> None:
    """Its own resolution asks the connector by its configuration, and drops what cannot be."""
    config = unresolved(tmp_path)
    names = [layout.name for layout in get_supported_kv_cache_layouts([backend])]
    assert resolve_kv_cache_layout(config, [names]).name == taken


def line(layout: RankLayout, taken: str, wanted: str | None, *backends: str) -> str:
    """What the log says of memory on a GPU."""
    return layout_line(layout, taken, wanted, backends, host=False)


@pytest.mark.parametrize(
    ("taken", "wanted", "backends", "said", "remedy"),
    [
        ("LBNHC", None, [], "", "set kv_layout=BLHNC in kv_connector_extra_config"),
        ("LBNHC", "LBNHC", [], "", "set kv_layout=BLHNC in kv_connector_extra_config"),
        (
            *("LBHNC", "BLHNC", ["X"]),
            "; BLHNC was asked for, but attention backend X cannot use it",
            "choose one that can, with --attention-backend",
        ),
        (
            *("LBHNC", "BHLNC", []),
            "; BHLNC was asked for, but vLLM cannot use it for this model",
            "raise --block-size",
        ),
        ("BLHNC", "BLHNC", [], "", "raise --block-size"),
    ],
)
def test_small_fragments_come_with_a_remedy(
    taken: str, wanted: str | None, backends: list[str], said: str, remedy: str
) -> None:
    """Which option to set, which backend, or larger blocks; none in host memory."""
    layout = registered(8 * KIB, 4)
    begin = f"KV cache layout {taken}: fragments of 8 KiB, 4 a block{said}"
    assert line(layout, taken, wanted, *backends) == (
        f"{begin}; copies of less than 28 KiB are slow: {remedy}"
    )
    assert layout_line(layout, taken, wanted, backends, host=True) == begin
