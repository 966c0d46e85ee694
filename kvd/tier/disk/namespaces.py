"""The table of namespaces: their numbers in records, and which epoch counts.

A small file, written anew as a whole and renamed, durable before a new epoch counts: what a reset
has dropped is not found again, whatever happens. A namespace stays in it while it has no chunks,
since its epoch counts for other tiers, too; of those the ones longest unused go.
"""

import contextlib
import json
import logging
import os
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from zlib import crc32

from kvd.errors import TierError

NAME = "namespaces"
MOST = 1024
MOST_BYTES = 2 * 72 * 1024
"""Of `MOST` namespaces: the file, and the new one beside it while it is written."""
_VERSION = 1
_MOST_NUMBERS = 2**16 - 1  # a record has two bytes for it
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Known:
    """A namespace: its number in records, and its epoch."""

    number: int
    epoch: int


class Namespaces:
    """The table, as it is in the file.

    Raises:
        OSError: of the medium.
    """

    def __init__(self, folder: int) -> None:
        self._folder = folder
        self._known: dict[bytes, Known] = {}  # longest unused first
        self._last = 0  # a number is not used twice while records of it may be in the files
        try:
            fd = os.open(NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
        except FileNotFoundError:
            return
        try:
            text = os.read(fd, MOST * 256)
        finally:
            os.close(fd)
        try:
            self._known = _parse(text)
            self._last = max((known.number for known in self._known.values()), default=0)
        except (ValueError, KeyError, TypeError) as error:
            os.rename(NAME, f"{NAME}.damaged", src_dir_fd=folder, dst_dir_fd=folder)
            _log.error(
                "disk: the table of namespaces is damaged (%s): it was renamed to %s.damaged, and"
                " the chunks on this disk are lost",
                error,
                NAME,
            )

    def find(self, namespace: bytes) -> Known | None:
        """Return what is known of a namespace."""
        return self._known.get(namespace)

    def by_number(self) -> dict[int, tuple[bytes, int]]:
        """Id and epoch of each number."""
        return {known.number: (name, known.epoch) for name, known in self._known.items()}

    def begin(self, namespace: bytes, epoch: int, in_use: AbstractSet[int]) -> Known:
        """Note that a namespace is used, durably where that is new; epoch 0: the last one goes on.

        `in_use` are the numbers that have chunks.

        Raises:
            OSError: of the medium; nothing has changed.
            TierError: there are too many namespaces.
        """
        found = self._known.get(namespace)
        if found is not None and epoch in (0, found.epoch):
            self._known[namespace] = self._known.pop(namespace)
            return found
        table = {name: known for name, known in self._known.items() if name != namespace}
        if len(table) >= MOST:
            name = next((n for n, known in table.items() if known.number not in in_use), None)
            if name is None:
                raise TierError(
                    f"{MOST} namespaces have chunks on this disk, and it can have no more; give"
                    " another directory"
                )
            del table[name]
        if found is None and self._last == _MOST_NUMBERS:
            raise TierError("too many namespaces since the start; restart the daemon")
        known = table[namespace] = Known(found.number if found else self._last + 1, epoch)
        self._write(table)
        self._last = max(self._last, known.number)
        self._known = table
        return known

    def _write(self, table: dict[bytes, Known]) -> None:
        body = json.dumps(
            {name.hex(): [known.number, known.epoch] for name, known in table.items()}
        )
        text = json.dumps({"version": _VERSION, "check": crc32(body.encode()), "spaces": body})
        new = f"{NAME}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(new, flags, 0o600, dir_fd=self._folder)
        try:
            os.write(fd, text.encode())
            os.fsync(fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=self._folder)
            raise
        finally:
            os.close(fd)
        os.rename(new, NAME, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.fsync(self._folder)


def _parse(text: bytes) -> dict[bytes, Known]:
    read = json.loads(text)
    if read["version"] != _VERSION:
        raise ValueError(f"version {read['version']}, this kvd reads {_VERSION}")
    if crc32(read["spaces"].encode()) != read["check"]:
        raise ValueError("its check word does not fit")
    return {
        bytes.fromhex(name): Known(number, epoch)
        for name, (number, epoch) in json.loads(read["spaces"]).items()
    }
