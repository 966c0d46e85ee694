"""A rank's KV memory, and what every page of it must hold."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvd_client import HostMemory
from kvd_tools.demo.workload import POISON, page_content, page_seed
from tests.chaos.shared import BLOCKS, Spec

Place = tuple[int, int]  # tensor, block


class Memory:
    """Pages that are poison, whatever the daemon does, but for blocks that are lent to jobs."""

    def __init__(self, spec: Spec, rank: int) -> None:
        self._layout = spec.layout
        self._who = 0 if spec.replicated else rank
        self._page = spec.page
        self.storages = [HostMemory.allocate(size) for size in self._layout.storages]
        self._free = list(range(1, BLOCKS))  # block 0 is the engine's null block
        self._lent: set[int] = set()
        for storage in self.storages:
            storage.array[:] = POISON

    def lend(self, chunks: int) -> list[int] | None:
        """Blocks for so many chunks, those longest at home first; None where too few are left."""
        count = chunks * self._layout.blocks_per_chunk
        if count > len(self._free):
            return None
        blocks, self._free = self._free[:count], self._free[count:]
        self._lent.update(blocks)
        return blocks

    def take_back(self, blocks: Sequence[int]) -> None:
        """The blocks of a job that can write to them no more: poisoned at once."""
        for block in blocks:
            for tensor in range(len(self.storages)):
                self._view(tensor, block)[:] = POISON
        self._lent.difference_update(blocks)
        self._free += blocks

    def fill(self, keys: Sequence[bytes], blocks: Sequence[int], group: int) -> None:
        """Compute the chunks' content."""
        for place, seed in self._wanted(keys, blocks, group):
            self._view(*place)[:] = page_content(seed, self._page)

    def wrong_bytes(self, keys: Sequence[bytes], blocks: Sequence[int], group: int) -> int:
        """Bytes of blocks that are not the chunks', or of other tensors that were touched."""
        wanted = dict(self._wanted(keys, blocks, group))
        places = [(tensor, block) for block in blocks for tensor in range(len(self.storages))]
        return sum(self._wrong(place, wanted.get(place)) for place in places)

    def touched_bytes(self) -> tuple[int, int]:
        """Bytes that changed where nothing was to write, and how many were looked at."""
        home = [block for block in range(BLOCKS) if block not in self._lent]
        whole = [storage.array.reshape(BLOCKS, self._page)[home] for storage in self.storages]
        return sum(int((pages != POISON).sum()) for pages in whole), sum(p.size for p in whole)

    def _wrong(self, place: Place, seed: int | None) -> int:
        expected = POISON if seed is None else page_content(seed, self._page)
        return int((self._view(*place) != expected).sum())

    def bytes_of(self, chunks: int, group: int) -> int:
        """Of so many chunks of a group, this rank's share."""
        refs = self._layout.groups[group].refs
        return chunks * self._layout.blocks_per_chunk * sum(ref.page_bytes for ref in refs)

    def _wanted(
        self, keys: Sequence[bytes], blocks: Sequence[int], group: int
    ) -> list[tuple[Place, int]]:
        factor = self._layout.blocks_per_chunk
        return [
            (
                (ref.tensor, block),
                page_seed(keys[at // factor], self._who, ref.tensor, at % factor),
            )
            for at, block in enumerate(blocks)
            for ref in self._layout.groups[group].refs
        ]

    def _view(self, tensor: int, block: int) -> npt.NDArray[np.uint8]:
        view: npt.NDArray[np.uint8] = self.storages[tensor].array[
            block * self._page : (block + 1) * self._page
        ]
        return view

    def close(self) -> None:
        """Let go of the memory."""
        for storage in self.storages:
            storage.close()

    def __repr__(self) -> str:
        return f"<Memory {len(self._free)} blocks at home, {len(self._lent)} lent>"
