"""The layout of one rank's KV memory, and where its pages lie in a slot.

A rank reports storages (allocations), tensors (pages at a stride inside a storage) and groups
(which tensors hold the pages of one block table). Nothing is derived from a tensor's shape, which
is misleading with per-layer page sizes or a KV-first layout. `num_blocks` is the engine's
configured number.

A slot holds one rank's share of one chunk: the refs of the chunk's group back to back, each a
region of `blocks_per_chunk` pages in block order, so that consecutive blocks are one run on both
sides.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from functools import cached_property
from itertools import accumulate
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from kvd_proto.errors import LayoutError, SizeError

SLOT_ALIGNMENT = 4096
MAX_BYTES = 2**48
MAX_BLOCKS = 2**31 - 1
MAX_BLOCKS_PER_CHUNK = 65535
MAX_GROUPS = 1024
MAX_TENSORS = 8192
MAX_REFS = 8192  # of all groups together
MAX_LAYERS = 8192
MAX_STORAGES = 4096


class Range(NamedTuple):
    """The values that `validate_layout` accepts, both ends included."""

    low: int
    high: int


COUNT = Range(1, MAX_BLOCKS)
BLOCK = Range(0, MAX_BLOCKS - 1)
CHUNK_BLOCKS = Range(1, MAX_BLOCKS_PER_CHUNK)
SIZE = Range(1, MAX_BYTES)
OFFSET = Range(0, MAX_BYTES)
REFS = Range(1, MAX_REFS)
LAYER = Range(0, MAX_LAYERS - 1)


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Pages of one tensor: block b is storage bytes [offset + b*block_stride, +page_bytes).

    storage: index in the layout's storages.
    offset: of block 0 from the storage's start, in bytes.
    page_bytes: of one block in this tensor, with padding; the last block ends in the storage.
    block_stride: bytes from one block to the next; at least page_bytes if there are several.
    """

    storage: int
    offset: Annotated[int, OFFSET]
    page_bytes: Annotated[int, SIZE]
    block_stride: Annotated[int, OFFSET]


class TensorRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A group's use of a tensor.

    tensor: index in the layout's tensors.
    page_bytes: bytes in use from each page's start; at most the tensor's own.
    layer: number of the layer in the order of a forward pass, below 8,192; loads with progress
    report it.
    """

    tensor: int
    page_bytes: Annotated[int, SIZE]
    layer: Annotated[int, LAYER] = 0


class GroupSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Layers that share one block table.

    refs: the pages of a block of this group; at least one, in all groups together at most 8,192.
    block_size: tokens of a block; a multiple of the layout's hash_block_size.
    kind: any word, `full` for attention to all tokens; engines share chunks only if it is equal.
    sliding_window: tokens that attention looks back; nil: all.
    contents: any word for the meaning of the refs' bytes, in their order; the same for all ranks of
    a stage. Engines share chunks only if it is equal.
    """

    refs: Annotated[tuple[TensorRef, ...], Meta(max_length=MAX_REFS)]
    block_size: Annotated[int, COUNT]
    kind: str = "full"
    sliding_window: Annotated[int, COUNT] | None = None
    contents: str = ""


class RankLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """One rank's KV memory.

    num_blocks: the engine's configured number; blocks are 0 to num_blocks - 1.
    blocks_per_chunk: consecutive blocks of a group that are stored and evicted together.
    hash_block_size: tokens of one block hash of the engine.
    storages: sizes of the allocations, in bytes.
    tensors: where pages lie; at least one.
    groups: which tensors belong together; at least one.
    replicated: every rank holds the same bytes (MLA under tensor parallelism), so a chunk is
    stored once and ranks take turns to write.
    null_block: the block that never holds KV, below num_blocks; in a job it leaves out a position
    at either end of a chunk. nil: there is none, all blocks hold KV.
    """

    num_blocks: Annotated[int, COUNT]
    blocks_per_chunk: Annotated[int, CHUNK_BLOCKS]
    hash_block_size: Annotated[int, COUNT]
    storages: Annotated[tuple[Annotated[int, SIZE], ...], Meta(max_length=MAX_STORAGES)]
    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=MAX_TENSORS)]
    groups: Annotated[tuple[GroupSpec, ...], Meta(max_length=MAX_GROUPS)]
    replicated: bool = False
    null_block: Annotated[int, BLOCK] | None = None

    @cached_property
    def kinds(self) -> bytes:
        """Digest of what the groups are, pages aside: equal for all ranks of an engine."""
        return _digest(_kinds(self))

    @cached_property
    def pages(self) -> bytes:
        """Digest of the groups' page sizes: equal for all ranks of a pipeline stage."""
        return _digest(_page_sizes(self))

    @cached_property
    def contents(self) -> bytes:
        """Digest of the groups' contents: equal for all ranks of a pipeline stage."""
        return _digest(_contents(self))

    @cached_property
    def used_bytes(self) -> int:
        """Bytes of all storages that a tensor uses, each counted once."""
        return sum(self.storages[index] for index in {tensor.storage for tensor in self.tensors})

    @cached_property
    def layers(self) -> int:
        """The number of layers that the refs name."""
        return 1 + max(ref.layer for group in self.groups for ref in group.refs)

    @property
    def share_bytes(self) -> int:
        """Bytes of the rank's share of a chunk: used_bytes // num_blocks * blocks_per_chunk."""
        return self.used_bytes // self.num_blocks * self.blocks_per_chunk

    @cached_property
    def slot_bytes(self) -> int:
        """Stride of slots in the rank's arena: the share, rounded up to 4 KiB.

        `num_chunks` counts the rounded size, so that a pool never exceeds its budget.

        Raises:
            LayoutError: a group's pages need more than the share.
        """
        share = self.share_bytes
        for index in range(len(self.groups)):
            needed = self.group_bytes(index)
            if needed > share:
                raise LayoutError(
                    f"group {index} needs {needed} bytes a chunk, the reported storages give"
                    f" {share}: {self.used_bytes} bytes // {self.num_blocks} blocks"
                    f" * {self.blocks_per_chunk}; report every storage, or the right num_blocks"
                )
        return -(-share // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    def group_bytes(self, group: int) -> int:
        """Return the bytes that a chunk of this group takes in the rank's slot."""
        return sum(ref.page_bytes for ref in self.groups[group].refs) * self.blocks_per_chunk

    def ref_offsets(self, group: int) -> tuple[int, ...]:
        """Return where each ref's region starts in a slot, in bytes, for a chunk of this group."""
        pages = [ref.page_bytes * self.blocks_per_chunk for ref in self.groups[group].refs]
        return tuple(accumulate(pages[:-1], initial=0))


def _digest(value: list[Any]) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(value), digest_size=16).digest()


def _kinds(layout: RankLayout) -> list[list[Any]]:
    return [[group.kind, group.block_size, group.sliding_window] for group in layout.groups]


def _page_sizes(layout: RankLayout) -> list[list[int]]:
    return [[ref.page_bytes for ref in group.refs] for group in layout.groups]


def _contents(layout: RankLayout) -> list[str]:
    return [group.contents for group in layout.groups]


def validate_layout(layout: RankLayout) -> None:
    """Check one rank's layout.

    Raises:
        SizeError: a count or size is out of range.
        LayoutError: indices, ranges or block sizes contradict each other.
    """
    _check_range("num_blocks", layout.num_blocks, COUNT, "start the engine with more memory")
    _check_range("blocks_per_chunk", layout.blocks_per_chunk, CHUNK_BLOCKS, "use 1 or more")
    _check_range("hash_block_size", layout.hash_block_size, COUNT, "use the engine's own")
    if (null_block := layout.null_block) is not None:
        _check_range("null_block", null_block, BLOCK, "give the engine's null block, or none")
        if null_block >= layout.num_blocks:
            raise LayoutError(
                f"null_block = {null_block}, but blocks are 0..{layout.num_blocks - 1}; give the"
                " engine's null block, or none"
            )
    if not layout.tensors or not layout.groups:
        raise SizeError(
            f"{len(layout.tensors)} tensors in {len(layout.groups)} groups: there is nothing to"
            " offload; register the engine's KV tensors"
        )
    for index, size in enumerate(layout.storages):
        _check_range(f"storages[{index}]", size, SIZE, "report its size in bytes")
    for index, tensor in enumerate(layout.tensors):
        _check_tensor(layout, index, tensor)
    for index, group in enumerate(layout.groups):
        _check_group(layout, index, group)
    refs = sum(len(group.refs) for group in layout.groups)
    _check_range("the number of all groups' refs", refs, REFS, "report fewer")
    _ = layout.slot_bytes  # raises


def _check_range(name: str, value: int, allowed: Range, remedy: str) -> None:
    if not allowed.low <= value <= allowed.high:
        raise SizeError(f"{name} = {value} is not within {allowed.low}..{allowed.high}; {remedy}")


