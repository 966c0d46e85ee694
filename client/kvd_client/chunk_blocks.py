"""From a ticket and an engine's blocks to the arrays of a job.

An engine knows, for each group, which of its blocks hold which chunks. A job needs flat
arrays of blocks, sizes, indices, slots and generations that fit each other; chunks that
the daemon refused or did not find must be left out of all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvd_client.arguments import collection, shown, whole
from kvd_client.errors import UsageError
from kvd_client.tickets import LoadTicket, StoreTicket


@dataclass(frozen=True, slots=True)
class ChunkBlocks:
    """Consecutive blocks of one group, and the chunks that they lie in.

    Attributes:
        keys: of the chunks, in order; `keys[0]` is the one that holds `blocks[0]`.
        blocks: the engine's block ids, none of them the null block.
        first: logical index of `blocks[0]` in the group: it is block
            ``first % blocks_per_chunk`` of its chunk.
    """

    keys: Sequence[bytes]
    blocks: Sequence[int]
    first: int = 0


class JobArrays(NamedTuple):
    """The arrays of one job, as `Worker.submit_store` describes them."""

    block_ids: list[int]
    group_sizes: list[int]
    block_indices: list[int]
    slots: list[int]
    generations: list[int]


def job_arrays(
    ticket: StoreTicket | LoadTicket, groups: Sequence[ChunkBlocks], blocks_per_chunk: int
) -> JobArrays:
    """The job for those chunks of `groups` that the ticket has.

    Args:
        ticket: of keys among those of `groups`.
        groups: one for each group of the layout, in its order; no keys where it has none.
        blocks_per_chunk: of the layout.

    Raises:
        UsageError: no ticket, or numbers of keys and blocks that do not fit each other.
    """
    if not isinstance(ticket, (StoreTicket, LoadTicket)):
        raise UsageError(f"ticket={shown(ticket)}: pass what prepare_store or prepare_load gave")
    try:
        slots, generations = ticket.slots.tolist(), ticket.generations.tolist()
        places = dict(zip(ticket.keys, zip(slots, generations, strict=True), strict=True))
    except (AttributeError, TypeError, ValueError) as error:  # none that the daemon gave
        raise UsageError(f"ticket={shown(ticket)}: {error}") from error
    arrays = JobArrays([], [], [], [], [])
    for index, group in enumerate(collection("groups", groups, "ChunkBlocks, one a group")):
        _add(arrays, f"groups[{index}]", group, places, blocks_per_chunk)
    return arrays


def _add(
    arrays: JobArrays,
    name: str,
    group: object,
    places: dict[bytes, tuple[int, int]],
    blocks_per_chunk: int,
) -> None:
    if not isinstance(group, ChunkBlocks):
        raise UsageError(f"{name}={shown(group)}: ChunkBlocks are needed")
    keys = collection(f"{name}.keys", group.keys, "keys")
    blocks = collection(f"{name}.blocks", group.blocks, "block ids")
    entered = whole(f"{name}.first", group.first, 0) % blocks_per_chunk
    chunks = -(-(len(blocks) + entered) // blocks_per_chunk) if blocks else 0
    if len(keys) != chunks:
        raise UsageError(
            f"{name} has {len(keys)} keys, its {len(blocks)} blocks from {group.first} on lie in"
            f" {chunks} chunks of {blocks_per_chunk}"
        )
    before, start = len(arrays.block_ids), None
    for index, key in enumerate(keys):
        if not isinstance(key, bytes):
            raise UsageError(f"{name}.keys has {shown(key)}: bytes are needed")
        place = places.pop(key, None)  # of equal keys the first has the chunk
        if place is None:
            continue
        low = max(0, index * blocks_per_chunk - entered)
        if start is None:
            start = group.first + low
        arrays.block_ids.extend(blocks[low : (index + 1) * blocks_per_chunk - entered])
        arrays.slots.append(place[0])
        arrays.generations.append(place[1])
    arrays.group_sizes.append(len(arrays.block_ids) - before)
    arrays.block_indices.append(start or 0)
