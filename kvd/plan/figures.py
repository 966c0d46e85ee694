"""The plan: sizes of a model's KV cache and of the pool, for a parallelism and a budget.

Sizes come from the functions that the daemon uses for a registration, so a plan and a running
daemon agree. Layers are grouped, with pages of one size, by the rules of
``_get_kv_cache_groups_uniform_page_size`` in ``vllm/v1/core/kv_cache_utils.py``.

The KV cache's layout decides in how many runs of bytes a block lies in an engine's memory. vLLM
0.32 names six layouts by the order of five dimensions, the outermost first (``KVCacheLayout`` in
``vllm/v1/kv_cache_layout.py``)::

    L  layers of a group            B  blocks
    H  KV heads of the rank         N  tokens of a block
    C  what a head keeps of one token: key and value side by side, or the latent

C is always innermost, so keys and values share a page (one block of one layer). Some backends have
two H, all keys and all values; both are in one page. The order of H and N changes the order of
bytes in a page, not the position of pages. The position of B decides:

- after L: a page is one run, and a block has as many runs as its group has layers;
- first of all: a block is one run. With groups of different sizes the distance of blocks is what
  the largest group needs (``get_kv_cache_config_from_groups`` in
  ``vllm/v1/core/kv_cache_utils.py``), and smaller groups use the beginning;
- after H: each head's part of a page is a run.

Pages of one block that are padded are one run if the padding is small (`_merged` in
`kvd_client/vllm/fragments.py`).
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvd.errors import PlanError
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
from kvd_proto.text import format_size
from kvd_proto.tier_table import ENTRY_BYTES, tier_table_capacity


@dataclass(frozen=True, slots=True)
class ModelGroup:
    """A group of layers; state_bytes: used bytes of each page, None if attention fills it."""

    layers: LayerGroup
    state_bytes: int | None


def make_groups(
    model: Model, block_size: int, token_bytes: int, state_bytes: int | None
) -> list[ModelGroup]:
    """Spread the layers of each kind over groups.

    No group is larger than the kind with the fewest layers (10 full and 52 sliding make 1 + 6
    groups of at most 10); kinds of about the same size are not split. If a state has more bytes
    than a page of attention, blocks get more tokens: a multiple of `block_size`.

    Args:
        model: whose layers.
        block_size: of the engine, in tokens.
        token_bytes: of one attention layer on one rank.
        state_bytes: of one state layer on one rank; None without any.
    """
    if state_bytes is not None:
        block_size *= -(-state_bytes // (block_size * token_bytes))
    kinds = Counter((window, False) for window in model.windows)
    if model.states is not None:
        kinds[None, True] = model.states.layers
    fewest, most = min(kinds.values()), max(kinds.values())
    group_size = most if 2 * most < 3 * fewest else fewest
    groups = []
    for (window, is_state), layers in kinds.items():
        num_groups = -(-layers // group_size)
        for index in range(num_groups):
            pages = (block_size * token_bytes,) * len(range(index, layers, num_groups))
            groups.append(
                ModelGroup(LayerGroup(pages, block_size, window), state_bytes if is_state else None)
            )
    return groups


def rank_layout(
    groups: list[ModelGroup], hash_block_size: int, blocks_per_chunk: int, *, replicated: bool
) -> RankLayout:
    """Return the layout that a worker registers, with one block: their number changes no chunk."""
    page = groups[0].layers.page_bytes[0]
    tensors = max(len(group.layers.page_bytes) for group in groups)
    return RankLayout(
        num_blocks=1,
        blocks_per_chunk=blocks_per_chunk,
        hash_block_size=hash_block_size,
        storages=(page,) * tensors,
        tensors=tuple(TensorSpec(index, 0, page, page) for index in range(tensors)),
        groups=tuple(
            GroupSpec(
                tuple(
                    TensorRef(index, group.state_bytes or page)
                    for index in range(len(group.layers.page_bytes))
                ),
                group.layers.block_size,
                "full" if group.layers.sliding_window is None else "sliding",
                group.layers.sliding_window,
            )
            for group in groups
        ),
        replicated=replicated,
    )


PAGES = ("LBHNC", "LBNHC")
BLOCKS = ("BLHNC", "BLNHC")
HEADS_OUTSIDE = ("LHBNC", "BHLNC")

MAX_PADDING_PART = 32
"""Padding of at most 1/32 of the used bytes is copied with them, so that the runs join."""

SMALL_BYTES = 28 * 1024
"""Below this vLLM 0.32 loads with a kernel, for copy engines are slower: ``THRESHOLD_BYTES`` in
``vllm/v1/kv_offload/cpu/swap_blocks_triton.py``, by its authors' measurements on an H100."""


@dataclass(frozen=True, slots=True)
class Fragments:
    """The runs of one block of one rank.

    nbytes: of each run. per_block: number of runs; fewer if blocks of one chunk are adjacent.
    """

    nbytes: int
    per_block: int


