"""What a scheduler's calls take and return: keys, ranges of blocks, tickets, and jobs made of them.

A ticket is a plain value, empty if nothing was granted. It is a context manager: leaving the block
completes it. Leave it when its jobs have ended. A ticket that was sent to another process has no
scheduler, and completes nothing.

An engine knows, for each group, which of its blocks hold which chunks (`ChunkBlocks`). A job needs
flat arrays of blocks, sizes, indices, slots and generations; `pack_chunks` makes them, and leaves
out the chunks that the daemon refused or did not find.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from kvd_client.errors import UsageError, check_collection, check_int, shown
from kvd_proto.descriptions import MAX_DESCRIPTION_BYTES
from kvd_proto.directory import MAX_BLOCKS
from kvd_proto.errors import Oversize, ProtoError
from kvd_proto.jobs import JobBlocks
from kvd_proto.layout import RankLayout
from kvd_proto.messages import MAX_KEY_BYTES, MAX_KEYS, Label

BlockRange: TypeAlias = tuple[int, int]
"""Consecutive blocks of a chunk: index of the first in the chunk, and their number."""
Array = npt.NDArray[Any]
_JobArrays: TypeAlias = tuple[list[int], list[int], list[int], list[int], list[int]]
"""The arguments of `JobBlocks.of`."""


class StoreAnswer(IntEnum):
    """A scheduler's answer to a key that is offered for storing."""

    ACCEPTED = 1  # it has a slot; write it
    PRESENT = 2  # READY already; nothing to do
    PENDING = 3  # an engine is writing it, perhaps this one; nothing to do
    FULL = 4  # no slot is at hand; offer it again later
    NOT_YET = 5  # not offered often enough to be worth a slot; offer it again later


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """Slots of some chunks.

    Attributes:
        keys: the keys that have a slot, in the order of the request.
        slots: u4[len(keys)], the slot of each.
        generations: u8[len(keys)], the generation of each slot.
        on_exit: called when a `with` block is left, with whether it raised no exception.
    """

    keys: tuple[bytes, ...] = ()
    slots: Array = field(default_factory=lambda: np.empty(0, "<u4"))
    generations: Array = field(default_factory=lambda: np.empty(0, "<u8"))
    on_exit: Callable[[bool], object] | None = field(default=None, repr=False, kw_only=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.on_exit is not None:
            self.on_exit(kind is None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, f.name) for f in fields(self) if not f.kw_only)

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True, eq=False)
class StoreTicket(Ticket):
    """Slots to store into; the `with` block's end completes the stores, or drops unfinished ones.

    Attributes:
        answers: one per requested key; empty if no daemon serves the engine.
        serial: the scheduler's number of the ticket; 0: none.
    """

    answers: tuple[StoreAnswer, ...] = ()
    serial: int = 0

    @property
    def served(self) -> bool:
        """Whether a daemon serves the engine, even if no key was accepted."""
        return bool(self.answers)


@dataclass(frozen=True, slots=True, eq=False)
class LoadTicket(Ticket):
    """Chunks that are pinned for loading until `complete_load` or the lease's end.

    Attributes:
        found: bool[requested keys]; all false if no daemon serves the engine.
        lease: the scheduler's number of the lease; 0: none.
        lease_seconds: requested duration of the lease, from when the daemon reads the step.
    """

    found: Array = field(default_factory=lambda: np.empty(0, np.bool_))
    lease: int = 0
    lease_seconds: float = 0.0


# ------------------------------------------------------------------------ jobs


@dataclass(frozen=True, slots=True)
class ChunkBlocks:
    """Consecutive blocks of one group, and the chunks that they lie in.

    Attributes:
        keys: of the chunks, in order; `keys[0]` is the one that holds `blocks[0]`.
        blocks: the engine's block ids, none of them the layout's null block.
        first: logical index of `blocks[0]` in the group: it is block
            ``first % blocks_per_chunk`` of its chunk.
    """

    keys: Sequence[bytes]
    blocks: Sequence[int]
    first: int = 0


def pack_chunks(
    ticket: StoreTicket | LoadTicket, groups: Sequence[ChunkBlocks], layout: RankLayout
) -> JobBlocks:
    """Return the job for those chunks of `groups` that the ticket has.

    Args:
        ticket: of keys among those of `groups`.
        groups: one for each group of the layout, in its order; one without keys for no chunks.
        layout: with which the blocks were registered.

    Raises:
        UsageError: not a ticket, numbers of keys and blocks that do not fit each other, the null
            block, blocks that are no integers, or too many for one job.
    """
    if not isinstance(ticket, (StoreTicket, LoadTicket)):
        raise UsageError(f"ticket={shown(ticket)}: pass what prepare_store or prepare_load gave")
    try:
        slots, generations = ticket.slots.tolist(), ticket.generations.tolist()
        ticket_slots = dict(zip(ticket.keys, zip(slots, generations, strict=True), strict=True))
    except (AttributeError, TypeError, ValueError) as error:  # not as the scheduler made it
        raise UsageError(f"ticket={shown(ticket)}: {error}") from error
    arrays: _JobArrays = ([], [], [], [], [])
    for index, group in enumerate(check_collection("groups", groups, "ChunkBlocks, one a group")):
        _add_group(arrays, f"groups[{index}]", group, ticket_slots, layout)
    try:
        return JobBlocks.of(*arrays)
    except Oversize as error:
        raise UsageError(f"{error}; submit several jobs, split between two chunks") from error
    except ProtoError as error:
        raise UsageError(f"{error}; whole numbers are needed") from error


