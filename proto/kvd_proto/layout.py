"""What one rank's KV memory looks like, and where its pages lie in a slot.

A rank reports storages (allocations), tensors (pages at a stride inside a
storage) and groups (which tensors hold the pages of one block table). Nothing
here is read from a tensor's shape: with per-layer page sizes or a KV-first
layout the shape lies. `num_blocks` is the engine's configured number.

A slot holds one rank's share of one chunk: the refs of the chunk's group back
to back, each a region of `blocks_per_chunk` pages, block after block, so that
consecutive blocks are one run on both sides.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvd_proto.errors import AlignmentError, LayoutError, LayoutMismatch, SizeError

SLOT_ALIGNMENT = 4096
MAX_BYTES = 2**48
MAX_BLOCKS = 2**31 - 1
MAX_BLOCKS_PER_CHUNK = 65535
MAX_GROUPS = 65535


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pages of one tensor: block b is storage bytes [offset + b*block_stride, +page_bytes)."""

    storage: int
    offset: int
    page_bytes: int
    block_stride: int


class TensorRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group's use of a tensor: the first `page_bytes` of each page are in use."""

    tensor: int
    page_bytes: int


class GroupSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that share one block table; `block_size` and `sliding_window` count tokens."""

    refs: tuple[TensorRef, ...]
    block_size: int
    kind: str = "full"
    sliding_window: int | None = None


class RankLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's KV memory; `storages` are sizes in bytes.

    `replicated`: every rank holds the same bytes (MLA under tensor
    parallelism), so a chunk is stored once and ranks take turns to write.
    """

    num_blocks: int
    blocks_per_chunk: int
    hash_block_size: int
    storages: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    groups: tuple[GroupSpec, ...]
    replicated: bool = False


def used_storage_bytes(layout: RankLayout) -> int:
    """Sum of the sizes of the storages that some tensor uses, each counted once."""
    return sum(layout.storages[index] for index in {tensor.storage for tensor in layout.tensors})


def share_bytes(layout: RankLayout) -> int:
    """Bytes of the rank's share of one chunk: reported bytes // num_blocks * blocks_per_chunk."""
    return used_storage_bytes(layout) // layout.num_blocks * layout.blocks_per_chunk


def group_bytes(layout: RankLayout, group: int) -> int:
    """Bytes that a chunk of this group has in one rank's slot."""
    return sum(ref.page_bytes for ref in layout.groups[group].refs) * layout.blocks_per_chunk


