"""Bytes between memory and slots that follow each other in a slab's file, and what became of them.

A slot holds the shares one after another, then, from a multiple of 512 bytes on, the length of the
head and the head. Where addresses and lengths allow O_DIRECT, shares go straight from and to the
pool, and only heads through memory of this thread; else all does. One call moves a run of slots.

A run that fails as a whole is tried chunk by chunk: it may be one slot's fault. A slab whose files
somebody has removed or shortened is dropped with all that is in it.
"""

import ctypes
import errno
import functools
import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvd.errors import TierError
from kvd.tier.contract import Chunk, Outcome, Space
from kvd.tier.disk.room import Room
from kvd.tier.disk.slabs import ALIGNMENT, Record, Slab, SlabLost
from kvd.tier.disk.slots import Slots

RUN_BYTES = 4 * 2**20  # at least one slot
_SECTOR = 512
_LENGTH = struct.Struct("<I")
_MOST_PIECES = 1024  # IOV_MAX
_STATX_DIOALIGN = 0x2000  # linux/stat.h, since 6.1
_AT_EMPTY_PATH = 0x1000
_DIO_AT = 152  # stx_dio_mem_align, then stx_dio_offset_align
_own = threading.local()
_log = logging.getLogger(__name__)


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
        head_at: where the head with its length begins in a slot.
        slot_bytes: of a slot.
        run_slots: how many slots one call moves at most.
        is_padded: whether there are bytes between the shares and the head.
    """

    head_at: int
    slot_bytes: int
    run_slots: int
    is_padded: bool


@functools.lru_cache(maxsize=256)
def layout_of(space: Space) -> Layout:
    """Return how chunks of a namespace lie in slots."""
    nbytes = space.chunk_bytes
    head_at = -(-nbytes // _SECTOR) * _SECTOR
    end = head_at + _LENGTH.size + space.head_bytes
    pieces = _MOST_PIECES // (len(space.share_bytes) + 1)
    return Layout(
        head_at=head_at,
        slot_bytes=-(-end // ALIGNMENT) * ALIGNMENT,
        run_slots=max(1, min(RUN_BYTES // max(1, nbytes), pieces)),
        is_padded=head_at != nbytes,
    )


@dataclass(slots=True)
class Item:
    """One chunk of a batch, and its slot.

    Attributes:
        index: in the batch.
        record: of the slot: the one that is there, or that it will have.
    """

    index: int
    chunk: Chunk
    slab: Slab
    slot: int
    record: Record


def runs(items: list[Item]) -> Iterator[list[Item]]:
    """Put together what one call can move."""
    if len(items) > 1:
        items.sort(key=_place)
    run: list[Item] = []
    for item in items:
        if run and not _follows(run, item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _place(item: Item) -> tuple[int, int]:
    return item.slab.number, item.slot


def _follows(run: list[Item], item: Item) -> bool:
    last = run[-1]
    space = item.chunk.space
    return (
        item.slab is last.slab
        and item.slot == last.slot + 1
        and (space is last.chunk.space or space == last.chunk.space)
        and len(run) < layout_of(space).run_slots
    )


class _Run:
    """The memory of one call: its pieces in order, and among them `heads` with their padding."""

    def __init__(self, run: Sequence[Item], alignment: Alignment) -> None:
        self._chunks = [item.chunk for item in run]
        self._file, slot_bytes = run[0].slab.file, run[0].slab.slot_bytes
        self._at, self._nbytes = run[0].slot * slot_bytes, len(run) * slot_bytes
        layout = layout_of(self._chunks[0].space)
        self._head_at = layout.head_at
        self._staged = layout.is_padded or not _are_aligned(self._chunks, alignment)
        own = 0 if self._staged else self._head_at  # what does not lie in memory of this thread
        size = slot_bytes - own
        memory = _memory(len(run) * size)
        self._slots = [memory[at : at + size] for at in range(0, len(memory), size)]
        self.heads = [slot[self._head_at - own :] for slot in self._slots]
        self._pieces: list[memoryview] = [memory] if self._staged else []
        if not self._staged:
            for chunk, head in zip(self._chunks, self.heads, strict=True):
                self._pieces += filter(None, chunk.shares)
                self._pieces.append(head)

    def write(self) -> None:
        """Write shares and heads.

        Raises:
            OSError: of the medium.
        """
        for head, chunk in zip(self.heads, self._chunks, strict=True):
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
        """Fill shares and `heads`, which are valid until the next run of this thread.

        Raises:
            OSError: of the medium.
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


