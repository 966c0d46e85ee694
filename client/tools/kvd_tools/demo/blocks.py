"""The engine's GPU blocks and how many need each. Block 0 is the null block, never given out."""

from collections import Counter, deque
from collections.abc import Iterable

from kvd_tools.errors import OutOfBlocks

NULL_BLOCK = 0


class BlockPool:
    """Gives out blocks 1..num_blocks - 1; the block free for longest comes first.

    A request and each of its jobs use a block; it is free when the last of them releases it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks))
        self._users: Counter[int] = Counter()

    @property
    def in_use(self) -> int:
        """How many blocks are not free."""
        return len(self._users)

    def allocate(self, count: int) -> list[int]:
        """Return `count` free blocks, each with one user.

        Raises:
            OutOfBlocks: fewer are free; nothing was taken.
        """
        if count > len(self._free):
            raise OutOfBlocks(
                f"{count} blocks are needed, {len(self._free)} of {self.num_blocks} are free"
            )
        taken = [self._free.popleft() for _ in range(count)]
        self._users.update(taken)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to blocks that are in use."""
        self._users.update(blocks)

    def release(self, blocks: Iterable[int]) -> None:
        """Take a user from each block.

        Raises:
            ValueError: a block that nobody uses.
        """
        for block in blocks:
            if not self._users[block]:
                raise ValueError(f"block {block} is not in use")
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self._free.append(block)

    def __repr__(self) -> str:
        return f"<BlockPool {self.in_use} of {self.num_blocks} in use>"
