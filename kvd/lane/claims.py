"""Which of a job's chunks are not its own now, by the directory's records.

All records of a job are read at one moment; what they say is then found without another look. Few
are looked at one by one, many at once.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvd_proto.blocks import Chunks
from kvd_proto.directory import HEAD_DTYPE, READ_HEADS, SlotState

FEW = 8
_READY = int(SlotState.READY)
# A store may come before the broker knows of its key: then the slot is only lent.
_LENT, _WRITING = int(SlotState.LENT), int(SlotState.WRITING)


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
        good = (state == _WRITING) | (state == _LENT)
        good &= (table["generation"] == generations) & (table["owner"] == owner)
        return [which[i] for i in _numbers(~good)]
    lost = []
    for i, (generation, owned_by, state, *_) in zip(which, READ_HEADS(heads), strict=True):
        if (
            generation != chunks.generations[i]
            or owned_by != owner
            or state not in (_WRITING, _LENT)
        ):
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
    for i, (_, _, _, begin, held, of) in enumerate(READ_HEADS(heads)):
        first = chunks.first[i]
        if first < begin or first + chunks.count[i] > begin + held or chunks.group[i] != of:
            short.append(i)
    return short


def _numbers(bad: npt.NDArray[np.bool_]) -> list[int]:
    """Of those that are true; mostly there are none, which is found fastest in bytes."""
    return np.flatnonzero(bad).tolist() if 1 in bad.tobytes() else []
