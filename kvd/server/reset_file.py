"""The file of resets: `kvd.resets` in the runtime directory, see `kvd.cache.resets`.

A tier may be down, slow or hung while a namespace is reset, and the daemon may be killed before the
tier knows of it. So the daemon writes the reset into a file of its own before it answers. The file
belongs to no pool: it is the same after a start with another pool, with none (``--cold``), and
after `kvd purge`. It lies in memory where runtime directories do, so writing never waits for a
disk, and what a process has written before it is killed stays.

It is written over, by one write within a page, which is done or not done. What is damaged or is not
this user's is replaced by a table whose floor is a new epoch: whatever tiers keep is of before.
Where it cannot be written the reset is answered as failed, and the one who asked for it asks again.
"""

import logging
import os
from pathlib import Path

from kvd.cache.resets import PAGE_BYTES, Resets
from kvd.errors import LedgerDamaged
from kvd.server.pool_files import is_own_file, remove_tree
from kvd.wire.tiering import new_epoch

log = logging.getLogger("kvd.daemon")
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ResetFile(Resets):
    """The table, as the file has it; the file is made at the first reset.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._failed = ""  # why it could last not be written
        try:
            self.load(self._read())
        except FileNotFoundError:
            return
        except (OSError, LedgerDamaged) as error:
            self.floor = new_epoch() + 2**21  # later than any of this millisecond
            log.error(  # noqa: TRY400  # the text has the reason
                "%s cannot be believed (%s): chunks that tiers keep of before are not used, since"
                " some of them may have been dropped by a reset",
                path,
                error,
            )
            self._replace()

    def note(self, namespace: str, epoch: int) -> str:
        """See Resets. The file has it when this returns."""
        super().note(namespace, epoch)
        return self._replace() if self._lost() else self._write()

    def _read(self) -> bytes:
        fd = os.open(self._path, os.O_RDONLY | _FLAGS)
        try:
            if not is_own_file(os.fstat(fd)):
                raise LedgerDamaged("it is no file of this user's")
            return os.read(fd, PAGE_BYTES + 1)
        finally:
            os.close(fd)

    def _lost(self) -> bool:
        """Whether there is no whole file of this user's to write over."""
        try:
            status = self._path.lstat()
        except OSError:
            return True
        return not is_own_file(status) or status.st_size != PAGE_BYTES

    def _write(self) -> str:
        """Write over what is there: that takes no room, of which none may be."""
        return self._written(self._path)

    def _replace(self) -> str:
        """Make the file anew: its name never stands for half of it."""
        draft = self._path.with_name(f"{self._path.name}.new")
        remove_tree(draft)
        lack = self._written(draft, os.O_CREAT | os.O_EXCL)
        if lack:
            return lack
        try:
            if self._path.is_dir() and not self._path.is_symlink():
                remove_tree(self._path)
            draft.rename(self._path)
        except OSError as error:
            return self._told(error)
        return ""

    def _written(self, path: Path, flags: int = 0) -> str:
        try:
            fd = os.open(path, os.O_WRONLY | _FLAGS | flags, 0o600)
            try:
                if os.pwrite(fd, self.pack(), 0) != PAGE_BYTES:
                    raise OSError(0, "it was written in part")
            finally:
                os.close(fd)
        except OSError as error:
            return self._told(error)
        if self._failed:
            self._failed = ""
            log.info("%s can be written again", self._path)
        return ""

    def _told(self, error: OSError) -> str:
        """Say it once, and to whoever waits for the reset."""
        why = f"{self._path} cannot be written: {error.strerror}"
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
