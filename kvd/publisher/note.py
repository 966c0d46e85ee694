"""The note that a publisher leaves: on which topics it has said something and not taken it back.

A publisher that is killed takes nothing back, and its subscribers go on believing. The next one
finds the note, and clears these topics for whoever subscribes. The note is locked while its
publisher lives, so that two of them never speak at the same time.
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger("kvd.publisher")
LOCK_SECONDS = 5.0  # longer than a publisher takes to end
_PAUSE = 0.02
_MAX_BYTES = 2**22


class Note:
    """The file; made where there is none.

    Attributes:
        left: topics on which the publisher before has said something and not taken it back.

    Raises:
        OSError: the file cannot be had.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self._lock()
        found = os.pread(self._fd, _MAX_BYTES, 0)
        self.left = [line for line in found.split(b"\n") if line]

    def _lock(self) -> None:
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    log.warning("the publisher before still runs; this one begins beside it")
                    return
                time.sleep(_PAUSE)
            else:
                return

    def write(self, topics: Iterable[bytes]) -> None:
        """Note these topics; a full filesystem costs the note, no more."""
        content = b"".join(topic + b"\n" for topic in topics)
        try:
            os.pwrite(self._fd, content, 0)
            os.ftruncate(self._fd, len(content))
        except OSError as error:
            log.warning("topics cannot be noted for the next publisher: %s", error)

    def __repr__(self) -> str:
        return f"<Note {self.left}>"
