"""The directories in which daemons of one runtime directory have left pools: `kvd.pools` in it.

A daemon with another `pool_dir` has a pool of its own and does not touch the one before, whose
memory stays taken. So each daemon writes down its `pool_dir`, and names at its start the others
that still hold a pool, with the command that frees them.

The file has one path a line, that of the last daemon first. A directory whose pool is gone is left
out at the next start.
"""

import contextlib
import logging
import os
import shlex
import stat
from pathlib import Path

from kvd.machine.room import area_name, held_bytes
from kvd.server.pool_files import is_own_file
from kvd_proto.sizes import format_size

log = logging.getLogger("kvd.daemon")
FILE = "kvd.pools"
_MOST_BYTES = 2**16  # of the file


def purge_command(runtime_dir: Path, pool_dir: Path) -> str:
    """Return the command that frees the pool of a runtime directory in `pool_dir`."""
    return shlex.join(
        ["kvd", "purge", "--runtime-dir", str(runtime_dir), "--pool-dir", str(pool_dir)]
    )


def last_pool_dir(runtime_dir: Path) -> Path | None:
    """Return the `pool_dir` of the last daemon, which may be running; None: it is not known."""
    return next(iter(_read(runtime_dir / FILE)), None)


def remember_pool_dir(runtime_dir: Path, pool_dir: Path) -> None:
    """Write down the `pool_dir` of this daemon, and name other ones that still hold a pool.

    Args:
        runtime_dir: this daemon's, locked, as an absolute path.
        pool_dir: this daemon's.
    """
    file, own = runtime_dir / FILE, pool_dir.absolute()
    known, others = _read(file), list[Path]()
    for other in known:
        held = 0
        with contextlib.suppress(OSError):  # a directory of another user, or of a lost mount
            held = held_bytes(other / area_name(runtime_dir) / "pool")
        if held and other.resolve() != own.resolve():
            others.append(other)
            log.warning(
                "pool_dir is %s; the pool that a daemon before left in %s still takes %s of memory;"
                " to free it: %s",
                own,
                other,
                format_size(held),
                purge_command(runtime_dir, other),
            )
    if known != [own, *others]:
        _write(file, [own, *others])


def forget_pool_dir(runtime_dir: Path, pool_dir: Path) -> None:
    """Leave out the `pool_dir` of this daemon, which leaves no pool there."""
    known = _read(runtime_dir / FILE)
    _write(runtime_dir / FILE, [path for path in known if path != pool_dir.absolute()])


def _read(file: Path) -> list[Path]:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(file, flags)
        try:
            status = os.fstat(fd)
            # To root `kvd purge` says as which user it must run, also while that one's daemon runs.
            readable = is_own_file(status) or (os.geteuid() == 0 and stat.S_ISREG(status.st_mode))
            content = os.read(fd, _MOST_BYTES) if readable else b""
        finally:
            os.close(fd)
    except OSError:
        return []
    return [Path(os.fsdecode(line)) for line in content.split(b"\n") if line.startswith(b"/")]


def _write(file: Path, pool_dirs: list[Path]) -> None:
    draft = file.with_name(f"{file.name}.new")
    content = b"".join(os.fsencode(path) + b"\n" for path in pool_dirs)
    try:
        if not pool_dirs:
            file.unlink(missing_ok=True)
            return
        draft.unlink(missing_ok=True)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as sink:
            sink.write(content)
        draft.replace(file)
    except OSError as error:
        log.warning(
            "%s cannot be written: %s; when pool_dir changes, the start does not name the pool that"
            " is left",
            file,
            error.strerror,
        )
