"""Fragments by the layout of the KV cache, and the table of well-known models in docs/vllm.md."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from docs import generate_models
from kvd.cli import cli
from kvd.plan.figures import BLOCKS, HEADS_OUTSIDE, PAGES, Fragments, Plan, PlannedGroup, fragments
from kvd.plan.model import read_model
from kvd_proto.capacity import LayerGroup

MODELS: list[dict[str, Any]] = json.loads(generate_models.MODELS.read_text(encoding="utf-8"))
NUM_BLOCKS = 4


def runs(plan: Plan, group: PlannedGroup, heads: int, layout: str) -> list[int]:
    """Bytes of each run of block 2, from the strides that the layout's name gives."""
    content = group.page_bytes // heads // plan.block_size
    sizes = {"L": group.layers, "B": NUM_BLOCKS, "H": heads, "N": plan.block_size, "C": content}
    strides, stride = {}, 1
    for dimension in reversed(layout):
        if dimension == layout[0] == "B":
            stride = max(other.layers for other in plan.groups) * group.page_bytes
        strides[dimension] = stride
        stride *= sizes[dimension]
    inner = itertools.product(*(range(0, sizes[d] * strides[d], strides[d]) for d in "LHN"))
    starts = sorted(2 * strides["B"] + sum(offsets) for offsets in inner)
    edges = [i for i, start in enumerate(starts) if i == 0 or start != starts[i - 1] + content]
    return [(end - i) * content for i, end in itertools.pairwise([*edges, len(starts)])]


@pytest.mark.parametrize("layout", [*PAGES, *BLOCKS, *HEADS_OUTSIDE])
@pytest.mark.parametrize("model", MODELS, ids=[model["name"] for model in MODELS])
def test_fragments_follow_from_the_order_of_the_dimensions(
    model: dict[str, Any], layout: str
) -> None:
    """A block's bytes lie in as many runs as the plan says, in every layout."""
    read = read_model(model["config"])
    for ranks in model["tensor_parallel"]:
        plan = generate_models.planned(model, ranks)
        heads = read.rank_elements(ranks) // read.head_elements
        for group in plan.groups:
            if group.state_bytes is None and layout in group.fragments:
                told = group.fragments[layout]
                assert runs(plan, group, heads, layout) == [told.nbytes] * told.per_block


@pytest.mark.parametrize(
    ("padding", "expected"),
    [(0, Fragments(9600, 1)), (100, Fragments(9800, 1)), (101, Fragments(3200, 3))],
)
def test_small_padding_is_moved_along(padding: int, expected: Fragments) -> None:
    """Padded pages of a block are one fragment where the padding is a 32nd at most."""
    found = fragments(LayerGroup((3200 + padding,) * 3, 16), 3200, None)
    assert found["BLHNC"] == expected
    assert found["LBHNC"] == Fragments(3200, 3)


def test_the_table_of_models_is_generated() -> None:
    """docs/vllm.md has the table that docs/models.json and the plan's functions make."""
    page = generate_models.PAGE.read_text(encoding="utf-8")
    assert generate_models.page(page) == page, "run make docs"


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
