"""Tickets, which the scheduler returns, and the jobs that are made of them and an engine's blocks.

A ticket is a plain value, empty where nothing was granted. It is a context manager: leaving the
block completes it. Leave it when its jobs have ended. A ticket that was sent to another process has
no scheduler, and completes nothing.

An engine knows, for each group, which of its blocks hold which chunks (`ChunkBlocks`). A job needs
flat arrays of blocks, sizes, indices, slots and generations that fit each other; chunks that the
daemon refused or did not find are left out of all of them (`pack_chunks`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from kvd_client.errors import UsageError, collection, shown, whole
from kvd_proto.arrays import JobBlocks
from kvd_proto.descriptions import MAX_DESCRIPTION_BYTES
from kvd_proto.directory import MAX_BLOCKS
from kvd_proto.errors import Oversize, ProtoError
from kvd_proto.labels import Label
from kvd_proto.layout import RankLayout
from kvd_proto.messages import MAX_KEY_BYTES, MAX_KEYS

BlockRange: TypeAlias = tuple[int, int]
"""Consecutive blocks of a chunk: index of the first in the chunk, and their number."""
Array = npt.NDArray[Any]
_Arrays: TypeAlias = tuple[list[int], list[int], list[int], list[int], list[int]]


class StoreAnswer(IntEnum):
    """What a scheduler says about a key that is offered for storing."""

    ACCEPTED = 1  # a slot is given; write it
    PRESENT = 2  # READY already; nothing to do
    PENDING = 3  # somebody is writing it, perhaps this engine; nothing to do
    FULL = 4  # no slot is at hand; offer it next time
    NOT_YET = 5  # not offered often enough to be worth a slot; offer it next time


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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StoreTicket(Ticket):
    """Slots to store into; the `with` block's end completes the stores, or drops unfinished ones.

    Attributes:
        answers: one per requested key; empty where no daemon serves the engine.
        serial: the scheduler's number of the ticket; 0 where it has none.
    """

    answers: tuple[StoreAnswer, ...] = ()
    serial: int = 0

    @property
    def served(self) -> bool:
        """Whether a daemon serves the engine, even if no key was accepted."""
        return bool(self.answers)

    def __repr__(self) -> str:
        if not self.served:
            return "<StoreTicket not served>"
        return f"<StoreTicket {len(self.keys)} of {len(self.answers)} keys accepted>"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LoadTicket(Ticket):
    """Chunks that are pinned for loading until `complete_load` or the lease's end.

    Attributes:
        found: bool[requested keys]; all false where no daemon serves the engine.
        lease: the scheduler's number of the lease, 0 where there is none.
        lease_seconds: duration of the lease, from when the daemon is told; it may give less.
    """

    found: Array = field(default_factory=lambda: np.empty(0, np.bool_))
    lease: int = 0
    lease_seconds: float = 0.0

    def __repr__(self) -> str:
        return (
            f"<LoadTicket {len(self.keys)} of {len(self.found)} keys found,"
            f" lease {self.lease} for {self.lease_seconds:g} s>"
        )


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
        groups: one for each group of the layout, in its order; no keys where it has none.
        layout: that the job's blocks were registered with.

    Raises:
        UsageError: not a ticket, numbers of keys and blocks that do not fit each other, the null
            block, blocks that are no integers, or too many for one job.
    """
    if not isinstance(ticket, (StoreTicket, LoadTicket)):
        raise UsageError(f"ticket={shown(ticket)}: pass what prepare_store or prepare_load gave")
    try:
        slots, generations = ticket.slots.tolist(), ticket.generations.tolist()
        places = dict(zip(ticket.keys, zip(slots, generations, strict=True), strict=True))
    except (AttributeError, TypeError, ValueError) as error:  # not as the daemon gave it
        raise UsageError(f"ticket={shown(ticket)}: {error}") from error
    arrays: _Arrays = ([], [], [], [], [])
    for index, group in enumerate(collection("groups", groups, "ChunkBlocks, one a group")):
        _add(arrays, f"groups[{index}]", group, places, layout)
    try:
        return JobBlocks.of(*arrays)
    except Oversize as error:
        raise UsageError(f"{error}; submit several jobs, split between two chunks") from error
    except ProtoError as error:
        raise UsageError(f"{error}; whole numbers are needed") from error


