"""The engine's decisions, as pure functions: what is present, what is hit, what is stored.

Two groups share the GPU's blocks. Group `FULL` attends to everything: all
blocks of a request are present. Group `WINDOW` is a sliding window: at any
point only the last `window` blocks are present, and needed to go on from
there. The prompt is computed in steps, and at the end of each step the window
is stored, so that another request can go on from that point: after the first
chunk (shared system prompts), then every `step_chunks` chunks, and at the end.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

FULL, WINDOW = 0, 1


@dataclass(frozen=True, slots=True)
class Shape:
    """Figures of the demo's engine.

    blocks_per_chunk: blocks in a chunk; a chunk is one piece of the prompt.
    window: blocks in the sliding window. No multiple of `blocks_per_chunk`, so
        that the window's edge lies inside a chunk whose other blocks are skipped.
    step_chunks: chunks computed between two stores of the window.
    """

    blocks_per_chunk: int = 2
    window: int = 5
    step_chunks: int = 4

    def window_blocks(self, end: int) -> range:
        """Logical indices of the window's blocks after `end` chunks."""
        stop = end * self.blocks_per_chunk
        return range(max(0, stop - self.window), stop)

    def window_chunks(self, end: int) -> range:
        """The chunks that these blocks lie in; the first may be partly covered."""
        return range(self.window_blocks(end).start // self.blocks_per_chunk, end)

    def blocks_present(self, group: int, chunks: range, end: int) -> range:
        """Logical blocks of `chunks` that are present in `group` after `end` chunks."""
        start, stop = chunks.start * self.blocks_per_chunk, chunks.stop * self.blocks_per_chunk
        if group == WINDOW:
            start = max(start, self.window_blocks(end).start)
        return range(start, stop)

    def blocks_needed(self, chunks: int) -> int:
        """The most blocks that a request of `chunks` full chunks holds at once.

        While a step is computed both its window and the one before it are there.
        """
        return chunks * self.blocks_per_chunk + 2 * self.window

    def step_ends(self, start: int, end: int) -> list[int]:
        """After how many chunks each step ends, for a prompt of `end` with `start` there."""
        ends = {1, end, *range(self.step_chunks, end, self.step_chunks)}
        return sorted(e for e in ends if start < e <= end)

    def skipped(self, chunk: int, end: int) -> int:
        """How many of a window chunk's first blocks are not in the window after `end` chunks."""
        return max(0, self.window_blocks(end).start - chunk * self.blocks_per_chunk)

    def longest_hit(self, prefix: int, there: Callable[[int, int], bool]) -> int:
        """How many leading chunks can be loaded.

        Args:
            prefix: how many leading chunks of the full group are there.
            there: whether a chunk of the window group is, but for so many first blocks.

        Returns:
            The largest n up to `prefix` with the window after n chunks there.
        """
        for end in range(prefix, 0, -1):
            if all(there(chunk, self.skipped(chunk, end)) for chunk in self.window_chunks(end)):
                return end
        return 0


def runs(numbers: Iterable[int]) -> list[range]:
    """Ascending numbers as maximal ranges of consecutive ones."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found
