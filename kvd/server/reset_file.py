"""The table of resets in a file, and its copy beside the pool.

`kvd.resets` in the runtime directory is the table of resets (`kvd.cache.recovery`). A tier may be
down or hung during a reset, and the daemon may be killed before the tier has recorded it. So the
daemon writes a reset to this file before it replies. The file does not depend on the pool: it
survives another pool, ``--cold`` and `kvd purge`. On tmpfs a write never waits for a disk.

The copy lies in the pool's directory, for a daemon of another runtime directory that adopts the
pool (`kvd.server.adoption`).
"""

import contextlib
import logging
import os
from pathlib import Path

from kvd.cache.recovery import RESET_BYTES, ResetTable
from kvd.errors import LedgerDamaged
from kvd.machine.pools import READ_FLAGS
from kvd.server.state_files import is_own_file, remove_tree

log = logging.getLogger("kvd.daemon")


def read_resets(path: Path) -> ResetTable:
    """Return the table of resets in a file.

    Raises:
        OSError, LedgerDamaged: there is no such file, or it is not valid.
    """
    table = ResetTable()
    table.load(_read_page(path))
    return table


def _read_page(path: Path) -> bytes:
    fd = os.open(path, READ_FLAGS)
    try:
        if not is_own_file(os.fstat(fd)):
            raise LedgerDamaged("it is not a file of this user")
        return os.read(fd, RESET_BYTES + 1)
    finally:
        os.close(fd)


class ResetFile(ResetTable):
    """The table of resets, stored in a file; the first reset creates the file.

    A save overwrites the page by one write, which is atomic. A damaged or foreign file is replaced
    by a table with a new base, so no earlier chunk is used. If the file cannot be written, the
    reset is answered as failed, and the client retries it.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._copy: Path | None = None
        self._failed = ""  # why the last write failed
        try:
            self.load(_read_page(path))
        except FileNotFoundError:
            return
        except (OSError, LedgerDamaged) as error:
            self.draw_base()
            log.error(  # noqa: TRY400  # the message names the reason
                "%s is not valid (%s): earlier chunks, in memory and in tiers, are not used, since"
                " a reset may have dropped some of them",
                path,
                error,
            )
            self._save()

    def draw(self, namespace: str) -> str:
        """Write the new salt to the file before returning; see `ResetTable.draw`."""
        super().draw(namespace)
        return self._save()

    def learn(self, other: ResetTable) -> str:
        """Write the table to the file if it has changed; see `ResetTable.learn`."""
        before = self.pack()
        super().learn(other)
        return self._save() if self.pack() != before else ""

    def copy_to(self, path: Path) -> None:
        """Keep a copy in this file, too, from now on; every reset is in the copy first."""
        self._copy = path
        self._save_copy()

    def _save_copy(self) -> None:
        """Write the copy; if that fails there is none, and no other daemon adopts the pool."""
        if self._copy is None:
            return
        try:
            self._store(self._copy)
        except OSError as error:
            remove_tree(self._copy)
            log.warning(
                "%s cannot be written: %s; no daemon of another runtime directory adopts this pool",
                self._copy,
                error.strerror,
            )

    def _save(self) -> str:
        """Write the page; return why that failed and the remedy, or an empty string."""
        self._save_copy()
        try:
            self._store(self._path)
        except OSError as error:
            return self._report_failure(f"{self._path} cannot be written: {error.strerror}")
        if self._failed:
            self._failed = ""
            log.info("%s can be written again", self._path)
        return ""

    def _store(self, path: Path) -> None:
        """Overwrite the file, which needs no free space, or create it by a rename."""
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if is_own_file(status) and status.st_size == RESET_BYTES:
                self._write(path)
                return
        draft = path.with_name(f"{path.name}.new")
        remove_tree(draft)
        self._write(draft, os.O_CREAT | os.O_EXCL)
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        draft.rename(path)

    def _write(self, path: Path, flags: int = 0) -> None:
        fd = os.open(
            path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o600
        )
        try:
            if os.pwrite(fd, self.pack(), 0) != RESET_BYTES:
                raise OSError(0, "only a part was written")
        finally:
            os.close(fd)

    def _report_failure(self, reason: str) -> str:
        """Log the reason unless it was logged last time; return the text for the reply."""
        if reason != self._failed:
            self._failed = reason
            log.error(
                "%s; until then a reset is answered as failed and retried, since tiers might miss"
                " it after the next start: free space there, or let this user write there",
                reason,
            )
        return (
            f"{reason}; the chunks are dropped, but a tier might miss the reset after the daemon's"
            " next start: free space there, and retry"
        )