def _add_group(
    arrays: _JobArrays,
    name: str,
    group: object,
    ticket_slots: dict[bytes, tuple[int, int]],
    layout: RankLayout,
) -> None:
    """Check a group, and add its chunks that have a slot to the arrays; take these slots."""
    if not isinstance(group, ChunkBlocks):
        raise UsageError(f"{name}={shown(group)}: ChunkBlocks are needed")
    keys = check_collection(f"{name}.keys", group.keys, "keys")
    blocks = check_collection(f"{name}.blocks", group.blocks, "block ids")
    blocks_per_chunk, null_block = layout.blocks_per_chunk, layout.null_block
    first_in_chunk = check_int(f"{name}.first", group.first, 0) % blocks_per_chunk
    num_chunks = -(-(len(blocks) + first_in_chunk) // blocks_per_chunk) if blocks else 0
    if len(keys) != num_chunks:
        raise UsageError(
            f"{name} has {len(keys)} keys, its {len(blocks)} blocks from {group.first} on lie in"
            f" {num_chunks} chunks of {blocks_per_chunk}"
        )
    try:
        has_null_block = null_block is not None and null_block in blocks
    except ValueError as error:  # rows of an array
        raise UsageError(f"{name}.blocks={shown(blocks)}: whole numbers are needed") from error
    if has_null_block:
        raise UsageError(
            f"{name}.blocks has block {null_block}, the layout's null block, which holds no KV;"
            " list only blocks that do, the first of them at `first`"
        )
    block_ids, group_sizes, block_indices, slots, generations = arrays
    num_before, block_index = len(block_ids), None
    for index, key in enumerate(keys):
        if not isinstance(key, bytes):
            raise UsageError(f"{name}.keys[{index}] is {type(key).__name__}: bytes are needed")
        slot = ticket_slots.pop(key, None)  # of equal keys the first has the chunk
        if slot is None:
            continue
        begin = max(0, index * blocks_per_chunk - first_in_chunk)
        if block_index is None:
            block_index = group.first + begin
        block_ids.extend(blocks[begin : (index + 1) * blocks_per_chunk - first_in_chunk])
        slots.append(slot[0])
        generations.append(slot[1])
    group_sizes.append(len(block_ids) - num_before)
    block_indices.append(block_index or 0)


# --------------------------------------------------------- checks of arguments


def check_label(value: object) -> Label:
    """Check a label."""
    try:
        return Label(value)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        names = ", ".join(label.name for label in Label)
        raise UsageError(f"label={shown(value)}: one of kvd_client.Label, {names}") from None


def check_key(key: object) -> None:
    """Check a chunk's key."""
    if not isinstance(key, bytes):
        raise UsageError(f"a key is bytes, not {type(key).__name__}")
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise UsageError(
            f"a key of {len(key)} bytes: 1 to {MAX_KEY_BYTES} are possible; hash longer ones"
        )


def check_keys(values: object) -> tuple[bytes, ...]:
    """Check the keys of one call."""
    keys = check_collection("keys", values, "keys")
    if len(keys) > MAX_KEYS:
        raise UsageError(f"{len(keys)} keys in one call: {MAX_KEYS} at most; split the call")
    for key in keys:
        if type(key) is not bytes or not 0 < len(key) <= MAX_KEY_BYTES:
            check_key(key)
    return keys


def check_blocks(first: object, count: object) -> None:
    """Check a range of blocks within a chunk; without a count it has all blocks from `first` on."""
    begin = check_int("first", first, 0, MAX_BLOCKS - 1)
    if count is not None:
        check_int("count", count, 1, MAX_BLOCKS - begin)


def check_block_ranges(blocks: object, num_keys: int) -> list[BlockRange] | None:
    """Check the range of blocks for each key; None: all blocks of all chunks."""
    if blocks is None:
        return None
    pairs = check_collection("blocks", blocks, "pairs (first block, count)")
    if len(pairs) != num_keys:
        raise UsageError(f"{len(pairs)} blocks with {num_keys} keys: one pair for each is needed")
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise UsageError(f"blocks={shown(pair)}: a pair (first block, count) is needed")
        check_blocks(pair[0], check_int("count", pair[1], 1, MAX_BLOCKS))
    return [(first, count) for first, count in pairs]


def no_description(_: int) -> bytes:
    """Return the description of a chunk that has none."""
    return b""


def check_descriptions(values: object, num_keys: int) -> tuple[Callable[[int], bytes], int | None]:
    """Check the descriptions of each key's chunk; None: of none.

    Returns:
        A function that returns the i-th description, and the bytes of all; None if not known.
    """
    if values is None:
        return no_description, 0
    if callable(values):
        return values, None
    items = check_collection("descriptions", values, "bytes or None")
    if len(items) != num_keys:
        raise UsageError(f"{len(items)} descriptions with {num_keys} keys: one for each is needed")
    for item in items:
        if item is not None and not (
            isinstance(item, bytes) and len(item) <= MAX_DESCRIPTION_BYTES
        ):
            raise UsageError(
                f"descriptions={shown(item)}: what kvd_proto.descriptions.encode returned is"
                f" needed, {MAX_DESCRIPTION_BYTES} bytes at most, or None"
            )
    descriptions = [item or b"" for item in items]
    return descriptions.__getitem__, sum(map(len, descriptions))
