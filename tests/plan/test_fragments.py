"""Fragments by the layout of the KV cache, and the table of well-known models in docs/vllm.md."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from docs import generate_models
from kvd.cli import cli
from kvd.plan.figures import Plan
from kvd.plan.fragments import BLOCKS, PAGES
from kvd_proto.blocks import JobBlocks
from kvd_proto.expand import Expander
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec, validate_layout

MODELS: list[dict[str, Any]] = json.loads(generate_models.MODELS.read_text(encoding="utf-8"))
NUM_BLOCKS = 4


def registered(plan: Plan, *, packed: bool) -> RankLayout:
    """What one rank registers: a tensor a layer, or one whose page is the whole block."""
    page, layers = plan.groups[0].page_bytes, max(group.layers for group in plan.groups)
    if packed:
        tensors = [TensorSpec(0, 0, layers * page, layers * page)]
        refs = [[TensorRef(0, group.layers * page)] for group in plan.groups]
    else:
        tensors = [TensorSpec(0, i * page * NUM_BLOCKS, page, page) for i in range(layers)]
        refs = [
            [TensorRef(i, group.state_bytes or page) for i in range(group.layers)]
            for group in plan.groups
        ]
    layout = RankLayout(
        num_blocks=NUM_BLOCKS,
        blocks_per_chunk=1,
        hash_block_size=plan.block_size,
        storages=(layers * page * NUM_BLOCKS,),
        tensors=tuple(tensors),
        groups=tuple(GroupSpec(tuple(pages), plan.block_size) for pages in refs),
    )
    validate_layout(layout)
    return layout


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("model", MODELS, ids=[model["name"] for model in MODELS])
def test_fragments_are_the_copies_of_a_block(model: dict[str, Any], packed: bool) -> None:
    """A job of one block is expanded to as many runs of such sizes as the plan says."""
    for ranks in model["tensor_parallel"]:
        plan = generate_models.planned(model, ranks)
        expander = Expander(registered(plan, packed=packed))
        for index, group in enumerate(plan.groups):
            sizes = [int(number == index) for number in range(len(plan.groups))]
            copies = expander.expand(JobBlocks.of([2], sizes, [0] * len(sizes), [1], [1]))
            found = copies.nbytes.tolist()
            for name in BLOCKS if packed else PAGES:
                told = group.fragments[name]
                assert found == [told.nbytes] * told.per_block


def test_every_layout_of_vllm_but_one_has_its_fragments() -> None:
    """Of the six layouts only the one that is not served has none."""
    plan = generate_models.planned(MODELS[0], 1)
    assert set(plan.groups[0].fragments) == {"LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"}


def test_the_table_of_models_is_generated() -> None:
    """docs/vllm.md has the table that docs/models.json and the plan's functions make."""
    page = generate_models.PAGE.read_text(encoding="utf-8")
    assert generate_models.page(page) == page, "run make docs"


def test_the_table_names_the_figures_of_a_model() -> None:
    """Llama 3.1 70B over 8 ranks: 80 pages of 8 KiB, small and so in bold, or one of 640 KiB."""
    (line,) = [
        line
        for line in generate_models.table().splitlines()
        if line.startswith("| Llama-3.1-70B | 8 |")
    ]
    cells = line.strip("| ").split(" | ")
    assert cells[2:] == ["16", "327,680", "8 KiB", "**80 of 8 KiB**", "1 of 640 KiB"]


def test_every_model_names_its_source() -> None:
    """The table says of each model where its values come from."""
    sources = generate_models.table().splitlines()[-1]
    for model in MODELS:
        assert model["source"] in sources
        assert model["name"] in sources


@pytest.mark.parametrize(("ranks", "small"), [("2", False), ("8", True)])
def test_small_fragments_are_called_small(tmp_path: Path, ranks: str, small: bool) -> None:
    """`kvd plan` shows the fragments of both layouts, and which of them are small."""
    (llama,) = [model for model in MODELS if model["name"] == "Llama-3.1-70B"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(llama["config"]))
    out = CliRunner().invoke(cli, ["plan", str(file), "--tp", ranks]).stdout
    (paged,) = [line for line in out.splitlines() if "fragment in LBHNC" in line]
    (whole,) = [line for line in out.splitlines() if "fragment in BLHNC" in line]
    assert "80 a block and rank" in paged
    assert ("below 28 KiB: small" in paged) is small
    assert ("8 KiB" if small else "32 KiB") in paged
    assert ("640 KiB" if small else "2.5 MiB") in whole
    assert "1 a block and rank" in whole
    assert "small" not in whole


def test_groups_of_several_sizes_are_told_from_the_least_to_the_most(tmp_path: Path) -> None:
    """Gemma 3 27B: groups of 8, 9 and 10 layers, so blocks of three sizes."""
    (gemma,) = [model for model in MODELS if model["name"] == "Gemma-3-27B"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(gemma["config"]))
    out = CliRunner().invoke(cli, ["plan", str(file), "--tp", "4"]).stdout
    assert "8 to 10 a block and rank" in out
    assert "256 KiB to 320 KiB" in out
