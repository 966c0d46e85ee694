"""`kvd plan`: what a model's KV cache takes; `kvd replay`: what pools would find of a trace."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvd.cache.adaptive import POLICIES
from kvd.cli.options import json_option
from kvd.errors import PlanError, TraceError
from kvd.metrics.reading import duration, latency, number, percent, rate
from kvd.plan.figures import DTYPE_BYTES, SMALL_BYTES, Plan, PlanInputs, describe, make_plan
from kvd.plan.model import read_model
from kvd.replay import (
    TOKENS_PER_ID,
    USERS,
    Hits,
    Trace,
    labels_for,
    read_trace,
    replay_belady,
    replay_policy,
    return_gaps,
)
from kvd_proto.capacity import DEFAULT_BATCHED_TOKENS
from kvd_proto.text import format_size, parse_size

HINTED, BELADY = "adaptive+hints", "belady"
MULTIPLES = (0.5, 1, 2, 4)  # of --cpu-bytes
_BLOCK_TOKENS = 16  # of the model's blocks; chunks of a trace are whole numbers of them

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
@click.option("--tier-bandwidth", help="Read speed of all tiers in bytes a second, such as 2.3GB.")
@click.option("--blocks-per-chunk", type=_Count, default=1, help="Blocks that make a chunk.")
@click.option("--gpu-blocks", type=_Count, help="Blocks that the engine measured.")
@click.option("--block-override", type=_Count, help="Blocks that the operator set instead.")
@click.option(
    "--max-batched-tokens",
    "batched_tokens",
    type=_Count,
    default=DEFAULT_BATCHED_TOKENS,
    help="Most tokens of one engine step; a group with a sliding window keeps these too.",
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
        _print_plan(result, inputs)


def load_config(path: Path) -> dict[str, Any]:
    """Read a model's config.json, given the file or its folder; raise PlanError if that fails."""
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


def _print_plan(result: Plan, inputs: PlanInputs) -> None:
    from rich.console import Console  # noqa: PLC0415  # --json does not need it
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
        fragments = [group.fragments[layout] for group in result.groups]
        number, size = describe(fragments)
        small = any(fragment.nbytes < SMALL_BYTES for fragment in fragments)
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


