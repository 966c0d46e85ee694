"""The table of resets (`kvd.cache.recovery`) as the file `kvd.resets` in the runtime directory.

A tier may be down, slow or hung during a reset, and the daemon may be killed before the tier has
noted the reset. So the daemon writes the reset into this file before it answers. The file does not
depend on the pool: it survives a start with another pool or with none (``--cold``), and `kvd
purge`. In a runtime directory on tmpfs a write never waits for a disk, and survives the process.

A save overwrites the page by one write, which is atomic. A file that is damaged or not owned by
this user is replaced by a table with a new base, so no earlier chunk is used. If the file cannot be
written, the reset is answered as failed, and the client retries it.
"""

import logging
import os
from pathlib import Path

from kvd.cache.recovery import RESET_BYTES, ResetTable
from kvd.errors import LedgerDamaged
from kvd.server.pool_files import is_own_file, remove_tree

log = logging.getLogger("kvd.daemon")
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ResetFile(ResetTable):
    """The table of resets, kept in a file; the first reset creates the file.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._failed = ""  # why the last write failed
        try:
            self.load(self._read())
        except FileNotFoundError:
            return
        except (OSError, LedgerDamaged) as error:
            self.draw_base()
            log.error(  # noqa: TRY400  # the message names the reason
                "%s cannot be believed (%s): chunks of before, in memory and in tiers, are not"
                " used, since some of them may have been dropped by a reset",
                path,
                error,
            )
            self._save()

    def draw(self, namespace: str) -> str:
        """Write the new salt to the file before returning; see `ResetTable.draw`."""
        super().draw(namespace)
        return self._save()

    def _read(self) -> bytes:
        fd = os.open(self._path, os.O_RDONLY | _FLAGS)
        try:
            if not is_own_file(os.fstat(fd)):
                raise LedgerDamaged("it is no file of this user's")
            return os.read(fd, RESET_BYTES + 1)
        finally:
            os.close(fd)

    def _save(self) -> str:
        """Write the page; return why that failed, with the remedy; empty if it did not."""
        try:
            if self._is_whole():  # overwriting needs no free space
                self._write(self._path)
            else:
                self._replace()
        except OSError as error:
            return self._lack(f"{self._path} cannot be written: {error.strerror}")
        if self._failed:
            self._failed = ""
            log.info("%s can be written again", self._path)
        return ""

    def _is_whole(self) -> bool:
        """Whether the file exists, is this user's and has the full size."""
        try:
            status = self._path.lstat()
        except FileNotFoundError:
            return False
        return is_own_file(status) and status.st_size == RESET_BYTES

    def _replace(self) -> None:
        """Replace the file by a rename, so that no partial file is ever read."""
        draft = self._path.with_name(f"{self._path.name}.new")
        remove_tree(draft)
        self._write(draft, os.O_CREAT | os.O_EXCL)
        if self._path.is_dir() and not self._path.is_symlink():
            remove_tree(self._path)
        draft.rename(self._path)

    def _write(self, path: Path, flags: int = 0) -> None:
        fd = os.open(path, os.O_WRONLY | _FLAGS | flags, 0o600)
        try:
            if os.pwrite(fd, self.pack(), 0) != RESET_BYTES:
                raise OSError(0, "it was written in part")
        finally:
            os.close(fd)

    def _lack(self, why: str) -> str:
        """Log the reason unless it was logged last time; return the text for the reply."""
        if why != self._failed:
            self._failed = why
            log.error(
                "%s; until it can be, a reset is answered as failed and tried again, since tiers"
                " might not know of it after the next start: make room there, or let this user"
                " write there",
                why,
            )
        return (
            f"{why}; the chunks are dropped, but a tier might not know of it after the daemon's"
            " next start: make room there, and try again"
        )
