"""Bytes between memory and slots that follow each other in a slab's file.

A slot holds the shares one after another, then the tail with the head, from a multiple of 512
bytes on. Where addresses and lengths allow O_DIRECT, shares go straight from and to the pool, and
only tails through memory of this thread; else all does. One call moves a run of slots.
"""

import ctypes
import errno
import functools
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvd.tier.contract import Chunk, Space
from kvd.tier.disk import records
from kvd.tier.disk.slabs import ALIGNMENT, Slab

RUN_BYTES = 4 * 2**20  # at least one slot
_SECTOR = 512
_MOST_PIECES = 1024  # IOV_MAX
_STATX_DIOALIGN = 0x2000  # linux/stat.h, since 6.1
_AT_EMPTY_PATH = 0x1000
_DIO_AT = 152  # stx_dio_mem_align, then stx_dio_offset_align
_own = threading.local()


@dataclass(frozen=True, slots=True)
class Alignment:
    """What O_DIRECT asks for: of addresses, and of offsets and lengths. 1, 1: it is not used."""

    memory: int
    offset: int

    @property
    def flags(self) -> int:
        """What files are opened with."""
        return os.O_DIRECT if self.offset > 1 else 0

    @classmethod
    def of(cls, folder: int) -> "Alignment":
        """Ask the file system of a directory, by means of a file without a name.

        Raises:
            OSError: of the medium.
        """
        try:
            fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return cls(1, 1)
            if error.errno == errno.EOPNOTSUPP:  # no file without a name
                return cls(ALIGNMENT, ALIGNMENT)
            raise
        try:
            found = ctypes.create_string_buffer(256)
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found):
                return cls(ALIGNMENT, ALIGNMENT)
        finally:
            os.close(fd)
        memory, offset = np.frombuffer(found.raw, "<u4", 2, _DIO_AT).tolist()
        if not int.from_bytes(found.raw[:4], "little") & _STATX_DIOALIGN:
            return cls(ALIGNMENT, ALIGNMENT)
        # 0, 0: the file system takes the flag and copies all the same, as tmpfs does.
        return cls(max(memory, 1), max(offset, 1)) if offset <= ALIGNMENT else cls(1, 1)


@dataclass(frozen=True, slots=True)
class Layout:
    """How chunks of a namespace lie in slots.

    Attributes:
        tail_at: where the tail begins in a slot.
        slot_bytes: of a slot.
        run_slots: how many slots one call moves at most.
        is_padded: whether there are bytes between the shares and the tail.
    """

    tail_at: int
    slot_bytes: int
    run_slots: int
    is_padded: bool


@functools.lru_cache(maxsize=256)
def layout_of(space: Space) -> Layout:
    """Return how chunks of a namespace lie in slots."""
    nbytes = space.chunk_bytes
    tail_at = -(-nbytes // _SECTOR) * _SECTOR
    end = tail_at + records.TAIL_BYTES + space.head_bytes
    pieces = _MOST_PIECES // (len(space.share_bytes) + 1)
    return Layout(
        tail_at=tail_at,
        slot_bytes=-(-end // ALIGNMENT) * ALIGNMENT,
        run_slots=max(1, min(RUN_BYTES // max(1, nbytes), pieces)),
        is_padded=tail_at != nbytes,
    )


def write(
    slab: Slab, slot: int, chunks: Sequence[Chunk], sequences: Sequence[int], alignment: Alignment
) -> None:
    """Write chunks of one namespace into slots that follow each other.

    Raises:
        OSError: of the medium.
    """
    run = _Run(slab, chunks, alignment)
    for tail, chunk, sequence in zip(run.tails, chunks, sequences, strict=True):
        records.write_tail(tail, sequence, slab.identity, chunk.head)
    if run.staged:
        run.copy_in()
    moved = os.pwritev(slab.file, run.pieces, slot * slab.slot_bytes)
    if moved != run.nbytes:
        raise OSError(errno.EIO, f"{moved} of {run.nbytes} bytes were written")


def read(slab: Slab, slot: int, chunks: Sequence[Chunk], alignment: Alignment) -> list[memoryview]:
    """Fill the shares of chunks of one namespace from slots that follow each other.

    Returns:
        The tails, valid until the next call of this thread.

    Raises:
        OSError: of the medium.
    """
    run = _Run(slab, chunks, alignment)
    moved = os.preadv(slab.file, run.pieces, slot * slab.slot_bytes)
    if moved != run.nbytes:
        raise OSError(errno.EIO, f"{moved} of {run.nbytes} bytes were read")
    if run.staged:
        run.copy_out()
    return run.tails


class _Run:
    """The memory of one call: its pieces in order, and among them the tails."""

    def __init__(self, slab: Slab, chunks: Sequence[Chunk], alignment: Alignment) -> None:
        layout = layout_of(chunks[0].space)
        self.chunks = chunks
        self.nbytes = len(chunks) * slab.slot_bytes
        self._tail_at = layout.tail_at
        self.staged = layout.is_padded or not _are_aligned(chunks, alignment)
        own = 0 if self.staged else self._tail_at  # what does not lie in memory of this thread
        size = slab.slot_bytes - own
        memory = _memory(len(chunks) * size)
        slots = [memory[at : at + size] for at in range(0, len(memory), size)]
        self.tails = [slot[self._tail_at - own :] for slot in slots] if self.staged else slots
        self.pieces: list[memoryview] = []
        if self.staged:
            self._slots = slots
            self.pieces.append(memory)
        else:
            for chunk, tail in zip(chunks, self.tails, strict=True):
                self.pieces += filter(None, chunk.shares)
                self.pieces.append(tail)

    def copy_in(self) -> None:
        for slot, chunk in zip(self._slots, self.chunks, strict=True):
            at = 0
            for share in chunk.shares:
                slot[at : at + len(share)] = share
                at += len(share)
            slot[at : self._tail_at] = bytes(self._tail_at - at)

    def copy_out(self) -> None:
        for slot, chunk in zip(self._slots, self.chunks, strict=True):
            at = 0
            for share in chunk.shares:
                share[:] = slot[at : at + len(share)]
                at += len(share)


def _are_aligned(chunks: Sequence[Chunk], alignment: Alignment) -> bool:
    if any(nbytes % alignment.offset for nbytes in chunks[0].space.share_bytes):
        return False
    return alignment.memory == 1 or not any(
        _address(share) % alignment.memory for chunk in chunks for share in chunk.shares if share
    )


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _memory(nbytes: int) -> memoryview:
    """Return memory of this thread that is aligned to a page; the next call returns the same."""
    memory: memoryview = getattr(_own, "memory", memoryview(b""))
    if len(memory) < nbytes:
        memory = _own.memory = memoryview(mmap.mmap(-1, nbytes))
    return memory[:nbytes]
