"""The daemon's directories: checks that change nothing, and where a pool's metadata lies."""

import contextlib
import os
import stat
from pathlib import Path

from kvd.errors import ConfigError
from kvd.machine.memory import Filesystem, pool_directory_name
from kvd_proto.text import explain_denied, format_size

MAX_DIRECTORY_BYTES = 107 - len("/lane-host-99999-ffff.sock")
"""Of the runtime directory's path: sockaddr_un holds 108 bytes with the final zero, and a lane's
socket has the longest name."""
METADATA_DIR = Path("/dev/shm")
"""Where a pool's metadata lies if pool_dir is on hugetlbfs."""
MANIFEST = "manifest.json"


def check_directory(name: str, path: Path) -> None:
    """Check that only the daemon's user, its group and root can replace files in `path`.

    If every user may rename and remove files, any user can replace the daemon's files by links. The
    sticky bit prevents that, as on /tmp and /dev/shm.

    Raises:
        ConfigError: every user may; names the remedy.
        OSError: the directory does not exist.
    """
    mode = path.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ConfigError(
            f"{name} = {path}: mode {stat.S_IMODE(mode):04o} lets every user replace the daemon's"
            " files there",
            f"use a directory of its own, or chmod o-w {path}, or chmod +t {path} if others need"
            " it",
        )


def check_runtime_dir(path: Path) -> None:
    """Check that a daemon can use `path`, an absolute one, as its runtime directory.

    Raises:
        ConfigError: the path is too long for a socket, it or a file in it is something else, this
            user may not write there, every user may, or there is no room.
    """
    name, choose = f"runtime_dir = {path}", "choose another directory with --runtime-dir"
    if (length := len(os.fsencode(path))) > MAX_DIRECTORY_BYTES:
        raise ConfigError(
            f"{name}: {length} bytes, a socket's path leaves {MAX_DIRECTORY_BYTES} for it",
            "use a shorter one, such as /run/kvd",
        )
    try:
        if path.is_dir():
            check_directory("runtime_dir", path)
        existing = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
        if not existing.is_dir():
            subject = "this" if existing == path else existing
            raise ConfigError(f"{name}: {subject} is no directory", choose)
        remedy = f"{choose}; under systemd RuntimeDirectory= makes one for the unit's user"
        _check_writable(name, path, existing, remedy)
        room = os.statvfs(existing)
        if room.f_blocks and not room.f_bfree and not (path / "kvd.lock").exists():
            raise ConfigError(f"{name}: its file system is full", f"make room there, or {choose}")
    except OSError as error:
        text = explain_denied(path) or f"{name}: {error.strerror}"
        raise ConfigError(text, f"or {choose}") from error
    for file in socket_files(path):
        # A lane of a dead daemon may remove it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(file.lstat().st_mode):
                raise ConfigError(
                    f"{file} is no socket, so no daemon created it", f"move it away, or {choose}"
                )
    if (lock := path / "kvd.lock").is_dir() and not lock.is_symlink():
        raise ConfigError(f"{lock}: Is a directory", f"remove it, or {choose}")


def socket_files(runtime_dir: Path) -> list[Path]:
    """Return the paths of the daemon's sockets; the first two may not exist."""
    names = ("broker.sock", "http.sock")
    return [runtime_dir / name for name in names] + sorted(runtime_dir.glob("lane-*.sock"))


def check_pool_dir(path: Path) -> None:
    """Check that a daemon can create its pool in `path`.

    Raises:
        ConfigError: it is no directory, this user may not write there, or every user may.
    """
    if not path.is_dir():
        reason = "this is not a directory" if path.exists() else "no such directory"
        raise ConfigError(f"pool_dir = {path}: {reason}", "use a tmpfs such as /dev/shm")
    check_directory("pool_dir", path)
    remedy = "choose a directory that this user may write, with --pool-dir"
    _check_writable(f"pool_dir = {path}", path, path, remedy)


def _check_writable(name: str, path: Path, existing: Path, remedy: str) -> None:
    """Check that this user may create files in `existing`: `path`, or the directory to make it in.

    Raises:
        ConfigError: it may not; begins with `name`, or says which directory may not be entered.
    """
    if os.access(existing, os.W_OK | os.X_OK, effective_ids=True):
        return
    if denied := explain_denied(existing):
        raise ConfigError(denied, f"or {remedy}")
    subject = "" if existing == path else f"{existing}: "
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        raise ConfigError(f"{name}: {subject}the file system is read-only", remedy)
    raise ConfigError(f"{name}: {subject}uid {os.geteuid()} may not write there", remedy)


def metadata_directory(filesystem: Filesystem, runtime_dir: Path) -> Path:
    """Return the directory of a pool's metadata; `filesystem` is that of its pool_dir."""
    pool_dir = filesystem.directory
    if filesystem.writable:
        return pool_dir / pool_directory_name(runtime_dir)
    # The digest includes pool_dir, so no pool in METADATA_DIR has the same directory.
    return METADATA_DIR / pool_directory_name(runtime_dir, pool_dir.resolve())


def replaced_pool_text(kept_cpu_bytes: int, cpu_bytes: int) -> str:
    """Return what a start does with a kept pool of another size than its own."""
    return (
        f"the kept pool has {format_size(kept_cpu_bytes)}, cpu_bytes is {format_size(cpu_bytes)}:"
        " it is replaced once the new pool is allocated, and the cache starts empty"
    )