def _check_tensor(layout: RankLayout, index: int, tensor: TensorSpec) -> None:
    storage, offset = tensor.storage, tensor.offset
    page, stride = tensor.page_bytes, tensor.block_stride
    last = layout.num_blocks - 1
    name = f"tensors[{index}]"
    if not 0 <= storage < len(layout.storages):
        raise LayoutError(
            f"{name}.storage = {storage}, but {len(layout.storages)} storages are reported"
        )
    _check_range(f"{name}.page_bytes", page, SIZE, "give the padded page size")
    _check_range(f"{name}.offset", offset, OFFSET, "count from the storage's start")
    _check_range(f"{name}.block_stride", stride, OFFSET, "give bytes per block")
    if stride < page and last:
        raise LayoutError(
            f"{name}: block_stride {stride} is below the page of {page} bytes, so blocks would"
            " overlap"
        )
    size, end = layout.storages[storage], offset + last * stride + page
    if end > size:
        raise LayoutError(
            f"{name}: offset {offset} + {last} * stride {stride} + page {page} = {end} bytes, its"
            f" storage {storage} has {size}; num_blocks is the engine's configured number, not a"
            " tensor's dimension"
        )


def _check_group(layout: RankLayout, index: int, group: GroupSpec) -> None:
    name = f"groups[{index}]"
    _check_range(f"{name}.block_size", group.block_size, COUNT, "give tokens per block")
    if group.block_size % layout.hash_block_size:
        raise LayoutError(
            f"{name}: block size {group.block_size} is no multiple of the hash block size"
            f" {layout.hash_block_size}; hybrid models need prefix caching enabled"
            " (--enable-prefix-caching) to align block sizes"
        )
    if group.sliding_window is not None:
        _check_range(f"{name}.sliding_window", group.sliding_window, COUNT, "give tokens, or none")
    if not group.refs:
        raise LayoutError(f"{name} refers to no tensor")
    for position, ref in enumerate(group.refs):
        if not 0 <= ref.tensor < len(layout.tensors):
            raise LayoutError(
                f"{name}.refs[{position}].tensor = {ref.tensor}, but {len(layout.tensors)}"
                " tensors are reported"
            )
        _check_range(f"{name}.refs[{position}].layer", ref.layer, LAYER, "count layers from 0")
        page = layout.tensors[ref.tensor].page_bytes
        if not 1 <= ref.page_bytes <= page:
            raise LayoutError(
                f"{name}.refs[{position}].page_bytes = {ref.page_bytes} is not within 1..{page},"
                f" the page of tensor {ref.tensor}"
            )


def compare_ranks(layouts: Mapping[int, RankLayout], stages: Mapping[int, int]) -> None:
    """Check that the ranks of one engine agree.

    All ranks must have the same num_blocks, null block, blocks_per_chunk, hash_block_size,
    replicated and groups; ranks of one pipeline stage also the same page sizes and contents. Other
    stages hold other layers, so several stages cannot hold replicated shares.

    Raises:
        LayoutError: they differ; the text names the first rank that differs, and both values.
    """
    for name in ("num_blocks", "null_block", "blocks_per_chunk", "hash_block_size", "replicated"):
        _check_equal(name, layouts, attrgetter(name))
    _check_equal("groups (kind, block size, window)", layouts, attrgetter("kinds"), _kinds)
    stage_of = {rank: stages[rank] for rank in sorted(layouts)}
    if len(set(stage_of.values())) > 1 and any(layout.replicated for layout in layouts.values()):
        raise LayoutError(
            f"pipeline stages by rank are {stage_of}, and stages hold different layers: they cannot"
            " hold replicated shares; register with replicated=False"
        )
    for stage in sorted(set(stage_of.values())):
        members = {rank: layout for rank, layout in layouts.items() if stage_of[rank] == stage}
        _check_equal(f"page sizes (stage {stage})", members, attrgetter("pages"), _page_sizes)
        _check_equal(f"contents (stage {stage})", members, attrgetter("contents"), _contents)
        _check_equal(f"bytes per chunk (stage {stage})", members, attrgetter("slot_bytes"))


def _check_equal(
    name: str,
    layouts: Mapping[int, RankLayout],
    value_of: Callable[[RankLayout], Hashable],
    shown: Callable[[RankLayout], object] | None = None,
) -> None:
    """Check that `value_of` is equal for all ranks; the error has `shown` instead if given."""
    values = {rank: value_of(layout) for rank, layout in layouts.items()}
    votes = Counter(values[rank] for rank in sorted(values))
    if len(votes) <= 1:
        return
    usual = max(votes, key=votes.__getitem__)  # in a tie, the lowest rank's
    odd = next(rank for rank in sorted(values) if values[rank] != usual)
    others = [rank for rank in sorted(values) if values[rank] == usual]
    show = shown or value_of
    raise LayoutError(
        f"rank {odd} reports {name} = {show(layouts[odd])}, rank(s) {others} report"
        f" {show(layouts[others[0]])}; start all ranks with the same model and settings"
    )
