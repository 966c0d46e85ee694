"""I/O of adjacent slots in a slab's file, in one vectored call.

A slot holds the shares one after another, then, at a multiple of 512 bytes, the length of the head
and the head. If addresses and lengths allow O_DIRECT, shares are transferred directly from and to
the pool, and only heads through this thread's staging buffer; otherwise all bytes are.
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

RUN_BYTES = 4 * 2**20  # in one call, but at least one slot
_SECTOR = 512
_LENGTH = struct.Struct("<I")
_MAX_PIECES = 1024  # IOV_MAX
_STATX_DIOALIGN = 0x2000  # linux/stat.h, since 6.1
_AT_EMPTY_PATH = 0x1000
_DIO_OFFSET = 152  # stx_dio_mem_align, then stx_dio_offset_align
_thread_local = threading.local()


@dataclass(frozen=True, slots=True)
class Alignment:
    """O_DIRECT's alignment of addresses, and of offsets and lengths. Offset 1: no O_DIRECT."""

    memory: int
    offset: int

    @property
    def flags(self) -> int:
        """Flags for opening the slots' files."""
        return os.O_DIRECT if self.offset > 1 else 0

    @classmethod
    def of(cls, folder_fd: int) -> "Alignment":
        """Return the alignment that the file system of a directory needs, by an O_TMPFILE file.

        Raises:
            OSError: I/O error.
        """
        try:
            fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600, dir_fd=folder_fd)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return cls(1, 1)
            if error.errno == errno.EOPNOTSUPP:  # the file system has no O_TMPFILE
                return cls(ALIGNMENT, ALIGNMENT)
            raise
        try:
            status = ctypes.create_string_buffer(256)
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, status):
                return cls(ALIGNMENT, ALIGNMENT)
        finally:
            os.close(fd)
        memory, offset = np.frombuffer(status.raw, "<u4", 2, _DIO_OFFSET).tolist()
        if not int.from_bytes(status.raw[:4], "little") & _STATX_DIOALIGN:
            return cls(ALIGNMENT, ALIGNMENT)
        # 0, 0: the file system accepts the flag but copies all the same, as tmpfs does.
        return cls(max(memory, 1), max(offset, 1)) if offset <= ALIGNMENT else cls(1, 1)


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The layout of a space's chunks in slots.

    Attributes:
        head_offset: of the head's length in a slot.
        slot_bytes: bytes of a slot.
        max_run: the largest number of slots in one call.
        is_padded: whether there are bytes between the shares and the head.
    """

    head_offset: int
    slot_bytes: int
    max_run: int
    is_padded: bool


@functools.lru_cache(maxsize=256)
def layout_of(space: Space) -> SlotLayout:
    """Return the layout of a space's chunks in slots."""
    nbytes = space.chunk_bytes
    head_offset = -(-nbytes // _SECTOR) * _SECTOR
    end = head_offset + _LENGTH.size + space.head_bytes
    pieces = _MAX_PIECES // (len(space.share_bytes) + 1)
    return SlotLayout(
        head_offset=head_offset,
        slot_bytes=-(-end // ALIGNMENT) * ALIGNMENT,
        max_run=max(1, min(RUN_BYTES // max(1, nbytes), pieces)),
        is_padded=head_offset != nbytes,
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
        items.sort(key=_position)
    run: list[SlotChunk] = []
    for item in items:
        if run and not _follows(run, item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _position(item: SlotChunk) -> tuple[int, int]:
    return item.slab.number, item.slot


def _follows(run: list[SlotChunk], item: SlotChunk) -> bool:
    last = run[-1]
    space = item.chunk.space
    return (
        item.slab is last.slab
        and item.slot == last.slot + 1
        and (space is last.chunk.space or space == last.chunk.space)
        and len(run) < layout_of(space).max_run
    )


class SlotRunIO:
    """One vectored call for the chunks of a run, which `runs` has yielded."""

    def __init__(self, run: Sequence[SlotChunk], alignment: Alignment) -> None:
        self._chunks = [item.chunk for item in run]
        self._file, slot_bytes = run[0].slab.file, run[0].slab.slot_bytes
        self._offset, self._nbytes = run[0].slot * slot_bytes, len(run) * slot_bytes
        layout = layout_of(self._chunks[0].space)
        self._head_offset = layout.head_offset
        if slot_bytes < layout.head_offset + _LENGTH.size:  # the record is damaged
            raise OSError(errno.EIO, f"a slot of {slot_bytes} bytes is too small for its chunk")
        self._staged = layout.is_padded or not _are_aligned(self._chunks, alignment)
        unstaged = 0 if self._staged else self._head_offset  # bytes of a slot
        staged_bytes = slot_bytes - unstaged
        memory = _staging_buffer(len(run) * staged_bytes)
        self._slot_buffers = [
            memory[begin : begin + staged_bytes] for begin in range(0, len(memory), staged_bytes)
        ]
        self._heads = [slot[self._head_offset - unstaged :] for slot in self._slot_buffers]
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
            for slot, chunk in zip(self._slot_buffers, self._chunks, strict=True):
                offset = 0
                for share in chunk.shares:
                    slot[offset : offset + len(share)] = share
                    offset += len(share)
                slot[offset : self._head_offset] = bytes(self._head_offset - offset)
        num_written = os.pwritev(self._file, self._pieces, self._offset)
        if num_written != self._nbytes:
            raise OSError(errno.EIO, f"{num_written} of {self._nbytes} bytes were written")

    def read(self) -> None:
        """Read shares and heads into the chunks; the caller checks the seal.

        Raises:
            OSError: I/O error, or a short read.
        """
        num_read = os.preadv(self._file, self._pieces, self._offset)
        if num_read != self._nbytes:
            raise OSError(errno.EIO, f"{num_read} of {self._nbytes} bytes were read")
        if self._staged:
            for slot, chunk in zip(self._slot_buffers, self._chunks, strict=True):
                offset = 0
                for share in chunk.shares:
                    share[:] = slot[offset : offset + len(share)]
                    offset += len(share)
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


def _staging_buffer(nbytes: int) -> memoryview:
    """Return this thread's staging buffer, page-aligned; the next call reuses its memory."""
    memory: memoryview = getattr(_thread_local, "memory", memoryview(b""))
    if len(memory) < nbytes:
        memory = _thread_local.memory = memoryview(mmap.mmap(-1, nbytes))
    return memory[:nbytes]
