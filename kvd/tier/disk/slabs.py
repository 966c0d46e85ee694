"""A slab: a preallocated file of slots of one size, and the index file of their records.

``000007.slab`` holds the slots; ``000007.index`` holds a record for each slot, of which the process
has a copy. The index file is created last and removed first, so a slab without one holds nothing.
The index is little-endian: a header page, then one record for each slot::

    offset  type      header
         0  8 bytes   magic "kvd-dsk" and a zero byte
         8  u32, u32  version, number of slots
        16  u64       bytes of a slot
        24  u32       zlib.crc32 of bytes 0..24

    offset  type      record
         0  u64       sequence: grows with every chunk that is put; 0: the slot is empty
         8  u64       xxh3-64 of the shares
        16  16 bytes  id of the space
        32  u8        length of the key, a zero byte follows
        34  u16, u16  first block, count of blocks
        38  u16       group
        40  48 bytes  key, padded with zeros

Records locate chunks and are not checksummed: the seal in a chunk's head decides whether the bytes
in the slot are the chunk (`kvd.tier.batches`).
"""

import contextlib
import errno
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvd.tier.disk import files
from kvd.tier.disk.files import open_regular

SLAB, INDEX = ".slab", ".index"
ALIGNMENT = 4096  # of slots
FREE, BUSY, HELD, DOOMED = range(4)
MAX_SLOTS = 2**24
MAGIC = b"kvd-dsk\0"
VERSION = 2
HEADER_BYTES = 4096
RECORD_BYTES = 88
KEY_BYTES = 48
RECORD = np.dtype(
    [
        ("sequence", "<u8"),
        ("checksum", "<u8"),
        ("space", "V16"),
        ("key_len", "u1"),
        ("zero", "u1"),
        ("first", "<u2"),
        ("count", "<u2"),
        ("group", "<u2"),
        ("key", f"V{KEY_BYTES}"),
    ]
)
Records = npt.NDArray[np.void]
Flags = npt.NDArray[np.bool_]
_RECORD = struct.Struct(f"<QQ16sBxHHH{KEY_BYTES}s")
_OWNER = struct.Struct(f"<16sB7x{KEY_BYTES}s")
_OWNER_AT = 16
_HEADER = struct.Struct("<8sIIQI")
_MAX_SEQUENCE = 2**62  # records with larger sequences are damaged
_FILE_MODE = 0o600
_NEW = ".new"


class SlabLost(Exception):
    """The files of an open slab were removed or shortened."""


class Record(NamedTuple):
    """The record of one slot; see the module."""

    sequence: int
    checksum: int
    space: bytes
    coverage: tuple[int, int, int]
    key: bytes

    def pack(self) -> bytes:
        """Return its bytes in the index file."""
        fields = self.sequence, self.checksum, self.space, len(self.key), *self.coverage, self.key
        return _RECORD.pack(*fields)


def possible(records: Records) -> Flags:
    """Return which records can be a chunk's; the others are damaged, or their slots are empty."""
    sequences, lengths = records["sequence"], records["key_len"]
    return (sequences > 0) & (sequences < _MAX_SEQUENCE) & (lengths > 0) & (lengths <= KEY_BYTES)


def pack_header(num_slots: int, slot_bytes: int) -> bytes:
    """Return the header page of an index file."""
    raw = _HEADER.pack(MAGIC, VERSION, num_slots, slot_bytes, 0)
    check = crc32(raw[:-4])
    return _HEADER.pack(MAGIC, VERSION, num_slots, slot_bytes, check).ljust(HEADER_BYTES, b"\0")


def parse_header(raw: bytes) -> tuple[int, int]:
    """Return the number of slots and the bytes of a slot, from an index file's header page.

    Raises:
        ValueError: the header is damaged, or of another version; says which.
    """
    if len(raw) < HEADER_BYTES:
        raise ValueError(f"it has {len(raw)} bytes, fewer than a header")
    magic, version, num_slots, slot_bytes, check = _HEADER.unpack_from(raw)
    if magic != MAGIC or check != crc32(raw[: _HEADER.size - 4]):
        raise ValueError("its header is damaged")
    if version != VERSION:
        raise ValueError(f"it has version {version}, this kvd reads {VERSION}")
    return num_slots, slot_bytes