@dataclass(slots=True)
class Answer:
    """Outcomes of a batch's chunks, and what went wrong with the medium.

    Attributes:
        deadline: monotonic seconds, after which nothing more is begun.
    """

    outcomes: list[Outcome]
    deadline: float
    errors: list[str] = field(default_factory=list)

    def set(self, run: Sequence[Item], outcome: Outcome) -> None:
        """The same outcome for all chunks of a run."""
        for item in run:
            self.outcomes[item.index] = outcome

    def take(self) -> list[Outcome]:
        """Return the outcomes.

        Raises:
            TierError: nothing of the batch went well, for an error of the medium.
        """
        if self.errors and Outcome.FAILED in self.outcomes:
            if all(outcome is Outcome.FAILED for outcome in self.outcomes):
                raise TierError(self.errors[0])
            _log.warning("%s (%d chunks of a batch)", self.errors[0], len(self.errors))
        return self.outcomes


class Moves:
    """Writes and reads runs; from several threads at a time.

    Args:
        directory: for the log.
        slots: all of them.
        lock: that is taken around each call of `slots`.
        room: frees slots, and removes a slab's files.
        alignment: what O_DIRECT asks for.
    """

    def __init__(
        self,
        directory: Path,
        slots: Slots,
        lock: threading.Lock,
        room: Room,
        alignment: Alignment,
    ) -> None:
        self._directory, self._room, self._alignment = directory, room, alignment
        self._slots, self._lock = slots, lock

    def write(self, run: list[Item], answer: Answer) -> None:
        """Write chunks into slots that were taken for them, and their records after them."""
        if time.monotonic() > answer.deadline:
            self._not_written(run, Outcome.LATE, answer)
            return
        slab = run[0].slab
        try:
            slab.look()
            _Run(run, self._alignment).write()
            slab.write_records(run[0].slot, [item.record for item in run])
        except SlabLost as error:
            self._not_written(run, Outcome.FAILED, answer)
            self._lose(slab, error)
        except OSError as error:
            if len(run) > 1:  # it may be one slot's
                for item in run:
                    self.write([item], answer)
                return
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            self._not_written(run, Outcome.FULL if full else Outcome.FAILED, answer)
            answer.errors.append(self._failed("write", run[0], error))
        else:
            self._written(run, answer)

    def _written(self, run: list[Item], answer: Answer) -> None:
        with self._lock:
            before = [self._slots.written(item.slab, item.slot, item.record) for item in run]
            for item in run:
                is_kept = self._slots.holds(item.slab, item.slot, item.record)
                answer.outcomes[item.index] = Outcome.OK if is_kept else Outcome.GONE
        self._room.free(before)

    def _not_written(self, run: list[Item], outcome: Outcome, answer: Answer) -> None:
        answer.set(run, outcome)
        self._room.free([(item.slab, item.slot) for item in run])

    def read(self, run: list[Item], answer: Answer) -> None:
        """Fill chunks from slots that are pinned."""
        if time.monotonic() > answer.deadline:
            answer.set(run, Outcome.LATE)
            return
        slab = run[0].slab
        try:
            slab.look()
            moved = _Run(run, self._alignment)
            moved.read()
        except SlabLost as error:
            self._lose(slab, error)
        except OSError as error:
            if len(run) > 1:
                for item in run:
                    self.read([item], answer)
                return
            # It would fail again: the chunk is computed and put anew, into another slot.
            answer.set(run, Outcome.FAILED)
            with self._lock:
                self._slots.lost(run[0].slab, run[0].slot)
            answer.errors.append(self._failed("read", run[0], error))
        else:
            answer.set(run, Outcome.OK)
            for item, head in zip(run, moved.heads, strict=True):
                (length,) = _LENGTH.unpack_from(head)
                item.chunk.head = bytes(head[_LENGTH.size :][:length])

    def _lose(self, slab: Slab, error: SlabLost) -> None:
        with self._lock:
            if slab.number not in self._slots.slabs:
                return
            self._slots.drop(slab)
        self._room.discard(slab)
        _log.error(
            "disk:%s: %s: its chunks are lost, and its room is used anew; leave the files to kvd",
            self._directory,
            error,
        )

    def _failed(self, what: str, item: Item, error: OSError) -> str:
        return (
            f"disk:{self._directory}/{item.slab.number:06}.slab: slot {item.slot}:"
            f" {what}: {error.strerror or error}"
        )
