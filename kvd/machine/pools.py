"""The pools in a `pool_dir`: their directories and files, which of them are unused, their removal.

A pool's directory is named after its daemon's runtime directory, so a daemon that starts with
another runtime directory leaves the earlier pool behind. A pool is in use while another process has
a lock on

- its directory: its daemon; or
- its file: each lane and tier that can still write to it (`kvd.machine.process.lock_pool`).

`PoolClaim` takes all these locks. A daemon that starts meanwhile waits for the directory's lock,
then checks that the directory still has its name (`kvd.server.state_files.PoolFiles`).

On hugetlbfs, whose files cannot be written, a pool has a second directory, in /dev/shm.
"""

import contextlib
import fcntl
import os
import re
import shlex
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from kvd.errors import PoolError
from kvd.machine import directories
from kvd.machine.directories import MANIFEST, metadata_directory
from kvd.machine.memory import Filesystem, allocated_bytes, pool_directory_name
from kvd.machine.process import is_named, try_lock
from kvd_proto.text import format_duration, format_size, printable, user_name

POOL = "pool"
RESETS = "resets"
LEDGER = ".ledger"
DESCRIPTIONS = ".descriptions"
MAX_MANIFEST_BYTES = 4096  # a longer file is rejected
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY_NAME = re.compile(r"(kvd-[0-9a-f]{12})(-\w+)?")  # a suffix: the name was taken
_FILE_NAME = re.compile(
    r"pool|(manifest\.json|resets(\.new)?|\w+\.(ledger|descriptions)(\.new)?)(\.damaged-\d+)?"
)
_MAX_LISTED = 8
_LOCK_SECONDS = 0.1  # another process may only be examining it


def pool_directories(pool_dir: Path, runtime_dir: Path) -> tuple[Path, Path]:
    """Return the directories of a pool's file and of its manifest, ledgers and descriptions."""
    metadata_dir = metadata_directory(Filesystem.of(pool_dir), runtime_dir)
    return pool_dir / pool_directory_name(runtime_dir), metadata_dir


@dataclass(frozen=True, slots=True)
class UnusedPool:
    """A pool that no process used when it was examined.

    directory: of the pool's file.
    metadata_dir: of its other files; None if it is not known.
    runtime_dir: of its daemon; None if it is not known.
    uid: of its daemon.
    nbytes: memory that its files take.
    started: when its last daemon started, in unix seconds.
    """

    directory: Path
    metadata_dir: Path | None
    runtime_dir: Path | None
    uid: int
    nbytes: int
    started: float

    def __str__(self) -> str:
        owner = printable(str(self.runtime_dir or "an unknown runtime directory"))
        age = format_duration(max(0.0, time.time() - self.started))
        return f"{format_size(self.nbytes)} of {owner}, started {age} ago ({self.directory.name})"


class PoolClaim:
    """The locks of an unused pool: until `close` no other process can use, remove or adopt it.

    Args:
        directory: of the pool's file.

    Raises:
        PoolError: it is in use, of another user, or no pool of kvd; the text has the reason.
        OSError: it cannot be examined.
    """

    def __init__(self, directory: Path) -> None:
        self._locks = contextlib.ExitStack()
        self._directory_fds: list[int] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self.pool = self._examine(directory)
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlock the pool; its memory is freed now if it was removed."""
        self._locks.close()

    def remove(self) -> None:
        """Remove the pool's files and directories, and let a daemon make new ones.

        Raises:
            PoolError: it is another user's.
            OSError: a file cannot be removed.
        """
        if self.pool.uid != os.geteuid():
            raise PoolError(f"it belongs to uid {self.pool.uid}")
        for file in sorted(self._files, key=lambda file: file.name == POOL):  # the pool last
            file.unlink()
        for directory in self._directories:
            directory.rmdir()
        for fd in self._directory_fds:  # freeing the memory in `close` takes minutes for a terabyte
            fcntl.flock(fd, fcntl.LOCK_UN)

    def take_directory_locks(self) -> list[int]:
        """Return the descriptors that lock the directories, which the caller closes."""
        return [os.dup(fd) for fd in self._directory_fds]

    def _examine(self, directory: Path) -> UnusedPool:
        uid = directory.lstat().st_uid
        if os.geteuid() not in {uid, 0}:
            raise PoolError(f"it belongs to uid {uid}")
        self._directory_fds.append(self._lock(directory, os.O_DIRECTORY))
        metadata_dir, runtime_dir = _find_metadata(directory)
        if metadata_dir is not None and metadata_dir != directory:
            self._directory_fds.append(self._lock(metadata_dir, os.O_DIRECTORY))
        self._lock(directory / POOL)
        self._directories = {directory, metadata_dir or directory}
        self._files = [file for path in self._directories for file in path.iterdir()]
        for file in self._files:
            status = file.lstat()
            regular = stat.S_ISREG(status.st_mode) and status.st_uid == uid
            if not regular or not _FILE_NAME.fullmatch(file.name):
                raise PoolError(f"{printable(file.name)} in it is no file of kvd")
        nbytes = sum(map(allocated_bytes, self._files))
        manifest = (metadata_dir or directory) / MANIFEST
        dated = manifest if manifest in self._files else directory / POOL
        return UnusedPool(directory, metadata_dir, runtime_dir, uid, nbytes, dated.lstat().st_mtime)

    def _lock(self, path: Path, flags: int = 0) -> int:
        try:
            fd = os.open(path, READ_FLAGS | flags)
        except FileNotFoundError as error:
            raise PoolError(f"it has no {path.name}") from error
        self._locks.callback(os.close, fd)
        if not try_lock(fd, _LOCK_SECONDS) or not is_named(fd, path):
            raise PoolError("it is in use")
        return fd


class _NamedRuntimeDir(msgspec.Struct):
    """The field of a manifest that is needed here; manifests of older releases lack it."""

    runtime_dir: str = ""


def _named_runtime_dir(metadata_dir: Path) -> Path | None:
    """Return the runtime directory that a manifest names; None if it names none."""
    try:
        fd = os.open(metadata_dir / MANIFEST, READ_FLAGS)
        with os.fdopen(fd, "rb") as file:
            content = file.read(MAX_MANIFEST_BYTES)
        name = msgspec.json.decode(content, type=_NamedRuntimeDir).runtime_dir
    except (OSError, msgspec.DecodeError):
        return None
    return Path(name) if name else None


def _find_metadata(directory: Path) -> tuple[Path | None, Path | None]:
    """Return the directory of a pool's manifest, and its runtime directory; None: not known.

    A manifest whose runtime directory does not give the directory's name is not believed.
    """
    match = _DIRECTORY_NAME.fullmatch(directory.name)
    name = match[1] if match else ""
    filesystem = Filesystem.of(directory.parent)
    if filesystem.writable:
        runtime_dir = _named_runtime_dir(directory)
        known = runtime_dir is not None and pool_directory_name(runtime_dir) == name
        return directory, runtime_dir if known else None
    for metadata_dir in pool_paths(directories.METADATA_DIR):
        runtime_dir = _named_runtime_dir(metadata_dir)
        if runtime_dir is None or pool_directory_name(runtime_dir) != name:
            continue
        if metadata_directory(filesystem, runtime_dir) == metadata_dir:
            return metadata_dir, runtime_dir
    return None, None


def pool_paths(pool_dir: Path) -> list[Path]:
    """Return the paths in `pool_dir` that have the name of a pool's directory."""
    return sorted(path for path in pool_dir.glob("kvd-*") if _DIRECTORY_NAME.fullmatch(path.name))


