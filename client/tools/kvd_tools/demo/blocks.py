"""The engine's GPU blocks: who has which. Block 0 is the null block and never given out."""

from collections import deque
from collections.abc import Iterable

from kvd_tools.demo.errors import DemoError, OutOfBlocks

NULL_BLOCK = 0


class BlockAllocator:
    """Gives out block ids 1..num_blocks - 1; the block free for longest comes first.

    Invariant: every id but the null block's is either free or in use, never both.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise OutOfBlocks(f"{num_blocks} blocks: one is the null block, none is left to use")
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks))
        self._used: set[int] = set()

    @property
    def free_blocks(self) -> int:
        """How many could be allocated now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, all or none.

        Raises:
            OutOfBlocks: fewer are free; says how many.
        """
        if count > len(self._free):
            raise OutOfBlocks(
                f"{count} blocks are needed, {len(self._free)} of {self.num_blocks} are free"
            )
        taken = [self._free.popleft() for _ in range(count)]
        self._used.update(taken)
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back.

        Raises:
            ValueError: a block that is not in use, e.g. given back twice.
        """
        for block in blocks:
            if block not in self._used:
                raise ValueError(f"block {block} is not in use")
            self._used.remove(block)
            self._free.append(block)

    def check_integrity(self) -> None:
        """Check the invariant of the class.

        Raises:
            DemoError: a block is free twice, free and in use, or lost.
        """
        free = set(self._free)
        everything = set(range(1, self.num_blocks))
        if len(free) != len(self._free) or free & self._used or free | self._used != everything:
            raise DemoError(f"free {sorted(self._free)} and used {sorted(self._used)} contradict")

    def __repr__(self) -> str:
        return f"<BlockAllocator {len(self._used)} of {self.num_blocks} in use>"