def slot_bytes(layout: RankLayout) -> int:
    """Stride of slots in the rank's arena: the share, rounded up to 4 KiB.

    Raises:
        LayoutError: a group's pages need more than the share.
    """
    share = share_bytes(layout)
    for index in range(len(layout.groups)):
        needed = group_bytes(layout, index)
        if needed > share:
            raise LayoutError(
                f"group {index} needs {needed} bytes a chunk, the reported storages give"
                f" {share}: {used_storage_bytes(layout)} bytes // {layout.num_blocks} blocks"
                f" * {layout.blocks_per_chunk}; report every storage, or the right num_blocks"
            )
    return -(-share // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def ref_offsets(layout: RankLayout, group: int) -> tuple[int, ...]:
    """Where each ref's region starts in a slot, in bytes, for a chunk of this group."""
    offsets = []
    position = 0
    for ref in layout.groups[group].refs:
        offsets.append(position)
        position += ref.page_bytes * layout.blocks_per_chunk
    return tuple(offsets)


def validate_layout(layout: RankLayout) -> None:
    """Check one rank's report.

    Raises:
        SizeError: a count or size that makes no pool.
        AlignmentError: a group's block size is no multiple of the hash block size.
        LayoutError: indices or ranges that do not fit what was reported.
    """
    _check_range(
        "num_blocks", layout.num_blocks, 1, MAX_BLOCKS, "start the engine with more memory"
    )
    _check_range(
        "blocks_per_chunk", layout.blocks_per_chunk, 1, MAX_BLOCKS_PER_CHUNK, "use 1 or more"
    )
    _check_range("hash_block_size", layout.hash_block_size, 1, MAX_BLOCKS, "use the engine's own")
    if not layout.tensors or not layout.groups:
        raise SizeError(
            f"{len(layout.tensors)} tensors in {len(layout.groups)} groups: there is nothing to"
            " offload; register the engine's KV tensors"
        )
    _check_range("the number of groups", len(layout.groups), 1, MAX_GROUPS, "report fewer")
    for index, size in enumerate(layout.storages):
        _check_range(f"storages[{index}]", size, 1, MAX_BYTES, "report its size in bytes")
    for index, tensor in enumerate(layout.tensors):
        _check_tensor(layout, index, tensor)
    for index, group in enumerate(layout.groups):
        _check_group(layout, index, group)
    slot_bytes(layout)


def _check_range(name: str, value: int, low: int, high: int, remedy: str) -> None:
    if not low <= value <= high:
        raise SizeError(f"{name} = {value} is not within {low}..{high}; {remedy}")


def _check_tensor(layout: RankLayout, index: int, tensor: TensorSpec) -> None:
    name = f"tensors[{index}]"
    if not 0 <= tensor.storage < len(layout.storages):
        raise LayoutError(
            f"{name}.storage = {tensor.storage}, but {len(layout.storages)} storages are reported"
        )
    _check_range(f"{name}.page_bytes", tensor.page_bytes, 1, MAX_BYTES, "give the padded page size")
    _check_range(f"{name}.offset", tensor.offset, 0, MAX_BYTES, "count from the storage's start")
    _check_range(f"{name}.block_stride", tensor.block_stride, 0, MAX_BYTES, "give bytes per block")
    if tensor.block_stride < tensor.page_bytes and layout.num_blocks > 1:
        raise LayoutError(
            f"{name}: block_stride {tensor.block_stride} is below the page of"
            f" {tensor.page_bytes} bytes, so blocks would overlap"
        )
    size = layout.storages[tensor.storage]
    end = tensor.offset + (layout.num_blocks - 1) * tensor.block_stride + tensor.page_bytes
    if end > size:
        raise LayoutError(
            f"{name}: offset {tensor.offset} + {layout.num_blocks - 1} * stride"
            f" {tensor.block_stride} + page {tensor.page_bytes} = {end} bytes, its storage"
            f" {tensor.storage} has {size}; num_blocks is the engine's configured number, not a"
            " tensor's dimension"
        )


def _check_group(layout: RankLayout, index: int, group: GroupSpec) -> None:
    name = f"groups[{index}]"
    _check_range(f"{name}.block_size", group.block_size, 1, MAX_BLOCKS, "give tokens per block")
    if group.block_size % layout.hash_block_size:
        raise AlignmentError(
            f"{name}: block size {group.block_size} is no multiple of the hash block size"
            f" {layout.hash_block_size}; hybrid models need prefix caching enabled"
            " (--enable-prefix-caching) to align block sizes"
        )
    if group.sliding_window is not None:
        _check_range(
            f"{name}.sliding_window", group.sliding_window, 1, MAX_BLOCKS, "give tokens, or none"
        )
    if not group.refs:
        raise LayoutError(f"{name} refers to no tensor")
    for position, ref in enumerate(group.refs):
        if not 0 <= ref.tensor < len(layout.tensors):
            raise LayoutError(
                f"{name}.refs[{position}].tensor = {ref.tensor}, but {len(layout.tensors)}"
                " tensors are reported"
            )
        page = layout.tensors[ref.tensor].page_bytes
        if not 1 <= ref.page_bytes <= page:
            raise LayoutError(
                f"{name}.refs[{position}].page_bytes = {ref.page_bytes} is not within 1..{page},"
                f" the page of tensor {ref.tensor}"
            )


def compare_ranks(layouts: Mapping[int, RankLayout], stages: Mapping[int, int]) -> None:
    """Check that the ranks of one engine agree.

    All ranks must have the same num_blocks, factors and groups; ranks of one
    pipeline stage also the same page sizes (other stages hold other layers,
    and so cannot hold replicas of each other's shares).

    Raises:
        LayoutMismatch: naming the odd rank and both figures.
    """
    common: dict[str, Callable[[RankLayout], Any]] = {
        "num_blocks": lambda x: x.num_blocks,
        "blocks_per_chunk": lambda x: x.blocks_per_chunk,
        "hash_block_size": lambda x: x.hash_block_size,
        "replicated": lambda x: x.replicated,
        "number of groups": lambda x: len(x.groups),
        "block sizes": lambda x: [group.block_size for group in x.groups],
        "kinds of group": lambda x: [group.kind for group in x.groups],
        "sliding windows": lambda x: [group.sliding_window for group in x.groups],
    }
    for name, value in common.items():
        _agree(name, {rank: value(layout) for rank, layout in layouts.items()})
    if any(layout.replicated for layout in layouts.values()):
        _one_stage({rank: stages[rank] for rank in layouts})
    for stage in sorted(set(stages.values())):
        members = {rank: layout for rank, layout in layouts.items() if stages[rank] == stage}
        _agree(
            f"page sizes (stage {stage})",
            {
                rank: [[ref.page_bytes for ref in group.refs] for group in layout.groups]
                for rank, layout in members.items()
            },
        )
        _agree(
            f"bytes per chunk (stage {stage})",
            {rank: slot_bytes(layout) for rank, layout in members.items()},
        )


def _one_stage(stages: Mapping[int, int]) -> None:
    """One share is stored for all ranks, and pipeline stages hold different layers."""
    first = min(stages)
    for rank in sorted(stages):
        if stages[rank] != stages[first]:
            raise LayoutMismatch(
                f"rank {rank} is of pipeline stage {stages[rank]}, rank {first} of stage"
                f" {stages[first]}: they cannot hold replicated shares; register with"
                " replicated=False"
            )


def _agree(name: str, values: Mapping[int, Any]) -> None:
    if len({repr(value) for value in values.values()}) <= 1:
        return
    votes = Counter(repr(value) for value in values.values())
    usual = max(votes, key=lambda text: (votes[text], text == repr(values[min(values)])))
    odd = next(rank for rank in sorted(values) if repr(values[rank]) != usual)
    others = [rank for rank in sorted(values) if repr(values[rank]) == usual]
    raise LayoutMismatch(
        f"rank {odd} reports {name} = {values[odd]}, rank(s) {others} report {usual}; start all"
        " ranks with the same model and settings"
    )
