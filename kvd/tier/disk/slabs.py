"""A slab: a preallocated file of slots of one size, and the file of its records.

``000007.slab`` holds bytes and nothing else; ``000007.index`` holds a record for each slot
(`kvd.tier.disk.records`), and this process a copy of it. The index file appears last and goes
first, so a slab without one is left over and holds nothing.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Sequence

from kvd.tier.disk import records
from kvd.tier.disk.records import RECORD_BYTES, Record

SLAB, INDEX = ".slab", ".index"
ALIGNMENT = 4096  # of slots
FREE, BUSY, HELD, DOOMED = range(4)
MAX_SLOTS = 2**24
_FILE_MODE = 0o600
_NEW = ".new"


class SlabLost(Exception):
    """Somebody has removed or shortened the files of a slab, which is open here."""


def slab_bytes(slots: int, slot_bytes: int) -> int:
    """Return the bytes that both files of a slab take.

    A block is for the map of the slots' file, which ext4 keeps outside the inode where the file
    lies in more than four pieces, as one of 512 MiB does.
    """
    index = records.HEADER_BYTES + slots * RECORD_BYTES
    return slots * slot_bytes + -(-index // ALIGNMENT) * ALIGNMENT + ALIGNMENT


class Slab:
    """One slab, open.

    Attributes:
        number: its name, and what a place in it begins with.
        slots, slot_bytes: its slots.
        file: descriptor of the slots' file, with O_DIRECT where the file system has that.
        mirror: the records, as they are in the index file.
        states: FREE, BUSY (being written), HELD, DOOMED (dropped while it is read), by slot.
        visited: by slot, whether its chunk was asked for since the hand came by.
        used: the highest sequence of a put or get in it.
        pins: reads and writes under way.
    """

    def __init__(  # noqa: PLR0917  # made by the two functions below
        self, number: int, identity: int, slot_bytes: int, file: int, index: int, raw: bytes
    ) -> None:
        self.number = number
        self.slots = len(raw) // RECORD_BYTES
        self.slot_bytes = slot_bytes
        self.identity = identity
        self.file = file
        self.mirror = memoryview(bytearray(raw))
        self.states = bytearray(self.slots)
        self.visited = bytearray(self.slots)
        self.used = 0
        self.pins = 0
        self._index = index

    @property
    def nbytes(self) -> int:
        """Bytes of both files."""
        return slab_bytes(self.slots, self.slot_bytes)

    def write_records(self, slot: int, wanted: Sequence[Record]) -> None:
        """Write the records of slots that follow each other, at the place of the first one.

        Raises:
            OSError: of the medium.
            SlabLost: the files are gone.
        """
        self._write(slot, records.packed(wanted, self.identity, slot))

    def erase_records(self, slot: int, count: int = 1) -> None:
        """Write that these slots are empty; raises as `write_records`."""
        self._write(slot, bytes(count * RECORD_BYTES))

    def _write(self, slot: int, raw: bytes) -> None:
        at = slot * RECORD_BYTES
        if os.pwrite(self._index, raw, records.HEADER_BYTES + at) != len(raw):
            raise OSError(f"slab {self.number}: a record was written in part")
        self.mirror[at : at + len(raw)] = raw

    def look(self) -> None:
        """Look whether the files are still there, and whole.

        Raises:
            SlabLost: they are not; says what is wrong.
            OSError: of the medium.
        """
        for fd, suffix, length in (
            (self.file, SLAB, self.slots * self.slot_bytes),
            (self._index, INDEX, records.HEADER_BYTES + len(self.mirror)),
        ):
            found = os.fstat(fd)
            if not found.st_nlink:
                raise SlabLost(f"{self.number:06}{suffix} was removed")
            if found.st_size < length:
                raise SlabLost(f"{self.number:06}{suffix} was shortened to {found.st_size} bytes")

    def sync(self) -> None:
        """Have the medium keep what was written, over a power loss too."""
        os.fdatasync(self.file)
        os.fdatasync(self._index)

    def close(self) -> None:
        """Close the files."""
        os.close(self.file)
        os.close(self._index)

    def __repr__(self) -> str:
        return (
            f"<Slab {self.number:06}: {self.states.count(HELD)} of {self.slots} slots of"
            f" {self.slot_bytes} bytes held>"
        )


def create(folder: int, number: int, slots: int, slot_bytes: int, flags: int) -> Slab:
    """Make a new slab, with all of its room allocated; nothing is left of it where that fails.

    Args:
        folder: descriptor of the directory.
        number: that no other slab has.
        slots: how many.
        slot_bytes: of each, a multiple of `ALIGNMENT`.
        flags: more flags to open with: O_DIRECT or 0.

    Raises:
        OSError: of the medium; ENOSPC where there is no room.
    """
    identity = secrets.randbits(64)
    name, index_name = f"{number:06}{SLAB}", f"{number:06}{INDEX}"
    raw = bytes(slots * RECORD_BYTES)
    with contextlib.ExitStack() as undo:
        file = _open(folder, name, os.O_CREAT | os.O_EXCL | flags)
        undo.callback(os.close, file)
        undo.callback(_unlink, folder, name)
        os.posix_fallocate(file, 0, slots * slot_bytes)
        index = _open(folder, name + _NEW, os.O_CREAT | os.O_EXCL)
        undo.callback(os.close, index)
        undo.callback(_unlink, folder, name + _NEW)
        whole = records.header(slots, slot_bytes, identity) + raw
        os.posix_fallocate(index, 0, len(whole))
        if os.pwrite(index, whole, 0) != len(whole):
            raise OSError(f"{index_name} was written in part")
        os.rename(name + _NEW, index_name, src_dir_fd=folder, dst_dir_fd=folder)
        undo.pop_all()
    return Slab(number, identity, slot_bytes, file, index, raw)


def load(folder: int, number: int, flags: int) -> Slab:
    """Open a slab that is there, with the records that it has.

    Raises:
        FileNotFoundError: a file is missing, or a power loss has kept the index from the medium.
        OSError: of the medium.
        ValueError: it is damaged; says how.
    """
    with contextlib.ExitStack() as undo:
        file = _open(folder, f"{number:06}{SLAB}", flags)
        undo.callback(os.close, file)
        index = _open(folder, f"{number:06}{INDEX}", 0)
        undo.callback(os.close, index)
        for fd in (file, index):
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ValueError("it is no regular file")
        raw = _read(index, os.fstat(index).st_size)
        if not any(raw[: records.HEADER_BYTES]):
            raise FileNotFoundError(errno.ENOENT, "its index was never written")
        slots, slot_bytes, identity = records.parse_header(raw)
        length = slots * RECORD_BYTES
        if slots > MAX_SLOTS or len(raw) < records.HEADER_BYTES + length:
            raise ValueError(f"its index has {len(raw)} bytes, too few for {slots} slots")
        if os.fstat(file).st_size < slots * slot_bytes:
            raise ValueError(
                f"it has {os.fstat(file).st_size} bytes, too few for {slots} slots of {slot_bytes}"
            )
        body = raw[records.HEADER_BYTES : records.HEADER_BYTES + length]
        undo.pop_all()
    return Slab(number, identity, slot_bytes, file, index, body)


def remove(folder: int, number: int) -> None:
    """Remove both files of a slab, if they are there.

    Raises:
        OSError: of the medium.
    """
    for name in (f"{number:06}{INDEX}", f"{number:06}{SLAB}{_NEW}", f"{number:06}{SLAB}"):
        _unlink(folder, name)


def set_aside(folder: int, number: int) -> None:
    """Give both files of a slab other names, for somebody to look at.

    Raises:
        OSError: of the medium.
    """
    for suffix in (INDEX, SLAB):
        name = f"{number:06}{suffix}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(name, f"{name}.damaged", src_dir_fd=folder, dst_dir_fd=folder)


def _open(folder: int, name: str, flags: int) -> int:
    return os.open(
        name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, _FILE_MODE, dir_fd=folder
    )


def _read(fd: int, length: int) -> bytes:
    pieces: list[bytes] = []
    at = 0
    while at < length and (piece := os.pread(fd, length - at, at)):
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)


def _unlink(folder: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