def slab_bytes(num_slots: int, slot_bytes: int) -> int:
    """Return the bytes that both files of a slab use on disk.

    This counts one block for the extent map of the slots' file: ext4 keeps the map outside the
    inode if there are more than four extents, as a file of 512 MiB has.
    """
    index_bytes = HEADER_BYTES + num_slots * RECORD_BYTES
    return num_slots * slot_bytes + -(-index_bytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT


class Slab:
    """One slab, open.

    Attributes:
        number: in the files' names, and in the places of its slots.
        num_slots, slot_bytes: number of slots, and bytes of each.
        file: descriptor of the slots' file, with O_DIRECT if the file system supports it.
        mirror: the copy of the index file's records.
        states: FREE, BUSY (being written), HELD, DOOMED (dropped while being read), by slot.
        visited: CLOCK's reference bits, by slot.
        used: the highest sequence of a put or get in this slab.
        pins: reads and writes under way.
    """

    def __init__(self, number: int, slot_bytes: int, file: int, index: int, raw: bytes) -> None:
        self.number = number
        self.num_slots = len(raw) // RECORD_BYTES
        self.slot_bytes = slot_bytes
        self.file = file
        self.mirror = memoryview(bytearray(raw))
        self.states = bytearray(self.num_slots)
        self.visited = bytearray(self.num_slots)
        self.used = 0
        self.pins = 0
        self._index = index

    @property
    def nbytes(self) -> int:
        """Bytes of both files."""
        return slab_bytes(self.num_slots, self.slot_bytes)

    @property
    def records(self) -> Records:
        """The records, as an array that views `mirror`."""
        return np.frombuffer(self.mirror, RECORD)

    def record(self, slot: int) -> Record:
        """Return the record of a slot."""
        sequence, checksum, space, length, first, count, group, key = _RECORD.unpack_from(
            self.mirror, slot * RECORD_BYTES
        )
        return Record(sequence, checksum, space, (first, count, group), key[:length])

    def owner(self, slot: int) -> tuple[bytes, bytes]:
        """Return the space id and the key in a slot's record."""
        space, length, key = _OWNER.unpack_from(self.mirror, slot * RECORD_BYTES + _OWNER_AT)
        return space, key[:length]

    def write_records(self, slot: int, records: Sequence[Record]) -> None:
        """Write the records of adjacent slots, from `slot` on.

        Raises:
            OSError: I/O error.
        """
        self._write(slot, b"".join(record.pack() for record in records))

    def erase_records(self, slot: int, count: int = 1) -> None:
        """Write empty records for adjacent slots; raises as `write_records`."""
        self._write(slot, bytes(count * RECORD_BYTES))

    def _write(self, slot: int, raw: bytes) -> None:
        offset = slot * RECORD_BYTES
        if os.pwrite(self._index, raw, HEADER_BYTES + offset) != len(raw):
            raise OSError(f"slab {self.number}: a record was written in part")
        self.mirror[offset : offset + len(raw)] = raw

    def check_files(self) -> None:
        """Check that the files still exist at their full size.

        Raises:
            SlabLost: a file was removed or shortened; says which.
            OSError: I/O error.
        """
        for fd, suffix, length in (
            (self.file, SLAB, self.num_slots * self.slot_bytes),
            (self._index, INDEX, HEADER_BYTES + len(self.mirror)),
        ):
            status = os.fstat(fd)
            if not status.st_nlink:
                raise SlabLost(f"{self.number:06}{suffix} was removed")
            if status.st_size < length:
                raise SlabLost(f"{self.number:06}{suffix} was shortened to {status.st_size} bytes")

    def sync(self) -> None:
        """Flush both files to the medium, so that they survive a power loss."""
        os.fdatasync(self.file)
        os.fdatasync(self._index)

    def close(self) -> None:
        """Close the files."""
        os.close(self.file)
        os.close(self._index)


def create(folder_fd: int, number: int, num_slots: int, slot_bytes: int, slots_flags: int) -> Slab:
    """Create a slab with all of its bytes allocated; if that fails, no file is left.

    Args:
        folder_fd: descriptor of the directory.
        number: unused by other slabs.
        num_slots: number of slots.
        slot_bytes: bytes of each slot, a multiple of `ALIGNMENT`.
        slots_flags: for opening the slots' file: O_DIRECT or 0.

    Raises:
        OSError: I/O error; ENOSPC if there is no room.
    """
    name, index_name = f"{number:06}{SLAB}", f"{number:06}{INDEX}"
    records = bytes(num_slots * RECORD_BYTES)
    with contextlib.ExitStack() as undo:
        file = _create(folder_fd, name, slots_flags)
        undo.callback(os.close, file)
        undo.callback(files.remove, folder_fd, name)
        os.posix_fallocate(file, 0, num_slots * slot_bytes)
        index = _create(folder_fd, name + _NEW, 0)
        undo.callback(os.close, index)
        undo.callback(files.remove, folder_fd, name + _NEW)
        content = pack_header(num_slots, slot_bytes) + records
        os.posix_fallocate(index, 0, len(content))
        if os.pwrite(index, content, 0) != len(content):
            raise OSError(f"{index_name} was written in part")
        os.rename(name + _NEW, index_name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        undo.pop_all()
    return Slab(number, slot_bytes, file, index, records)


def load(folder_fd: int, number: int, slots_flags: int) -> Slab:
    """Open an existing slab, with its records; arguments as of `create`.

    Raises:
        FileNotFoundError: a file is missing, or a power loss has left the index unwritten.
        OSError: I/O error.
        ValueError: the slab is damaged; says how.
    """
    with contextlib.ExitStack() as undo:
        file = open_regular(folder_fd, f"{number:06}{SLAB}", os.O_RDWR | slots_flags)
        undo.callback(os.close, file)
        index = open_regular(folder_fd, f"{number:06}{INDEX}", os.O_RDWR)
        undo.callback(os.close, index)
        raw = _read(index, os.fstat(index).st_size)
        if not any(raw[:HEADER_BYTES]):
            raise FileNotFoundError(errno.ENOENT, "its index was never written")
        num_slots, slot_bytes = parse_header(raw)
        records_bytes = num_slots * RECORD_BYTES
        if num_slots > MAX_SLOTS or len(raw) < HEADER_BYTES + records_bytes:
            raise ValueError(f"its index has {len(raw)} bytes, too few for {num_slots} slots")
        if os.fstat(file).st_size < num_slots * slot_bytes:
            raise ValueError(
                f"it has {os.fstat(file).st_size} bytes, too few for {num_slots} slots of"
                f" {slot_bytes}"
            )
        records = raw[HEADER_BYTES : HEADER_BYTES + records_bytes]
        undo.pop_all()
    return Slab(number, slot_bytes, file, index, records)


def remove(folder_fd: int, number: int) -> None:
    """Remove the files of a slab, if they exist.

    Raises:
        OSError: I/O error.
    """
    for name in (f"{number:06}{INDEX}", f"{number:06}{SLAB}{_NEW}", f"{number:06}{SLAB}"):
        files.remove(folder_fd, name)


def set_aside(folder_fd: int, number: int) -> None:
    """Rename both files of a slab to ``.damaged``, for inspection.

    Raises:
        OSError: I/O error.
    """
    for suffix in (INDEX, SLAB):
        files.set_aside(folder_fd, f"{number:06}{suffix}")


def _create(folder_fd: int, name: str, flags: int) -> int:
    flags |= os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.open(name, flags, _FILE_MODE, dir_fd=folder_fd)


def _read(fd: int, length: int) -> bytes:
    pieces: list[bytes] = []
    offset = 0
    while offset < length and (piece := os.pread(fd, length - offset, offset)):
        pieces.append(piece)
        offset += len(piece)
    return b"".join(pieces)
