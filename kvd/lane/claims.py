"""Which of a job's chunks are not its own now, by the directory's records.

Few chunks are looked at one by one, many at once: numpy costs as much for one chunk as this does
for sixteen.
"""

from collections.abc import Sequence

import numpy as np

from kvd.lane.workers import Binding
from kvd_proto.blocks import Chunks
from kvd_proto.directory import SlotState

FEW = 16
_READY = int(SlotState.READY)
# A store may come before the broker knows of its key: then the slot is only lent.
_LENT, _WRITING = int(SlotState.LENT), int(SlotState.WRITING)


def not_to_write(
    binding: Binding, chunks: Chunks, which: Sequence[int], few: int = FEW
) -> list[int]:
    """Return those of `which`, numbers of chunks, that are not this engine's to write."""
    directory, owner = binding.directory, binding.order.owner
    if len(which) > few:
        slots, generations, *_ = chunks.arrays
        good = directory.check(slots, generations, _WRITING, owner, or_state=_LENT).tolist()
        return [i for i in which if not good[i]]
    lost = []
    for i in which:
        generation, owned_by, state, *_ = directory.record(chunks.slots[i])
        if (
            generation != chunks.generations[i]
            or owned_by != owner
            or state not in (_WRITING, _LENT)
        ):
            lost.append(i)
    return lost


def not_ready(binding: Binding, chunks: Chunks, few: int = FEW) -> list[int]:
    """Return the numbers of those that are not READY, or hold something else by now."""
    if len(chunks) > few:
        slots, generations, *_ = chunks.arrays
        return np.flatnonzero(~binding.directory.check(slots, generations, _READY)).tolist()
    gone = []
    for i, (slot, generation) in enumerate(zip(chunks.slots, chunks.generations, strict=True)):
        found, _, state, *_ = binding.directory.record(slot)
        if found != generation or state != _READY:
            gone.append(i)
    return gone


def not_covered(binding: Binding, chunks: Chunks, few: int = FEW) -> list[int]:
    """Return the numbers of those that lack blocks that are asked for, or are of another group.

    Another group's pages lie elsewhere in the slot, where old bytes may be.
    """
    if len(chunks) > few:
        slots, _, firsts, counts, groups = chunks.arrays
        held_first, held_count, held_group = binding.directory.coverage(slots)
        # first + count is at most blocks_per_chunk, which fits 16 bits.
        lacking = (firsts < held_first) | (firsts + counts > held_first + held_count)
        return np.flatnonzero(lacking | (groups != held_group)).tolist()
    short = []
    for i, slot in enumerate(chunks.slots):
        *_, begin, count, group = binding.directory.record(slot)
        if (
            chunks.first[i] < begin
            or chunks.first[i] + chunks.count[i] > begin + count
            or chunks.group[i] != group
        ):
            short.append(i)
    return short