def fragments(group: LayerGroup, used: int, heads: int | None) -> dict[str, Fragments]:
    """Return the fragments of a block, by each layout that vLLM can use for the model.

    Args:
        group: all its pages have the same size.
        used: used bytes of each page.
        heads: of the rank; None if layers differ in the number of heads: vLLM then uses no layout
            that separates the heads of a page.
    """
    layers, page = len(group.page_bytes), group.page_bytes[0]
    by_page = Fragments(used, layers)
    joined = (page - used) * MAX_PADDING_PART <= used
    by_block = Fragments((layers - 1) * page + used, 1) if joined else by_page
    by_layout = dict.fromkeys(PAGES, by_page) | dict.fromkeys(BLOCKS, by_block)
    if heads is not None:
        by_head = Fragments(used // heads, layers * heads)
        by_layout |= dict(zip(HEADS_OUTSIDE, (by_head, by_block), strict=True))
    return by_layout


def describe(options: Collection[Fragments]) -> tuple[str, str]:
    """Return the number of fragments of a block and their size, each from smallest to largest."""
    return (
        _range_text([option.per_block for option in options], str),
        _range_text([option.nbytes for option in options], format_size),
    )


def _range_text(values: list[int], to_text: Callable[[int], str]) -> str:
    smallest, largest = to_text(min(values)), to_text(max(values))
    return smallest if smallest == largest else f"{smallest} to {largest}"


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
    """The parallelism, block size, budget and tiers to plan for.

    tier_bytes: of all tiers below the pool. tier_bandwidth: of gets from them, in bytes per second.
    gpu_blocks: blocks that the engine measured; block_override: blocks that the operator set
    instead. Without either, requests are not planned.
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
    """Layers that share one block table, on one rank.

    sliding_window: in tokens, None for full attention. page_bytes: of a block in one layer.
    state_bytes: used bytes of a page if layers keep a state; None for attention, which fills it.
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

    layers: with attention; state_layers: the others.
    block_size: in tokens; more than the input if a state needs it.
    bytes_per_token: of the attention layers, without padding.
    pool_tokens: if every group's chunks are stored.
    tier_chunks, tier_tokens: of all tiers, without what a medium takes beside the chunks' bytes.
    tier_table_bytes: shared memory of the table of tiers.
    promotion_seconds: of one chunk at `tier_bandwidth`, without the medium's latency; None without
        a bandwidth.
    tier_tokens_per_second: of promotions; tokens that an engine computes faster are not worth
        keeping. None without a bandwidth.
    longest_request: in tokens; None if the blocks are not known.
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
    """Compute the plan.

    Raises:
        PlanError: dtype, heads and ranks that do not go together.
        SizeError: the budget holds no chunk, block counts are below 1, or `max_seq_len` can
            never be served.
    """
    dtype = _cache_dtype(model, inputs.dtype)
    elements = model.rank_elements(inputs.tensor_parallel)
    token_bytes = elements * DTYPE_BYTES[dtype]
    heads = None if model.states else elements // model.head_elements
    model_groups = make_groups(
        model, inputs.block_size, token_bytes, _state_bytes(model, inputs.tensor_parallel)
    )
    groups = [group.layers for group in model_groups]
    block_size = groups[0].block_size
    block_rank = per_block_pool_bytes(groups)
    layout = rank_layout(
        model_groups, block_size, inputs.blocks_per_chunk, replicated=model.replicated
    )
    validate_layout(layout)
    sizes = size_pool([layout] * inputs.tensor_parallel, inputs.cpu_bytes)
    copies = 1 if model.replicated else inputs.tensor_parallel
    tokens_per_chunk = block_size * inputs.blocks_per_chunk
    _check_request_inputs(model, groups, inputs)
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
            for group in model_groups
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
        tier_table_bytes=tier_table_capacity(tier_chunks) * ENTRY_BYTES if tier_chunks else 0,
        promotion_seconds=chunk_bytes / bandwidth if bandwidth else None,
        tier_tokens_per_second=(
            bandwidth / (chunk_bytes * len(groups)) * tokens_per_chunk if bandwidth else None
        ),
        max_positions=model.max_positions,
        longest_request=_longest(model, groups, inputs, inputs.gpu_blocks),
        longest_request_with_override=_longest(model, groups, inputs, inputs.block_override),
    )


def _cache_dtype(model: Model, option: str) -> str:
    dtype = option
    if option == "auto":
        if model.dtype is None:
            raise PlanError("the model configuration names no dtype; give --dtype")
        # Engines serve 32-bit weights in 16 bits unless told otherwise.
        dtype = "float16" if model.dtype == "float32" else model.dtype
    if dtype not in DTYPE_BYTES:
        raise PlanError(f"dtype {dtype!r} is not known; give --dtype {', '.join(DTYPE_BYTES)}")
    return dtype


def _state_bytes(model: Model, tensor_parallel: int) -> int | None:
    """Return the bytes of one state layer on one rank; the cache's dtype does not change them."""
    if model.states is None:
        return None
    model_dtype = _cache_dtype(model, "auto")
    state_dtype = model_dtype if model.states.dtype is None else model.states.dtype
    if state_dtype not in DTYPE_BYTES:
        raise PlanError(f"the states' dtype {state_dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    conv_bytes, state_bytes = DTYPE_BYTES[model_dtype], DTYPE_BYTES[state_dtype]
    return model.states.rank_bytes(tensor_parallel, conv_bytes, state_bytes)


def _check_request_inputs(model: Model, groups: list[LayerGroup], inputs: PlanInputs) -> None:
    """Refuse inputs for which requests cannot be planned, and a `max_seq_len` that never fits."""
    blocks = inputs.gpu_blocks or inputs.block_override
    if model.states is not None and (blocks is not None or inputs.max_seq_len is not None):
        raise PlanError(
            "kvd plan does not know how many blocks a request of a model with state layers holds;"
            " leave out --gpu-blocks, --block-override and --max-seq-len"
        )
    if inputs.max_seq_len is None:
        return
    if blocks is None:
        raise PlanError("--max-seq-len needs blocks; give --gpu-blocks or --block-override")
    admit(inputs.max_seq_len, groups, blocks, inputs.block_override, inputs.batched_tokens)


def _longest(
    model: Model, groups: list[LayerGroup], inputs: PlanInputs, blocks: int | None
) -> int | None:
    if blocks is None:
        return None
    # Windows do not bound a request: a model that states no limit is bounded by all blocks.
    limit = model.max_positions or blocks * inputs.block_size
    return longest_request(groups, blocks, limit, inputs.batched_tokens)
