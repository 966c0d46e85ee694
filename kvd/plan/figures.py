"""The plan: what a model, a parallelism and a budget come to.

Sizes go through the functions that the daemon uses for a registration, so a
plan and a running daemon agree.
"""

from dataclasses import dataclass

from kvd.errors import PlanError
from kvd.plan.fragments import Fragments, fragments
from kvd.plan.groups import make_groups, rank_layout
from kvd.plan.model import Model
from kvd_proto.capacity import (
    DEFAULT_BATCHED_TOKENS,
    LayerGroup,
    admit,
    longest_request,
    per_block_pool_bytes,
    size_pool,
)
from kvd_proto.layout import validate_layout
from kvd_proto.tier_table import ENTRY_BYTES, entries_for

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What is to be planned for.

    tier_bytes: of all tiers below the pool. tier_bandwidth: bytes a second that come up from them.
    gpu_blocks: blocks that the engine measured; block_override: what the
    operator set instead. Without either, requests are not planned.
    """

    tensor_parallel: int
    block_size: int
    dtype: str
    cpu_bytes: int
    blocks_per_chunk: int
    gpu_blocks: int | None = None
    block_override: int | None = None
    batched_tokens: int = DEFAULT_BATCHED_TOKENS
    max_seq_len: int | None = None
    tier_bytes: int = 0
    tier_bandwidth: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """Layers that share one block table, of one rank.

    sliding_window: in tokens, None for full attention. page_bytes: a block in one layer.
    state_bytes: of a page, where layers keep a state; None for attention, which fills it.
    fragments: by the name of the KV cache's layout.
    """

    layers: int
    sliding_window: int | None
    page_bytes: int
    state_bytes: int | None
    fragments: dict[str, Fragments]


@dataclass(frozen=True, slots=True)
class Plan:
    """Figures of a plan. Bytes count all ranks unless a name ends in `_rank`.

    layers: of attention; state_layers: the others. block_size: in tokens; more than asked for
    where a state needs it. bytes_per_token: of the attention layers, without padding.
    tier_chunks, tier_tokens: of all tiers, without what a medium takes beside the chunks' bytes;
    tier_table_bytes: shared memory that knowing of them takes. promotion_seconds: of one chunk
    at `tier_bandwidth`, without the medium's latency; tier_tokens_per_second: that come up, so
    what an engine computes faster is not worth it. Both None without a bandwidth.
    pool_tokens: with every group's chunks stored. A longest request is in tokens, None where
    the blocks are not known.
    """

    model: str
    attention: str
    layers: int
    state_layers: int
    block_size: int
    dtype: str
    replicated: bool
    groups: tuple[PlannedGroup, ...]
    tokens_per_chunk: int
    bytes_per_token_rank: int
    bytes_per_token: int
    bytes_per_block_rank: int
    bytes_per_block: int
    bytes_per_chunk: int
    num_chunks: int
    pool_tokens: int
    tier_chunks: int
    tier_tokens: int
    tier_table_bytes: int
    promotion_seconds: float | None
    tier_tokens_per_second: float | None
    max_positions: int | None
    longest_request: int | None
    longest_request_with_override: int | None


def make_plan(model: Model, inputs: PlanInputs) -> Plan:
    """Work out the plan.

    Raises:
        PlanError: dtype, heads and ranks that do not go together.
        SizeError: the budget holds no chunk, block counts are below 1, or `max_seq_len` can
            never be served.
    """
    dtype = _cache_dtype(model, inputs.dtype)
    elements = model.rank_elements(inputs.tensor_parallel)
    token_bytes = elements * DTYPE_BYTES[dtype]
    heads = None if model.states else elements // model.head_elements
    placed = make_groups(
        model, inputs.block_size, token_bytes, _state_bytes(model, inputs.tensor_parallel)
    )
    groups = [group.layers for group in placed]
    block_size = groups[0].block_size
    block_rank = per_block_pool_bytes(groups)
    layout = rank_layout(placed, block_size, inputs.blocks_per_chunk, replicated=model.replicated)
    validate_layout(layout)
    sizes = size_pool([layout] * inputs.tensor_parallel, inputs.cpu_bytes)
    copies = 1 if model.replicated else inputs.tensor_parallel
    tokens_per_chunk = block_size * inputs.blocks_per_chunk
    _check_longest(model, groups, inputs)
    chunk_bytes, bandwidth = sizes.bytes_per_chunk, inputs.tier_bandwidth
    tier_chunks = inputs.tier_bytes // chunk_bytes
    return Plan(
        model=model.name,
        attention=model.attention,
        layers=len(model.windows),
        state_layers=0 if model.states is None else model.states.layers,
        block_size=block_size,
        dtype=dtype,
        replicated=model.replicated,
        groups=tuple(
            PlannedGroup(
                layers=len(group.layers.page_bytes),
                sliding_window=group.layers.sliding_window,
                page_bytes=group.layers.page_bytes[0],
                state_bytes=group.state_bytes,
                fragments=fragments(
                    group.layers, group.state_bytes or group.layers.page_bytes[0], heads
                ),
            )
            for group in placed
        ),
        tokens_per_chunk=tokens_per_chunk,
        bytes_per_token_rank=token_bytes * len(model.windows),
        bytes_per_token=token_bytes * len(model.windows) * copies,
        bytes_per_block_rank=block_rank,
        bytes_per_block=block_rank * copies,
        bytes_per_chunk=sizes.bytes_per_chunk,
        num_chunks=sizes.num_chunks,
        pool_tokens=sizes.num_chunks // len(groups) * tokens_per_chunk,
        tier_chunks=tier_chunks,
        tier_tokens=tier_chunks // len(groups) * tokens_per_chunk,
        tier_table_bytes=entries_for(tier_chunks) * ENTRY_BYTES if tier_chunks else 0,
        promotion_seconds=chunk_bytes / bandwidth if bandwidth else None,
        tier_tokens_per_second=(
            bandwidth / (chunk_bytes * len(groups)) * tokens_per_chunk if bandwidth else None
        ),
        max_positions=model.max_positions,
        longest_request=_longest(model, groups, inputs, inputs.gpu_blocks),
        longest_request_with_override=_longest(model, groups, inputs, inputs.block_override),
    )


def _cache_dtype(model: Model, asked: str) -> str:
    dtype = asked
    if asked == "auto":
        if model.dtype is None:
            raise PlanError("the model configuration names no dtype; give --dtype")
        # Engines serve 32-bit weights in 16 bits unless told otherwise.
        dtype = "float16" if model.dtype == "float32" else model.dtype
    if dtype not in DTYPE_BYTES:
        raise PlanError(f"dtype {dtype!r} is not known; give --dtype {', '.join(DTYPE_BYTES)}")
    return dtype


def _state_bytes(model: Model, tensor_parallel: int) -> int | None:
    """Bytes of one state layer on one rank; states keep the model's type, whatever the cache's."""
    if model.states is None:
        return None
    own = _cache_dtype(model, "auto")
    state = own if model.states.dtype is None else model.states.dtype
    if state not in DTYPE_BYTES:
        raise PlanError(f"the states' dtype {state!r} is not one of {', '.join(DTYPE_BYTES)}")
    return model.states.rank_bytes(tensor_parallel, DTYPE_BYTES[own], DTYPE_BYTES[state])


def _check_longest(model: Model, groups: list[LayerGroup], inputs: PlanInputs) -> None:
    """Refuse what cannot be planned of requests, and a length that never fits."""
    measured = inputs.gpu_blocks or inputs.block_override
    if model.states is not None and (measured is not None or inputs.max_seq_len is not None):
        raise PlanError(
            "kvd plan does not know how many blocks a request of a model with state layers holds;"
            " leave out --gpu-blocks, --block-override and --max-seq-len"
        )
    if inputs.max_seq_len is None:
        return
    if measured is None:
        raise PlanError("--max-seq-len needs blocks; give --gpu-blocks or --block-override")
    admit(inputs.max_seq_len, groups, measured, inputs.block_override, inputs.batched_tokens)


def _longest(
    model: Model, groups: list[LayerGroup], inputs: PlanInputs, blocks: int | None
) -> int | None:
    if blocks is None:
        return None
    # Windows alone bound no request: a model that states no limit is bounded by all blocks.
    limit = model.max_positions or blocks * inputs.block_size
    return longest_request(groups, blocks, limit, inputs.batched_tokens)
