"""`kvd plan`: figures from a model's config.json, and fragments by the layout of its KV cache."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from docs import generate_models
from kvd.cli import cli
from kvd.errors import PlanError
from kvd.plan.figures import (
    BLOCKS,
    HEADS_OUTSIDE,
    PAGES,
    Plan,
    PlanInputs,
    PlannedGroup,
    make_plan,
)
from kvd.plan.model import read_model

GIB = 1024**3


def planned(config: dict[str, Any], **changes: Any) -> Plan:
    """The plan with one rank, 16-token blocks and 64 GiB, but for the changes."""
    inputs: dict[str, Any] = {
        "tensor_parallel": 1,
        "block_size": 16,
        "dtype": "auto",
        "cpu_bytes": 64 * GIB,
        "blocks_per_chunk": 1,
    }
    return make_plan(read_model(config), PlanInputs(**(inputs | changes)))


MODELS: list[dict[str, Any]] = json.loads(generate_models.MODELS.read_text(encoding="utf-8"))
CONFIGS: dict[str, dict[str, Any]] = {model["name"]: model["config"] for model in MODELS}
LLAMA = CONFIGS["Llama-3.1-8B"] | {"max_position_embeddings": 131_072}
GEMMA3 = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    "text_config": {
        key: value
        for key, value in CONFIGS["Gemma-3-27B"].items()
        if key not in ("dtype", "sliding_window_pattern")
    },
}
QWEN = CONFIGS["Qwen3-Next-80B-A3B"]
NEMOTRON = CONFIGS["Nemotron-3-Nano-30B-A3B"] | {
    "hybrid_override_pattern": "M-M*MEMEM*",
    "mamba_ssm_cache_dtype": None,
}


def test_a_model_with_grouped_heads() -> None:
    """Llama 3 8B: 2 x 8 heads x 128 x 2 bytes x 32 layers a token, 2 MiB a block."""
    result = planned(LLAMA, blocks_per_chunk=4)
    assert result.attention == "gqa"
    assert result.bytes_per_token == 131_072
    assert result.bytes_per_block == 2 * 1024**2
    assert result.bytes_per_chunk == 8 * 1024**2
    assert result.num_chunks == 8192
    assert result.pool_tokens == 8192 * 64
    assert result.longest_request is None
    split = planned(LLAMA, tensor_parallel=16)  # more ranks than heads: each keeps one
    assert (split.bytes_per_token_rank, split.bytes_per_token) == (131_072 // 8, 131_072 * 2)
    assert planned(LLAMA, gpu_blocks=1_000_000).longest_request == 131_072  # the model's limit
    bounded = planned(LLAMA, gpu_blocks=4001, block_override=101)
    assert (bounded.longest_request, bounded.longest_request_with_override) == (64_000, 1600)


def test_a_latent_is_stored_once() -> None:
    """MLA: latent and rotary part, once for all ranks, keys and values not counted twice."""
    kimi = {"model_type": "kimi_k25", "text_config": CONFIGS["Kimi-K2"]}
    result = planned(kimi, tensor_parallel=8)  # nested, as Kimi K2.5 has it
    assert (result.model, result.attention) == ("kimi_k2", "mla")
    assert result.replicated
    assert result.bytes_per_token == result.bytes_per_token_rank == (512 + 64) * 2 * 61
    assert result.bytes_per_block == result.bytes_per_block_rank == (512 + 64) * 2 * 61 * 16
    assert result.bytes_per_chunk == -(-result.bytes_per_block // 4096) * 4096


def test_interleaved_windows_make_groups_of_the_smaller_kind() -> None:
    """Gemma 3 27B: 10 full and 52 sliding layers make 1 + 6 groups that share blocks."""
    result = planned(GEMMA3, gpu_blocks=20_000)
    sliding = [(9, 1024)] * 4 + [(8, 1024)] * 2
    shapes = [(group.layers, group.sliding_window) for group in result.groups]
    assert shapes == [*sliding, (10, None)]
    page = 2 * 16 * 128 * 2 * 16
    assert result.bytes_per_token == page // 16 * 62
    assert result.bytes_per_block == 10 * page
    assert result.pool_tokens == result.num_chunks // 7 * 16
    assert result.longest_request == 131_072  # the family's own limit


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": 4096}, {4096}),
        ({"sliding_window": None}, {None}),
        ({"sliding_window": 4096, "use_sliding_window": False}, {None}),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 28}, {None, 64}),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}, {64}),
        ({"sliding_window": 64, "max_window_layers": 28}, {64}),
        ({"sliding_window": 4096, "sliding_window_pattern": 4}, {None, 4096}),
    ],
)
def test_windows_follow_the_models_own_fields(
    fields: dict[str, Any], windows: set[int | None]
) -> None:
    """Which layers slide is said in several ways; each is understood."""
    model = read_model(LLAMA | fields)
    assert set(model.windows) == windows
    if fields.get("max_window_layers") == 28 and "use_sliding_window" in fields:
        assert model.windows.index(64) == 28


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `kvd plan`."""
    result = CliRunner().invoke(cli, ["plan", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_json_holds_the_figures(folder: Path) -> None:
    """`--json` prints one object with the figures, from a folder or the file itself."""
    status, out, _ = run(str(folder), "--json", "--tp", "2", "--cpu-bytes", "1GiB")
    report = json.loads(out)
    assert status == 0
    assert report["num_chunks"] == 512
    assert report["bytes_per_token"] == 131_072
    (group,) = report["groups"]
    assert (group["layers"], group["sliding_window"], group["page_bytes"]) == (32, None, 32_768)
    assert group["fragments"]["LBHNC"] == {"nbytes": 32_768, "per_block": 32}
    assert group["fragments"]["BLHNC"] == {"nbytes": 32 * 32_768, "per_block": 1}
    assert run(str(folder / "config.json"), "--json", "--tp", "2", "--cpu-bytes", "1GiB")[1] == out


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("{", "not JSON"),
        ("{}", "no num_attention_heads"),
    ],
)
def test_a_file_that_is_no_config_is_one_clear_error(
    tmp_path: Path, content: str | None, text: str
) -> None:
    """A missing file, bad JSON or a missing field: exit 1, one line, no traceback."""
    file = tmp_path / "model.json"
    if content is not None:
        file.write_text(content)
    status, out, err = run(str(file))
    assert status == 1
    assert out == ""
    assert err.startswith("Error: ")
    assert text in err
    assert err.count("\n") == 1


