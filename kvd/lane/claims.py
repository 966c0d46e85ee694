"""Which of a job's chunks are not its own now, by the directory's records.

All records of a job are read at one moment; what they say is then found without another look. Few
are looked at one by one, many at once.
"""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvd_proto.blocks import Chunks
from kvd_proto.directory import HEAD_DTYPE, READ_HEADS, SlotState, loan_number

FEW = 8
_READY, _WRITING = int(SlotState.READY), int(SlotState.WRITING)


def await_broker(heads: bytes, generations: "array[int]", few: int = FEW) -> bool:
    """Return whether a store's step may still be unread: a slot is on loan for its generation.

    The broker ends the loan last. A slot whose loan has ended is WRITING with the generation, or
    never will be.

    Args:
        heads: of the slots; see DirectoryView.heads.
        generations: u8, of these slots.
        few: as many are looked at one by one.
    """
    if len(generations) > few:
        loans = np.frombuffer(generations, np.uint64).astype(np.uint32)
        return 1 in (np.frombuffer(heads, HEAD_DTYPE)["loan"] == loans).tobytes()
    return any(
        loan == loan_number(generation)
        for (*_, loan), generation in zip(READ_HEADS(heads), generations, strict=True)
    )


def not_to_write(
    heads: bytes, owner: int, chunks: Chunks, which: Sequence[int], few: int = FEW
) -> list[int]:
    """Return those of `which`, numbers of chunks, that are not this engine's to write.

    Args:
        heads: of the slots of these chunks; see DirectoryView.heads.
        owner: the engine, as the directory names it.
        chunks: the job's.
        which: numbers of chunks.
        few: as many are looked at one by one.
    """
    if len(which) > few:
        table = np.frombuffer(heads, HEAD_DTYPE)
        generations = np.frombuffer(chunks.generations, np.uint64)
        if len(which) < len(generations):
            generations = generations[np.fromiter(which, np.intp, len(which))]
        state = table["state"]
        good = state == _WRITING
        good &= (table["generation"] == generations) & (table["owner"] == owner)
        return [which[i] for i in _numbers(~good)]
    lost = []
    for i, (generation, owned_by, state, *_) in zip(which, READ_HEADS(heads), strict=True):
        if generation != chunks.generations[i] or owned_by != owner or state != _WRITING:
            lost.append(i)
    return lost


def not_ready(heads: bytes, chunks: Chunks, few: int = FEW) -> list[int]:
    """Return the numbers of those that are not READY, or hold something else by now.

    Args:
        heads: of the slots of all chunks.
        chunks: the job's.
        few: as many are looked at one by one.
    """
    generations = chunks.generations
    if len(generations) > few:
        table = np.frombuffer(heads, HEAD_DTYPE)
        gone = table["generation"] != np.frombuffer(generations, np.uint64)
        gone |= table["state"] != _READY
        return _numbers(gone)
    return [
        i
        for i, (found, _, state, *_) in enumerate(READ_HEADS(heads))
        if found != generations[i] or state != _READY
    ]


def not_covered(heads: bytes, chunks: Chunks, few: int = FEW) -> list[int]:
    """Return the numbers of those that lack blocks that are asked for, or are of another group.

    Another group's pages lie elsewhere in the slot, where old bytes may be. Arguments as
    `not_ready` has them.
    """
    if len(chunks) > few:
        table = np.frombuffer(heads, HEAD_DTYPE)
        if (
            table["first"].tobytes() == chunks.first.tobytes()
            and table["count"].tobytes() == chunks.count.tobytes()
            and table["group"].tobytes() == chunks.group.tobytes()
        ):  # whole chunks, as nearly all are: a comparison of bytes costs least
            return []
        firsts, counts, groups = (
            np.frombuffer(one, np.uint16) for one in (chunks.first, chunks.count, chunks.group)
        )
        begins = table["first"]
        # first + count is at most blocks_per_chunk, which fits 16 bits.
        lacking = (firsts < begins) | (firsts + counts > begins + table["count"])
        lacking |= groups != table["group"]
        return _numbers(lacking)
    short = []
    for i, (_, _, _, begin, held, of, _) in enumerate(READ_HEADS(heads)):
        first = chunks.first[i]
        if first < begin or first + chunks.count[i] > begin + held or chunks.group[i] != of:
            short.append(i)
    return short


def _numbers(bad: npt.NDArray[np.bool_]) -> list[int]:
    """Of those that are true; mostly there are none, which is found fastest in bytes."""
    return np.flatnonzero(bad).tolist() if 1 in bad.tobytes() else []
