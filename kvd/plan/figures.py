"""The plan: what a model, a parallelism and a budget come to.

Sizes go through the functions that the daemon uses for a registration, so a
plan and a running daemon agree.
"""

from collections import Counter
from dataclasses import dataclass

from kvd.errors import PlanError
from kvd.plan.fragments import Fragments, fragments
from kvd.plan.model import Model
from kvd_proto.capacity import (
    DEFAULT_BATCHED_TOKENS,
    LayerGroup,
    admit,
    longest_request,
    per_block_pool_bytes,
    size_pool,
)
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec, validate_layout

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


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """Layers that share one block table, of one rank.

    sliding_window: in tokens, None for full attention. page_bytes: a block in one layer.
    fragments: by the name of the KV cache's layout.
    """

    layers: int
    sliding_window: int | None
    page_bytes: int
    fragments: dict[str, Fragments]


@dataclass(frozen=True, slots=True)
class Plan:
    """Figures of a plan. Bytes count all ranks unless a name ends in `_rank`.

    bytes_per_token: of all layers, without padding. pool_tokens: with every
    group's chunks stored. A longest request is in tokens, None where the
    blocks are not known.
    """

    model: str
    attention: str
    layers: int
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
    token_bytes = model.rank_elements(inputs.tensor_parallel) * DTYPE_BYTES[dtype]
    groups = _groups(model, inputs.block_size, token_bytes * inputs.block_size)
    block_rank = per_block_pool_bytes(groups)
    layout = _layout(model, groups, inputs)
    validate_layout(layout)
    sizes = size_pool([layout] * inputs.tensor_parallel, inputs.cpu_bytes)
    copies = 1 if model.replicated else inputs.tensor_parallel
    tokens_per_chunk = inputs.block_size * inputs.blocks_per_chunk
    if inputs.max_seq_len is not None:
        measured = inputs.gpu_blocks or inputs.block_override
        if measured is None:
            raise PlanError("--max-seq-len needs blocks; give --gpu-blocks or --block-override")
        admit(inputs.max_seq_len, groups, measured, inputs.block_override, inputs.batched_tokens)
    return Plan(
        model=model.name,
        attention=model.attention,
        layers=len(model.windows),
        dtype=dtype,
        replicated=model.replicated,
        groups=tuple(
            PlannedGroup(
                layers=len(group.page_bytes),
                sliding_window=group.sliding_window,
                page_bytes=group.page_bytes[0],
                fragments=fragments(group),
            )
            for group in groups
        ),
        tokens_per_chunk=tokens_per_chunk,
        bytes_per_token_rank=token_bytes * len(model.windows),
        bytes_per_token=token_bytes * len(model.windows) * copies,
        bytes_per_block_rank=block_rank,
        bytes_per_block=block_rank * copies,
        bytes_per_chunk=sizes.bytes_per_chunk,
        num_chunks=sizes.num_chunks,
        pool_tokens=sizes.num_chunks // len(groups) * tokens_per_chunk,
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


def _groups(model: Model, block_size: int, page: int) -> list[LayerGroup]:
    """Layers in groups as vLLM makes them.

    Layers of one kind are spread over as many groups as it takes for no group
    to be larger than the kind with the fewest layers (10 full and 52 sliding
    make 1 + 6 groups of at most 10); kinds of about the same size stay whole.
    """
    kinds = Counter(model.windows)
    fewest, most = min(kinds.values()), max(kinds.values())
    group_size = most if 2 * most < 3 * fewest else fewest
    groups = []
    for window, layers in kinds.items():
        number = -(-layers // group_size)
        for index in range(number):
            members = len(range(index, layers, number))
            groups.append(LayerGroup((page,) * members, block_size, window))
    return groups


def _layout(model: Model, groups: list[LayerGroup], inputs: PlanInputs) -> RankLayout:
    """What a worker of this engine would register; a block count does not change a chunk's size."""
    page = groups[0].page_bytes[0]
    tensors = max(len(group.page_bytes) for group in groups)
    return RankLayout(
        num_blocks=1,
        blocks_per_chunk=inputs.blocks_per_chunk,
        hash_block_size=inputs.block_size,
        storages=(page,) * tensors,
        tensors=tuple(TensorSpec(index, 0, page, page) for index in range(tensors)),
        groups=tuple(
            GroupSpec(
                tuple(TensorRef(index, page) for index in range(len(group.page_bytes))),
                group.block_size,
                "full" if group.sliding_window is None else "sliding",
                group.sliding_window,
            )
            for group in groups
        ),
        replicated=model.replicated,
    )


def _longest(
    model: Model, groups: list[LayerGroup], inputs: PlanInputs, blocks: int | None
) -> int | None:
    if blocks is None:
        return None
    # Windows alone bound no request: a model that states no limit is bounded by all blocks.
    limit = model.max_positions or blocks * inputs.block_size
    return longest_request(groups, blocks, limit, inputs.batched_tokens)