def test_options_that_cannot_work_are_refused(folder: Path) -> None:
    """A bad size, a budget below a chunk, a request that never fits, ranks without a head each."""
    assert "such as 64GiB" in run(str(folder), "--cpu-bytes", "lots")[2]
    assert "holds no chunk of 2097152 bytes" in run(str(folder), "--cpu-bytes", "1MiB")[2]
    long = ("--max-seq-len", "8192")
    blocks = ("--gpu-blocks", "4001")
    assert run(str(folder), *long, *blocks)[0] == 0
    status, _, err = run(str(folder), *long, *blocks, "--block-override", "101")
    assert status == 1
    assert "max seq len 8192 needs 512 blocks" in err
    assert "available are 100" in err
    assert "101 blocks by the override" in err
    assert "give --gpu-blocks" in run(str(folder), *long)[2]
    assert "32 attention heads" in run(str(folder), "--tp", "3")[2]
    (folder / "config.json").write_text(json.dumps(QWEN))  # its states take blocks of their own
    assert "leave out --gpu-blocks" in run(str(folder), *blocks)[2]


def test_the_layers_of_nemotron_are_those_of_its_pattern() -> None:
    """M keeps a state, * attends, the others keep nothing; states have 32 bits by default."""
    result = planned(NEMOTRON)
    assert (result.layers, result.state_layers) == (2, 5)
    assert [group.layers for group in result.groups] == [2, 2, 2, 1]
    full = 64 * 64 * 128
    assert result.groups[1].state_bytes == (64 * 64 + 2 * 8 * 128) * 3 * 2 + full * 4
    half = planned(NEMOTRON | {"mamba_ssm_cache_dtype": "bfloat16"})
    assert result.groups[1].state_bytes - (half.groups[1].state_bytes or 0) == full * 2


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (LLAMA | {"num_hidden_layers": None}, "no num_hidden_layers"),
        (LLAMA | {"num_hidden_layers": "32"}, "num_hidden_layers = '32' is no whole number"),
        (LLAMA | {"num_key_value_heads": 0}, "num_key_value_heads = 0"),
        (LLAMA | {"kv_lora_rank": 512}, "no qk_rope_head_dim"),
        (LLAMA | {"layer_types": ["linear_attention"] * 32}, "'linear_attention'"),
        (LLAMA | {"layer_types": ["sliding_attention"] * 32}, "no sliding_window"),
        (LLAMA | {"mamba_d_state": 16}, "state layers"),
        (LLAMA | {"index_head_dim": 128}, "indexer"),
        (NEMOTRON | {"hybrid_override_pattern": None}, "hybrid_override_pattern = None is no text"),
        (NEMOTRON | {"hybrid_override_pattern": "M-M-"}, "2 state layers and 0 attention layers"),
        (NEMOTRON | {"n_groups": None}, "no n_groups"),
        (NEMOTRON | {"mamba_ssm_cache_dtype": "int3"}, "the states' dtype 'int3'"),
        (NEMOTRON | {"model_type": "other"}, "ssm_state_size = 128: state layers"),
        (QWEN | {"layer_types": ["chunked"]}, "has a kind that kvd plan does not cover"),
        (QWEN | {"model_type": "other"}, "linear_num_value_heads = 32: state layers"),
    ],
)
def test_what_cannot_be_planned_is_named(config: dict[str, Any], text: str) -> None:
    """A missing field, a bad value, a kind of cache or a family not covered: an error names it."""
    with pytest.raises(PlanError, match=re.escape(text)):
        planned(config)


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
                fragments = group.fragments[layout]
                assert runs(plan, group, heads, layout) == [fragments.nbytes] * fragments.per_block


def test_the_table_of_models_is_generated() -> None:
    """docs/vllm.md has the table that docs/models.json and the plan's functions make."""
    page = generate_models.PAGE.read_text(encoding="utf-8")
    assert generate_models.page(page) == page, "run make docs"
