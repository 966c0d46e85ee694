"""From a ticket and an engine's blocks to the arrays of a job.

An engine knows, for each group, which of its blocks hold which chunks. A job needs flat
arrays of blocks, sizes, indices, slots and generations that fit each other; chunks that
the daemon refused or did not find must be left out of all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvd_client.arguments import collection, shown, whole
from kvd_client.errors import UsageError
from kvd_client.tickets import LoadTicket, StoreTicket
from kvd_proto.arrays import JobBlocks
from kvd_proto.errors import Oversize, ProtoError
from kvd_proto.layout import RankLayout

_Arrays: TypeAlias = tuple[list[int], list[int], list[int], list[int], list[int]]


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
