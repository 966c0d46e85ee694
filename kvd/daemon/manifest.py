"""The manifest of a kept pool: which one it is, so that no other file is taken for it."""

import os
import stat
from pathlib import Path

import msgspec

from kvd.errors import PoolError

VERSION = 2
_BYTES = 512  # of the file, whatever is in it
_LAST_EPOCH = 2**32 - 1


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which pool this is.

    inode: of the pool's file, so that no other file is taken for it.
    bytes: that are the pool; what the file has beyond them is of a larger one that was not made.
    kernel: the machine's boot, for a filesystem that outlives it may have lost some writes.
    epoch: the daemon that wrote this; the next one has a greater one.
    """

    version: int
    pool: str
    cpu_bytes: int
    bytes: int
    inode: int
    kernel: str
    epoch: int


def read(file: Path) -> Manifest:
    """Return what the file holds.

    Raises:
        OSError: it cannot be read.
        msgspec.DecodeError: it is no manifest.
    """
    return msgspec.json.decode(file.read_bytes(), type=Manifest)


def write(file: Path, manifest: Manifest) -> None:
    """Write the file: all of it or nothing, whenever this process is killed.

    Over a manifest that is there it takes no room: the filesystem may be full. One write within
    a page is done or not done at every kill.

    Raises:
        PoolError: there is none, and no room for one.
    """
    content = msgspec.json.encode(manifest).ljust(_BYTES)
    draft = file.with_suffix(".new")
    try:
        if file.exists() and file.stat().st_size == len(content):
            fd = os.open(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.pwrite(fd, content, 0)
            finally:
                os.close(fd)
            return
        draft.touch(mode=0o600)
        draft.write_bytes(content)
        draft.rename(file)
    except OSError as error:
        raise PoolError(
            f"{file} cannot be written: {error.strerror}; make room there, or choose another"
            " --pool-dir"
        ) from error


def objection(manifest: Manifest, pool_file: Path) -> str:
    """Return why the pool of a manifest cannot be used; empty where it can."""
    if manifest.version != VERSION:
        return f"it has version {manifest.version}, this daemon reads {VERSION}"
    if not 0 <= manifest.epoch < _LAST_EPOCH:
        return f"its epoch {manifest.epoch} is the last one, or none"
    if manifest.kernel != kernel_boot():
        return "the machine was started anew since"
    try:
        status = pool_file.lstat()
    except OSError as error:
        return f"its pool cannot be found: {error.strerror}"
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return "its pool is no file of this user's"
    if status.st_ino != manifest.inode or status.st_size < manifest.bytes:
        return (
            f"its pool is another file: inode {status.st_ino} of {status.st_size} bytes,"
            f" not {manifest.inode} of {manifest.bytes}"
        )
    return ""


def kernel_boot() -> str:
    """Return the id of the machine's boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
