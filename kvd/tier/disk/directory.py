"""The directory of a disk tier: its options, its lock and mark, and its table of salts.

``disk:/DIRECTORY,size=500GiB[,floor=16GiB][,threads=4]``. The directory holds the mark, a file
``kvd-disk``, the table of salts, and the slabs. One process uses it at a time: it holds an flock,
which the kernel drops with the process.

A directory without a mark is taken only if it is empty. Foreign files that appear later are left
alone.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from kvd.config.values import size_option
from kvd.errors import ConfigError, TierError
from kvd.machine.directories import check_directory
from kvd.machine.memory import Shortage, size_as_setting
from kvd.tier.contract import BackendOptions
from kvd.tier.disk import files
from kvd.tier.disk.files import DAMAGED, open_regular
from kvd.tier.disk.slabs import ALIGNMENT, HEADER_BYTES
from kvd_proto.text import format_size

THREADS = 4
MAX_THREADS = 64
_OPTIONS = ("size", "floor", "threads")
_FLOOR_PART = 20  # 5 %
_MAX_FLOOR = 32 * 2**30
MARK = "kvd-disk"
_MARK_TEXT = b"kvd disk tier, version 2\n"
_MARK_BYTES = 4096  # one block
_MODE = 0o700
_SLAB = re.compile(r"(\d{6})(?:\.slab|\.index|\.slab\.new)")
_FILE_SYSTEM_NAMES = {"lost+found"}  # at the root of an ext4 file system
SALTS = "salts"
MAX_SALTS = 1024
SALTS_BYTES = 2 * 60 * 1024
"""Limit for the table of salts: the file, and its successor while that is written."""
_SALTS_VERSION = 1
OWN_BYTES = _MARK_BYTES + SALTS_BYTES
MIN_BYTES = OWN_BYTES + HEADER_BYTES + 2 * ALIGNMENT
"""Of the budget: the tier's own files, and a slab of one slot with its index."""
_OTHER_NAMES = {MARK, SALTS, f"{SALTS}.new"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """The options of one disk tier.

    Attributes:
        directory: absolute path.
        size: the budget, in bytes, for all files.
        floor: free bytes to leave on the file system; None: 5 % of it, at most 32 GiB.
        threads: batches at a time.
    """

    directory: Path
    size: int
    floor: int | None
    threads: int

    @classmethod
    def parse(cls, options: BackendOptions) -> "DiskOptions":
        """Parse the operator's options.

        Raises:
            ConfigError: an option is invalid; names key, value and remedy.
        """
        if not options.target.startswith("/"):
            raise ConfigError(
                f"disk:{options.target} is no absolute directory",
                "give one, such as disk:/var/lib/kvd",
            )
        directory = Path(os.path.normpath(options.target))
        for key in options.values:
            if key not in _OPTIONS:
                raise ConfigError(
                    f"disk:{directory}: {key} is no option of a disk",
                    f"there are {', '.join(_OPTIONS)}",
                )
        if "size" not in options.values:
            raise ConfigError(f"disk:{directory} has no size", "give one, such as size=500GiB")
        name = f"disk:{directory}"
        size = size_option(name, "size", options.values["size"])
        if size < MIN_BYTES:
            raise ConfigError(
                f"{name}: size={options.values['size']} leaves nothing to chunks, since the tier's"
                f" own files take {format_size(OWN_BYTES)}",
                "give a size such as 500GiB, or remove the tier",
            )
        floor = options.values.get("floor")
        return cls(
            directory,
            size,
            None if floor is None else size_option(name, "floor", floor),
            _threads(directory, options.values.get("threads", str(THREADS))),
        )

    def floor_of(self, filesystem_bytes: int) -> int:
        """Return the free bytes to leave on a file system of this size."""
        if self.floor is not None:
            return self.floor
        return min(filesystem_bytes // _FLOOR_PART, _MAX_FLOOR)

    def shortage(self, filesystem_bytes: int, free_bytes: int, used_bytes: int) -> Shortage | None:
        """Return why the file system has less room than `size`; None if it has enough.

        The tier's files take `used_bytes` of it.
        """
        floor = self.floor_of(filesystem_bytes)
        largest = max(0, free_bytes + used_bytes - floor)
        if self.size <= largest:
            return None
        return Shortage(
            f"its size of {format_size(self.size)} cannot be reached: of the file system's"
            f" {format_size(filesystem_bytes)}, {format_size(free_bytes)} are free and"
            f" {format_size(used_bytes)} the tier's own, of which {format_size(floor)} are left to"
            " others (floor)",
            f"give size={size_as_setting(largest)} at most, or make room",
        )


def _threads(directory: Path, value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= MAX_THREADS:
        raise ConfigError(
            f"disk:{directory}: threads={value} is out of range", f"give 1 to {MAX_THREADS}"
        )
    return int(value)


class DiskDirectory:
    """The directory of a disk tier, locked and marked.

    Raises:
        TierError: the directory cannot be used; names reason and remedy.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with contextlib.ExitStack() as undo:
            try:
                self.fd = _open(path)
                undo.callback(os.close, self.fd)
                self._check_owner()
                self._lock()
                self._check_or_mark()
            except OSError as error:
                raise TierError(f"disk:{path}: {error_text(error)}") from error
            undo.pop_all()

    def _check_owner(self) -> None:
        status = os.fstat(self.fd)
        if status.st_uid != os.geteuid():
            raise TierError(
                f"disk:{self.path} belongs to user {status.st_uid}, kvd runs as {os.geteuid()};"
                f" give it to that user (chown {os.geteuid()} {self.path}) or choose another one"
            )

    def _lock(self) -> None:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TierError(
                f"disk:{self.path} is in use by another daemon, or by a process of a tier that"
                f" has not ended yet (fuser {self.path}); give each daemon a directory of its own"
            ) from None

    def _check_or_mark(self) -> None:
        """Mark the directory as kvd's if it is empty, else check its mark.

        Raises:
            TierError: it holds files but no mark, or the mark of another version.
        """
        names = self._names() - _FILE_SYSTEM_NAMES
        if MARK in names:
            try:
                fd = open_regular(self.fd, MARK, os.O_RDONLY)
            except ValueError as error:
                raise TierError(
                    f"disk:{self.path}: {error}; remove it if the other files are kvd's, or choose"
                    " another directory"
                ) from error
            try:
                text = os.read(fd, 256)
            finally:
                os.close(fd)
            # A process that died before writing its mark leaves it empty, and no other file.
            if text != _MARK_TEXT and (text or len(names) > 1):
                raise TierError(
                    f"disk:{self.path}: {MARK} says {text[:80]!r}, this kvd needs"
                    f" {_MARK_TEXT.decode().strip()!r}; use the kvd that made it, or another"
                    " directory"
                )
            foreign = sorted(name for name in names if not _is_own_name(name))
            if foreign:
                _log.warning(
                    "disk:%s: %s: not kvd's (%d in all): left alone, and not counted in size",
                    *(self.path, ", ".join(foreign[:3]), len(foreign)),
                )
        elif names:
            some = ", ".join(sorted(names)[:3])
            raise TierError(
                f"disk:{self.path} holds files of others ({some}); choose an empty or a new"
                " directory"
            )
        os.fchmod(self.fd, _MODE)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(MARK, flags, 0o600, dir_fd=self.fd)
        try:
            os.write(fd, _MARK_TEXT)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.fsync(self.fd)

    def _names(self) -> set[str]:
        return set(os.listdir(self.fd))  # noqa: PTH208  # of a descriptor

    def slab_numbers(self) -> list[int]:
        """Return the numbers of slabs of which any file exists, ascending."""
        matches = (_SLAB.fullmatch(name) for name in self._names())
        return sorted({int(match[1]) for match in matches if match})

    def bytes_beside_slabs(self) -> int:
        """Return an upper bound for kvd's other files: mark, table of salts, damaged files."""
        names = [name for name in self._names() if name.endswith(DAMAGED)]
        blocks = (os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_blocks for name in names)
        return OWN_BYTES + 512 * sum(blocks)

    def filesystem_bytes(self) -> tuple[int, int]:
        """Return the size of the file system, and its bytes free for this user.

        Raises:
            TierError: statvfs failed.
        """
        try:
            status = os.fstatvfs(self.fd)
        except OSError as error:
            raise TierError(f"disk:{self.path}: statvfs: {error.strerror}") from error
        return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize

    def close(self) -> None:
        """Release the lock, so that another process can use the directory."""
        os.close(self.fd)


class Salts:
    """The salt of each namespace's last reset, stored in a file of the directory.

    Each change writes a whole new file, syncs it and renames it before the salt counts, so chunks
    dropped by a reset are never found again. Beyond `MAX_SALTS` the least recently used salt is
    dropped: unless the daemon knows it, that namespace's chunks are not found again.

    Args:
        folder_fd: descriptor of the directory.

    Raises:
        OSError: I/O error.
    """

    def __init__(self, folder_fd: int) -> None:
        self._folder_fd = folder_fd
        self._salts: dict[str, str] = {}  # in hex; least recently used first
        try:
            self._salts = _parse_salts(self._read())
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            files.set_aside(folder_fd, SALTS)
            _log.error(
                "disk: the table of salts is damaged (%s): it was renamed to %s, and what this disk"
                " has of namespaces that were not reset since the machine started is lost",
                error,
                SALTS + DAMAGED,
            )

    def _read(self) -> bytes:
        fd = open_regular(self._folder_fd, SALTS, os.O_RDONLY)
        try:
            return os.read(fd, SALTS_BYTES)
        finally:
            os.close(fd)

    def get(self, namespace: bytes) -> bytes:
        """Return the salt of a namespace; empty if none is noted."""
        return bytes.fromhex(self._salts.get(namespace.hex(), ""))

    def note(self, namespace: bytes, salt: bytes) -> bytes:
        """Store a salt durably; return the one stored before, empty if none.

        Raises:
            OSError: I/O error; the table in memory has not changed.
        """
        name = namespace.hex()
        table = self._salts.copy()
        previous = table.pop(name, "")
        table[name] = salt.hex()
        if previous != salt.hex():
            if len(table) > MAX_SALTS:
                del table[next(iter(table))]
            self._write(table)
        self._salts = table
        return bytes.fromhex(previous)

    def _write(self, table: dict[str, str]) -> None:
        content = {"version": _SALTS_VERSION, "check": _checksum(table), "salts": table}
        text = json.dumps(content).encode()
        new = f"{SALTS}.new"
        files.remove(self._folder_fd, new)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(new, flags, 0o600, dir_fd=self._folder_fd)
        try:
            if os.write(fd, text) != len(text):
                raise OSError(errno.ENOSPC, "it was written in part")
            os.fsync(fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=self._folder_fd)
            raise
        finally:
            os.close(fd)
        try:
            os.rename(new, SALTS, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)
        except IsADirectoryError:
            files.set_aside(self._folder_fd, SALTS)
            os.rename(new, SALTS, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)
        os.fsync(self._folder_fd)


def _checksum(table: dict[str, str]) -> int:
    return crc32(json.dumps(table).encode())


def _parse_salts(text: bytes) -> dict[str, str]:
    read = json.loads(text)
    if read["version"] != _SALTS_VERSION:
        raise ValueError(f"version {read['version']}, this kvd reads {_SALTS_VERSION}")
    if _checksum(read["salts"]) != read["check"]:
        raise ValueError("it does not match its checksum")
    salts: dict[str, str] = read["salts"]
    return salts


def _is_own_name(name: str) -> bool:
    return bool(_SLAB.fullmatch(name)) or name in _OTHER_NAMES or name.endswith(DAMAGED)


def _open(path: Path) -> int:
    """Open the directory; create its last component only, not to write below a missing mount."""
    parent = path.parent
    try:
        check_directory(f"disk:{path}: its directory", parent)
    except ConfigError as error:
        raise TierError(error.text, error.remedy) from error
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=_MODE)
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise TierError(f"disk:{path} is a symbolic link; give its target, {path.resolve()}")
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)


def error_text(error: OSError) -> str:
    """Return the error with the name that it is about, and the remedy if there is one."""
    text = f"{error.filename or ''}: {error.strerror}".removeprefix(": ")
    if error.errno == errno.EROFS:
        return f"{text}; mount it writable, or choose another directory"
    if error.errno == errno.ENOENT:
        return f"{text}; create its parent directory, or mount the file system"
    if error.errno == errno.ENOTDIR:
        return f"{text}; give a directory"
    if error.errno == errno.EBUSY:
        return f"{text}; unmount what is mounted there, and remove it"
    return text
