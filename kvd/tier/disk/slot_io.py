"""I/O of a run of adjacent slots in a slab's file, in one vectored call.

A slot holds the shares one after another, then, at a multiple of 512 bytes, the length of the head
and the head. If addresses and lengths allow O_DIRECT, shares are transferred directly from and to
the pool, and only heads through this thread's staging buffer; else everything is.
"""

import ctypes
import errno
import functools
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvd.tier.contract import Chunk, Space
from kvd.tier.disk.slabs import ALIGNMENT, Record, Slab

RUN_BYTES = 4 * 2**20  # at least one slot
_SECTOR = 512
_LENGTH = struct.Struct("<I")
_MOST_PIECES = 1024  # IOV_MAX
_STATX_DIOALIGN = 0x2000  # linux/stat.h, since 6.1
_AT_EMPTY_PATH = 0x1000
_DIO_AT = 152  # stx_dio_mem_align, then stx_dio_offset_align
_own = threading.local()


@dataclass(frozen=True, slots=True)
class Alignment:
    """O_DIRECT's alignment of addresses, and of offsets and lengths. Offset 1: it is not used."""

    memory: int
    offset: int

    @property
    def flags(self) -> int:
        """Flags for opening the slots' files."""
        return os.O_DIRECT if self.offset > 1 else 0

    @classmethod
    def of(cls, folder: int) -> "Alignment":
        """Return the alignment that the file system of a directory needs, by an O_TMPFILE file.

        Raises:
            OSError: I/O error.
        """
        try:
            fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return cls(1, 1)
            if error.errno == errno.EOPNOTSUPP:  # the file system has no O_TMPFILE
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
        # 0, 0: the file system accepts the flag but copies nevertheless, as tmpfs does.
        return cls(max(memory, 1), max(offset, 1)) if offset <= ALIGNMENT else cls(1, 1)


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The layout of a space's chunks in slots.

    Attributes:
        head_at: offset of the head's length in a slot.
        slot_bytes: bytes of a slot.
        run_slots: the largest number of slots in one call.
        is_padded: whether there are bytes between the shares and the head.
    """

    head_at: int
    slot_bytes: int
    run_slots: int
    is_padded: bool


@functools.lru_cache(maxsize=256)
def layout_of(space: Space) -> SlotLayout:
    """Return the layout of a space's chunks in slots."""
    nbytes = space.chunk_bytes
    head_at = -(-nbytes // _SECTOR) * _SECTOR
    end = head_at + _LENGTH.size + space.head_bytes
    pieces = _MOST_PIECES // (len(space.share_bytes) + 1)
    return SlotLayout(
        head_at=head_at,
        slot_bytes=-(-end // ALIGNMENT) * ALIGNMENT,
        run_slots=max(1, min(RUN_BYTES // max(1, nbytes), pieces)),
        is_padded=head_at != nbytes,
    )


@dataclass(slots=True)
class SlotChunk:
    """One chunk of a batch, and its slot.

    Attributes:
        index: of the chunk in the batch.
        record: of the slot: its present one for a read, its future one for a write.
    """

    index: int
    chunk: Chunk
    slab: Slab
    slot: int
    record: Record


def runs(items: list[SlotChunk]) -> Iterator[list[SlotChunk]]:
    """Sort `items`, and yield runs that one call can transfer."""
    if len(items) > 1:
        items.sort(key=_place)
    run: list[SlotChunk] = []
    for item in items:
        if run and not _follows(run, item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _place(item: SlotChunk) -> tuple[int, int]:
    return item.slab.number, item.slot


def _follows(run: list[SlotChunk], item: SlotChunk) -> bool:
    last = run[-1]
    space = item.chunk.space
    return (
        item.slab is last.slab
        and item.slot == last.slot + 1
        and (space is last.chunk.space or space == last.chunk.space)
        and len(run) < layout_of(space).run_slots
    )


class SlotRunIO:
    """One vectored call for the chunks of a run.

    Args:
        run: from `runs`.
        alignment: what O_DIRECT needs.
    """

    def __init__(self, run: Sequence[SlotChunk], alignment: Alignment) -> None:
        self._chunks = [item.chunk for item in run]
        self._file, slot_bytes = run[0].slab.file, run[0].slab.slot_bytes
        self._at, self._nbytes = run[0].slot * slot_bytes, len(run) * slot_bytes
        layout = layout_of(self._chunks[0].space)
        self._head_at = layout.head_at
        if slot_bytes < layout.head_at + _LENGTH.size:  # the record is damaged
            raise OSError(errno.EIO, f"a slot of {slot_bytes} bytes is too small for its chunk")
        self._staged = layout.is_padded or not _are_aligned(self._chunks, alignment)
        own = 0 if self._staged else self._head_at  # bytes of a slot outside the staging buffer
        size = slot_bytes - own
        memory = _memory(len(run) * size)
        self._slots = [memory[at : at + size] for at in range(0, len(memory), size)]
        self._heads = [slot[self._head_at - own :] for slot in self._slots]
        self._pieces: list[memoryview] = [memory] if self._staged else []
        if not self._staged:
            for chunk, head in zip(self._chunks, self._heads, strict=True):
                self._pieces += filter(None, chunk.shares)
                self._pieces.append(head)

    def write(self) -> None:
        """Write shares and heads.

        Raises:
            OSError: I/O error, or a short write.
        """
        for head, chunk in zip(self._heads, self._chunks, strict=True):
            end = _LENGTH.size + len(chunk.head)
            _LENGTH.pack_into(head, 0, len(chunk.head))
            head[_LENGTH.size : end] = chunk.head
            head[end:] = bytes(len(head) - end)
        if self._staged:
            for slot, chunk in zip(self._slots, self._chunks, strict=True):
                at = 0
                for share in chunk.shares:
                    slot[at : at + len(share)] = share
                    at += len(share)
                slot[at : self._head_at] = bytes(self._head_at - at)
        moved = os.pwritev(self._file, self._pieces, self._at)
        if moved != self._nbytes:
            raise OSError(errno.EIO, f"{moved} of {self._nbytes} bytes were written")

    def read(self) -> None:
        """Read shares and heads into the chunks.

        Raises:
            OSError: I/O error, or a short read.
        """
        moved = os.preadv(self._file, self._pieces, self._at)
        if moved != self._nbytes:
            raise OSError(errno.EIO, f"{moved} of {self._nbytes} bytes were read")
        if self._staged:
            for slot, chunk in zip(self._slots, self._chunks, strict=True):
                at = 0
                for share in chunk.shares:
                    share[:] = slot[at : at + len(share)]
                    at += len(share)
        for head, chunk in zip(self._heads, self._chunks, strict=True):
            (length,) = _LENGTH.unpack_from(head)
            chunk.head = bytes(head[_LENGTH.size :][:length])


def _are_aligned(chunks: Sequence[Chunk], alignment: Alignment) -> bool:
    if any(nbytes % alignment.offset for nbytes in chunks[0].space.share_bytes):
        return False
    return alignment.memory == 1 or not any(
        _address(share) % alignment.memory for chunk in chunks for share in chunk.shares if share
    )


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _memory(nbytes: int) -> memoryview:
    """Return this thread's staging buffer, page-aligned; the next call reuses its memory."""
    memory: memoryview = getattr(_own, "memory", memoryview(b""))
    if len(memory) < nbytes:
        memory = _own.memory = memoryview(mmap.mmap(-1, nbytes))
    return memory[:nbytes]
