"""Memory that stands for a pool, and chunks in it whose bytes follow from their keys."""

import math
import mmap
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvd.tier.batches import HEAD_BYTES, checksum_of, space_id
from kvd.tier.contract import Chunk, Space, TierBackend

POISON = 0xEE
AREA_BYTES = 64 * 2**20
ID = bytes(range(16))


def space_of(
    *share_bytes: int, name: bytes = ID, salt: bytes = b"", description: int = 64
) -> Space:
    """A namespace whose chunks have these shares and descriptions of at most so many bytes."""
    return Space(space_id(name, salt), share_bytes, HEAD_BYTES + description)


def begun(tier: TierBackend, space: Space) -> Space:
    """A space that a backend was told to begin."""
    tier.open_space(space)
    return space


def content(key: bytes, nbytes: int, salt: int = 0) -> npt.NDArray[np.uint8]:
    """The bytes of a chunk: different for every key and salt."""
    seed = zlib.crc32(key + bytes((salt,)))
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def keys_of(name: str, count: int) -> list[bytes]:
    """So many keys of 34 bytes, as vLLM's are long."""
    return [f"{name}-{i:06d}".encode().ljust(34, b".") for i in range(count)]


class Area:
    """A pool's memory, given out from the start on.

    Args:
        nbytes: of it.
        align: where a share may begin; 1 for the odd places too.
    """

    def __init__(self, nbytes: int = AREA_BYTES, align: int = 4096) -> None:
        self.memory = memoryview(mmap.mmap(-1, nbytes))
        self.align = align
        self._at = 0

    def share(self, nbytes: int) -> memoryview:
        """Memory of this size; what was given out first is given again where all was."""
        begin = math.ceil(self._at / self.align) * self.align
        if self.align == 1:
            begin |= 1
        if begin + nbytes > len(self.memory):
            begin = 0
        self._at = begin + nbytes
        return self.memory[begin : begin + nbytes]

    def chunk(self, space: Space, key: bytes, *, salt: int = 0, head: bytes | None = None) -> Chunk:
        """A chunk to put: bytes, head and coverage follow from key and salt."""
        shares = tuple(map(self.share, space.share_bytes))
        whole, at = content(key, space.chunk_bytes, salt), 0
        for share in shares:
            share[:] = whole[at : at + len(share)].tobytes()
            at += len(share)
        head_bytes = head_of(space, key, salt) if head is None else head
        return Chunk(space, key, shares, head_bytes, coverage_of(key), checksum_of(shares))

    def chunks(self, space: Space, keys: Iterable[bytes], *, salt: int = 0) -> list[Chunk]:
        """Chunks to put."""
        return [self.chunk(space, key, salt=salt) for key in keys]

    def empty(self, space: Space, key: bytes) -> Chunk:
        """A chunk to get, in memory that holds something else."""
        shares = tuple(map(self.share, space.share_bytes))
        for share in shares:
            share[:] = bytes((POISON,)) * len(share)
        return Chunk(space, key, shares)

    def empties(self, space: Space, keys: Iterable[bytes]) -> list[Chunk]:
        """Chunks to get."""
        return [self.empty(space, key) for key in keys]


def head_of(space: Space, key: bytes, salt: int = 0) -> bytes:
    """A head whose length and bytes follow from key and salt; empty for some."""
    seed = zlib.crc32(key + bytes((salt,)))
    return np.random.default_rng(seed).bytes(seed % (space.head_bytes + 1))


def coverage_of(key: bytes) -> tuple[int, int, int]:
    """First block, count of blocks and group, all that 16 bits can say."""
    seed = zlib.crc32(key)
    return seed & 0xFFFF, (seed >> 8) & 0xFFFF, seed >> 16


def bytes_of(shares: Sequence[memoryview]) -> bytes:
    """The bytes of all shares."""
    return b"".join(map(bytes, shares))


def is_whole(chunk: Chunk, *, salt: int = 0) -> bool:
    """Whether a chunk that was got is what was put under its key with this salt, head and all."""
    return bytes_of(chunk.shares) == content(
        chunk.key, chunk.space.chunk_bytes, salt
    ).tobytes() and chunk.head == head_of(chunk.space, chunk.key, salt)