def unused_pools(pool_dir: Path, runtime_dir: Path) -> list[UnusedPool]:
    """Return the unused pools in `pool_dir` but that of `runtime_dir`, the newest first."""
    pools = []
    for directory in pool_paths(pool_dir):
        if directory.name == pool_directory_name(runtime_dir):
            continue
        with contextlib.suppress(PoolError, OSError), PoolClaim(directory) as claim:
            pools.append(claim.pool)
    return sorted(pools, key=lambda pool: pool.started, reverse=True)


def remove_unused_pools(pool_dir: Path, runtime_dir: Path) -> Iterator[tuple[int, str]]:
    """Remove the unused pools in `pool_dir` but that of `runtime_dir`.

    Yields:
        For each pool: the bytes that were freed, and what was done and why, as text.
    """
    for directory in pool_paths(pool_dir):
        if directory.name == pool_directory_name(runtime_dir):
            command = purge_command(runtime_dir, pool_dir)
            yield 0, f"{directory} is left: it is of {runtime_dir}; to free it: {command}"
            continue
        try:
            with PoolClaim(directory) as claim:
                claim.remove()
        except PoolError as error:
            yield 0, f"{directory} is left: {error}"
        except OSError as error:
            yield 0, f"{directory} is left: {error.filename or 'a lock'}: {error.strerror}"
        else:
            yield claim.pool.nbytes, f"{claim.pool} is removed"


def purge_command(runtime_dir: Path, pool_dir: Path) -> str:
    """Return the shell command that frees the runtime directory's pool in `pool_dir`."""
    return shlex.join(
        ["kvd", "purge", "--runtime-dir", str(runtime_dir), "--pool-dir", str(pool_dir)]
    )


def describe_unused(pools: Sequence[UnusedPool], pool_dir: Path) -> str:
    """Return what unused pools take, their runtime directories and ages."""
    listed = [str(pool) for pool in pools[:_MAX_LISTED]]
    if len(pools) > _MAX_LISTED:
        listed.append(f"{len(pools) - _MAX_LISTED} more")
    total = format_size(sum(pool.nbytes for pool in pools))
    return f"unused pools take {total} of {pool_dir}: {', '.join(listed)}"


def unused_remedy(pools: Sequence[UnusedPool], pool_dir: Path, runtime_dir: Path) -> str:
    """Return the shell commands that remove these pools: one for each user that has some."""
    command = f"{purge_command(runtime_dir, pool_dir)} --unused"
    commands = [
        command if uid == os.geteuid() else f"runuser -u {user_name(uid)} -- {command}"
        for uid in sorted({pool.uid for pool in pools})
    ]
    return f"to free them: {'; '.join(commands)}"


def unused_text(pools: Sequence[UnusedPool], pool_dir: Path, runtime_dir: Path) -> str:
    """Return both as one line; empty without pools."""
    if not pools:
        return ""
    remedy = unused_remedy(pools, pool_dir, runtime_dir)
    return f"{describe_unused(pools, pool_dir)}; {remedy}"