@click.command(context_settings={"show_default": True})
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--cpu-bytes", required=True, help="Size of the pool.")
@click.option("--bytes-per-chunk", help="KV cache of a chunk, all ranks; else --model.")
@click.option(
    "--model", type=click.Path(path_type=Path), help="Its config.json or the folder, for the size."
)
@click.option("--tp", "tensor_parallel", type=_Count, default=1, help="Of the model.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice([*POLICIES, HINTED, BELADY]),
    help="May be repeated. [default: all]",
)
@click.option(
    "--prefill-seconds-per-token",
    type=click.FloatRange(min=0),
    help="What the engine takes to compute a token, for the seconds that hits save.",
)
@click.option(
    "--tokens-per-id", type=_Count, default=TOKENS_PER_ID, help="Tokens of one of hash_ids."
)
@click.option("--ids-per-chunk", type=_Count, default=1, help="Ids that make a chunk.")
@click.option("--users", type=_Count, default=USERS, help="Of a folder: files at a time.")
@json_option("Print the figures as JSON.")
def replay(
    *,
    trace: Path,
    cpu_bytes: str,
    bytes_per_chunk: str | None,
    model: Path | None,
    tensor_parallel: int,
    policies: tuple[str, ...],
    prefill_seconds_per_token: float | None,
    as_json: bool,
    **options: int,
) -> None:
    """Play TRACE through the broker's eviction policies, with half to four times the pool.

    TRACE is a file with a line of JSON a request, as Mooncake publishes them (timestamp,
    input_length, hash_ids) or LMCache (timestamp, input), or a folder with a file for each
    conversation, as those of kv-cache-tester. Nothing is started. Each request uses the chunks of
    its prompt once, and finds those before the first that is missing.

    adaptive+hints is told at each request's end when the next one comes that continues it. belady
    knows the future: no policy finds more.

    \b
    Examples:
      kvd replay conversation_trace.jsonl --cpu-bytes 64GiB --model Meta-Llama-3-70B/ --tp 8
      kvd replay trace.jsonl --cpu-bytes 64GiB --bytes-per-chunk 64MiB --policy adaptive
      kvd replay traces/ --users 50 --ids-per-chunk 8 --cpu-bytes 1TiB --bytes-per-chunk 64MiB
      kvd replay trace.jsonl --cpu-bytes 64GiB --bytes-per-chunk 64MiB --json | jq .pools
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    if (bytes_per_chunk is None) == (model is None):
        raise click.UsageError("Give either --bytes-per-chunk or --model.")
    pool = parse_size(cpu_bytes)
    played = read_trace(trace, **options)
    if model is not None:
        chunk_bytes = _chunk_bytes(model, tensor_parallel, pool, played.tokens_per_chunk)
    else:
        chunk_bytes = parse_size(bytes_per_chunk or 0)
    if not 0 < chunk_bytes <= pool * MULTIPLES[0]:
        raise TraceError(
            f"bytes per chunk = {chunk_bytes:,}: not between 1 and {int(pool * MULTIPLES[0]):,},"
            f" half of --cpu-bytes {cpu_bytes}; raise --cpu-bytes"
        )
    pools = [
        _play(played, int(pool * multiple), chunk_bytes, policies, prefill_seconds_per_token)
        for multiple in MULTIPLES
    ]
    figures = {
        "requests": len(played.requests),
        "prompt_tokens": played.tokens,
        "chunks": played.num_chunks,
        "tokens_per_chunk": played.tokens_per_chunk,
        "bytes_per_chunk": chunk_bytes,
        "pools": pools,
    }
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        _print_replay(trace.name, figures)


def _chunk_bytes(config: Path, tensor_parallel: int, pool: int, tokens: int) -> int:
    """Return the bytes of `tokens` tokens in the pool, for all ranks and groups."""
    inputs = PlanInputs(
        tensor_parallel=tensor_parallel,
        block_size=_BLOCK_TOKENS,
        dtype="auto",
        cpu_bytes=pool,
        blocks_per_chunk=max(1, tokens // _BLOCK_TOKENS),
    )
    plan = make_plan(read_model(load_config(config)), inputs)
    return plan.bytes_per_chunk * len(plan.groups) * tokens // plan.tokens_per_chunk


def _play(
    trace: Trace,
    pool: int,
    chunk_bytes: int,
    policies: tuple[str, ...],
    seconds_per_token: float | None,
) -> dict[str, Any]:
    """Replay the trace with a pool; return its figures by policy."""
    num_slots = pool // chunk_bytes
    figures = {}
    for name in policies or (*POLICIES, HINTED, BELADY):
        if name == BELADY:
            hits = replay_belady(trace, num_slots)
        elif name == HINTED:
            labels = labels_for(return_gaps(trace))
            hits = replay_policy(trace, POLICIES["adaptive"], num_slots, labels=labels)
        else:
            hits = replay_policy(trace, POLICIES[name], num_slots)
        tokens = _hit_tokens(trace, hits)
        figures[name] = {
            "hit_tokens": tokens,
            "hit_ratio": tokens / max(1, trace.tokens),
            "prefill_seconds_saved": None
            if seconds_per_token is None
            else tokens * seconds_per_token,
        }
    return {"cpu_bytes": pool, "slots": num_slots, "policies": figures}


def _hit_tokens(trace: Trace, hits: Hits) -> int:
    """Return the tokens of the chunks found; the last chunk of a prompt may be partial."""
    tokens_per_chunk = trace.tokens_per_chunk
    return sum(
        min(request.tokens, num_chunks * tokens_per_chunk)
        for request, num_chunks in zip(trace.requests, hits.tolist(), strict=True)
    )


def _print_replay(name: str, figures: dict[str, Any]) -> None:
    from rich.console import Console  # noqa: PLC0415  # --json does not need it
    from rich.table import Table  # noqa: PLC0415

    total_size = format_size(figures["chunks"] * figures["bytes_per_chunk"])
    table = Table(
        title=f"{name}: {figures['requests']:,} requests, {figures['prompt_tokens']:,} prompt"
        f" tokens; {figures['chunks']:,} chunks of {figures['tokens_per_chunk']} tokens,"
        f" {total_size}"
    )
    for column in ("pool", "chunks", "policy", "hit tokens", "hit ratio", "prefill saved"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for pool in figures["pools"]:
        pool_cells = [format_size(pool["cpu_bytes"]), number(pool["slots"])]
        for policy, figures_of_policy in pool["policies"].items():
            table.add_row(
                *pool_cells,
                policy,
                number(figures_of_policy["hit_tokens"]),
                percent(figures_of_policy["hit_ratio"]),
                duration(figures_of_policy["prefill_seconds_saved"]),
            )
            pool_cells = ["", ""]
        table.add_section()
    Console().print(table)
