"""Which blocks the demo's engine holds for a prompt, as pure functions.

Two groups share the GPU's blocks. Group `FULL` attends to everything: all blocks of a prompt
are present. Group `WINDOW` is a sliding window: only the last `WINDOW_BLOCKS` blocks are
needed to go on from there. The prompt is computed in steps, and the window is stored at the
end of each, so that another prompt can go on from that point: after the first chunk (shared
system prompts), then every `STEP_CHUNKS` chunks, and at the end.
"""

from collections.abc import Callable

from kvd_tools.demo.workload import PIECE_TOKENS

FULL, WINDOW = 0, 1
NULL_BLOCK = 0  # never given out
BLOCKS_PER_CHUNK = 2  # a chunk is one piece of the prompt
BLOCK_TOKENS = PIECE_TOKENS // BLOCKS_PER_CHUNK
WINDOW_BLOCKS = 5  # the window's edge lies inside a chunk, of which it leaves out blocks
STEP_CHUNKS = 4


def full_blocks(start: int, end: int) -> range:
    """Return the logical blocks of chunks [start, end)."""
    return range(start * BLOCKS_PER_CHUNK, end * BLOCKS_PER_CHUNK)


def window_blocks(end: int) -> range:
    """Return the logical blocks in the window after `end` chunks."""
    stop = end * BLOCKS_PER_CHUNK
    return range(max(0, stop - WINDOW_BLOCKS), stop)


def step_ends(start: int, end: int) -> list[int]:
    """Return after how many chunks each step ends, for `end` chunks of which `start` are there."""
    ends = {1, end, *range(STEP_CHUNKS, end, STEP_CHUNKS)}
    return sorted(e for e in ends if start < e <= end)


def longest_hit(prefix: int, there: Callable[[int, int], bool]) -> int:
    """Return how many leading chunks can be loaded.

    Args:
        prefix: leading chunks of the full group that are there.
        there: whether a chunk of the window group is there from its n-th block on.

    Returns:
        The largest n up to `prefix` for which the window after n chunks is there.
    """
    for end in range(prefix, 0, -1):
        edge = window_blocks(end).start
        first = dict.fromkeys(range(edge // BLOCKS_PER_CHUNK, end), 0)
        first[edge // BLOCKS_PER_CHUNK] = edge % BLOCKS_PER_CHUNK
        if all(there(chunk, block) for chunk, block in first.items()):
            return end
    return 0