def _add(
    arrays: _Arrays,
    name: str,
    group: object,
    places: dict[bytes, tuple[int, int]],
    layout: RankLayout,
) -> None:
    if not isinstance(group, ChunkBlocks):
        raise UsageError(f"{name}={shown(group)}: ChunkBlocks are needed")
    keys = collection(f"{name}.keys", group.keys, "keys")
    blocks = collection(f"{name}.blocks", group.blocks, "block ids")
    blocks_per_chunk, null_block = layout.blocks_per_chunk, layout.null_block
    entered = whole(f"{name}.first", group.first, 0) % blocks_per_chunk
    chunks = -(-(len(blocks) + entered) // blocks_per_chunk) if blocks else 0
    if len(keys) != chunks:
        raise UsageError(
            f"{name} has {len(keys)} keys, its {len(blocks)} blocks from {group.first} on lie in"
            f" {chunks} chunks of {blocks_per_chunk}"
        )
    try:
        names_null = null_block is not None and null_block in blocks
    except ValueError as error:  # rows of an array
        raise UsageError(f"{name}.blocks={shown(blocks)}: whole numbers are needed") from error
    if names_null:
        raise UsageError(
            f"{name}.blocks has block {null_block}, the layout's null block, which holds no KV;"
            " list only blocks that do, the first of them at `first`"
        )
    block_ids, group_sizes, block_indices, slots, generations = arrays
    before, start = len(block_ids), None
    for index, key in enumerate(keys):
        if not isinstance(key, bytes):
            raise UsageError(f"{name}.keys[{index}] is {type(key).__name__}: bytes are needed")
        place = places.pop(key, None)  # of equal keys the first has the chunk
        if place is None:
            continue
        low = max(0, index * blocks_per_chunk - entered)
        if start is None:
            start = group.first + low
        block_ids.extend(blocks[low : (index + 1) * blocks_per_chunk - entered])
        slots.append(place[0])
        generations.append(place[1])
    group_sizes.append(len(block_ids) - before)
    block_indices.append(start or 0)


# -------------------------------------------------- arguments of a scheduler


def request_label(value: object) -> Label:
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


def request_keys(values: object) -> tuple[bytes, ...]:
    """Check the keys of one request."""
    wanted = collection("keys", values, "keys")
    if len(wanted) > MAX_KEYS:
        raise UsageError(f"{len(wanted)} keys in one call: {MAX_KEYS} at most; split the call")
    for key in wanted:
        check_key(key)
    return wanted


def check_blocks(first: object, count: object) -> None:
    """Check a range of blocks within a chunk; without a count it has all that follow."""
    begin = whole("first", first, 0, MAX_BLOCKS - 1)
    if count is not None:
        whole("count", count, 1, MAX_BLOCKS - begin)


def block_ranges(blocks: object, number: int) -> list[BlockRange] | None:
    """Check the blocks of each of so many keys; None: all blocks of all."""
    if blocks is None:
        return None
    pairs = collection("blocks", blocks, "pairs (first block, count)")
    if len(pairs) != number:
        raise UsageError(f"{len(pairs)} blocks with {number} keys: one pair for each is needed")
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise UsageError(f"blocks={shown(pair)}: a pair (first block, count) is needed")
        check_blocks(pair[0], whole("count", pair[1], 1, MAX_BLOCKS))
    return [(first, count) for first, count in pairs]


def no_description(number: int) -> bytes:
    """Describe no chunk."""
    del number
    return b""


def chunk_descriptions(values: object, number: int) -> tuple[Callable[[int], bytes], int | None]:
    """Check the descriptions of so many keys' chunks; None: of none.

    Returns:
        What tells that of the i-th one; how many bytes they have in all, None where that is not
        known.
    """
    if values is None:
        return no_description, 0
    if callable(values):
        return values, None
    found = collection("descriptions", values, "bytes or None")
    if len(found) != number:
        raise UsageError(f"{len(found)} descriptions with {number} keys: one for each is needed")
    for each in found:
        if each is not None and not (
            isinstance(each, bytes) and len(each) <= MAX_DESCRIPTION_BYTES
        ):
            raise UsageError(
                f"descriptions={shown(each)}: what kvd_proto.descriptions.encode returned is"
                f" needed, {MAX_DESCRIPTION_BYTES} bytes at most, or None"
            )
    described = [each or b"" for each in found]
    return described.__getitem__, sum(map(len, described))
