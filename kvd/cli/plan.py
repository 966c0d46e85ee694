"""`kvd plan`: what a model's KV cache takes, before anything runs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvd.cli.options import json_option
from kvd.errors import PlanError
from kvd.metrics.reading import latency, rate
from kvd.plan.figures import DTYPE_BYTES, SMALL_BYTES, Plan, PlanInputs, describe, make_plan
from kvd.plan.model import read_model
from kvd_proto.capacity import DEFAULT_BATCHED_TOKENS
from kvd_proto.sizes import format_size, parse_size

_Count = click.IntRange(min=1)


@click.command(context_settings={"show_default": True})
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--tp", "tensor_parallel", type=_Count, default=1, help="Tensor-parallel size.")
@click.option("--block-size", type=_Count, default=16, help="Tokens per block.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", *DTYPE_BYTES]),
    default="auto",
    help="Of the cache; auto is the model's own, 32-bit models in 16 bits.",
)
@click.option("--cpu-bytes", default="64GiB", help="Size of the pool.")
@click.option("--tier-bytes", default="0", help="Size of all tiers below the pool.")
@click.option("--tier-bandwidth", help="Bytes a second that come up from them, such as 2.3GB.")
@click.option("--blocks-per-chunk", type=_Count, default=1, help="Blocks that make a chunk.")
@click.option("--gpu-blocks", type=_Count, help="Blocks that the engine measured.")
@click.option("--block-override", type=_Count, help="Blocks that the operator set instead.")
@click.option(
    "--max-batched-tokens",
    "batched_tokens",
    type=_Count,
    default=DEFAULT_BATCHED_TOKENS,
    help="Most tokens of one engine step; counts behind sliding windows.",
)
@click.option("--max-seq-len", type=_Count, help="Fail if a request this long can never fit.")
@json_option("Print the figures as JSON.")
def plan(
    *,
    config: Path,
    cpu_bytes: str,
    tier_bytes: str,
    tier_bandwidth: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Work out sizes from a model's CONFIG: a Hugging Face config.json or its folder.

    \b
    Examples:
      kvd plan Meta-Llama-3-70B/ --tp 8 --cpu-bytes 512GiB --blocks-per-chunk 8
      kvd plan config.json --cpu-bytes 64GiB --tier-bytes 500GiB --tier-bandwidth 2.3GB
      kvd plan config.json --gpu-blocks 20000 --block-override 4000
      kvd plan config.json --json | jq .pool_tokens
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    inputs = PlanInputs(
        cpu_bytes=parse_size(cpu_bytes),
        tier_bytes=parse_size(tier_bytes),
        tier_bandwidth=None if tier_bandwidth is None else parse_size(tier_bandwidth) or None,
        **options,
    )
    result = make_plan(read_model(load_config(config)), inputs)
    if as_json:
        print(json.dumps(asdict(inputs) | asdict(result), indent=2))
    else:
        _print_table(result, inputs)


def load_config(path: Path) -> dict[str, Any]:
    """A model's config.json, or that of a folder; PlanError where it cannot be read."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise PlanError(f"{file}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise PlanError(f"{file}: holds no JSON object, so it is no model configuration")
    return config


def _print_table(result: Plan, inputs: PlanInputs) -> None:
    from rich.console import Console  # noqa: PLC0415  # --json must not pay for it
    from rich.table import Table  # noqa: PLC0415

    ranks = f"{inputs.tensor_parallel} rank(s)"
    stored = "stored once" if result.replicated else "all ranks"
    table = Table(title=f"{result.model}: {result.attention.upper()}, {result.dtype}, {ranks}")
    table.add_column("")
    table.add_column("figure", justify="right")
    table.add_column("of", style="dim")
    for group in result.groups:
        kind = "full" if group.sliding_window is None else f"window {group.sliding_window}"
        if group.state_bytes is not None:
            kind = f"state of {group.state_bytes} B"
        table.add_row("group", f"{group.layers} layers", f"{kind}, page {group.page_bytes} B")
    table.add_row("bytes per token", f"{result.bytes_per_token:,}", f"{result.layers} layers")
    table.add_row(
        "bytes per block",
        f"{result.bytes_per_block:,}",
        f"{result.block_size} tokens, {stored}; {result.bytes_per_block_rank:,} a rank",
    )
    table.add_row(
        "bytes per chunk", f"{result.bytes_per_chunk:,}", f"{inputs.blocks_per_chunk} block(s)"
    )
    table.add_row("chunks", f"{result.num_chunks:,}", f"pool of {format_size(inputs.cpu_bytes)}")
    table.add_row("tokens in the pool", f"{result.pool_tokens:,}", "all groups stored")
    if inputs.tier_bytes:
        for name, text, remark in _tier_rows(result, inputs):
            table.add_row(name, text, remark)
    for layout in ("LBHNC", "BLHNC"):
        found = [group.fragments[layout] for group in result.groups]
        number, size = describe(found)
        small = any(fragment.nbytes < SMALL_BYTES for fragment in found)
        remark = f"; below {format_size(SMALL_BYTES)}: small" if small else ""
        table.add_row(f"fragment in {layout}", size, f"{number} a block and rank{remark}")
    for name, length, blocks in (
        ("longest request", result.longest_request, inputs.gpu_blocks),
        ("with override", result.longest_request_with_override, inputs.block_override),
    ):
        if length is not None:
            limit = " (the model's limit)" if length == result.max_positions else ""
            table.add_row(name, f"{length:,}", f"{blocks:,} GPU blocks{limit}")
    Console().print(table)


def _tier_rows(result: Plan, inputs: PlanInputs) -> list[tuple[str, str, str]]:
    size = format_size(inputs.tier_bytes)
    table = format_size(result.tier_table_bytes)
    rows = [
        (
            "chunks in tiers",
            f"{result.tier_chunks:,}",
            f"{size}; {table} of memory to know of them",
        ),
        ("tokens in tiers", f"{result.tier_tokens:,}", "all groups stored"),
    ]
    if result.promotion_seconds is not None and result.tier_tokens_per_second is not None:
        speed = f"at {rate(inputs.tier_bandwidth)}"
        rows += [
            ("a chunk comes up in", latency(result.promotion_seconds), speed),
            (
                "tokens a second",
                f"{result.tier_tokens_per_second:,.0f}",
                "from tiers; worth it where computing is slower",
            ),
        ]
    return rows
