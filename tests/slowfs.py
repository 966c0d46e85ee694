"""A file system whose owner answers when it likes: FUSE, spoken by hand.

It serves one file and notes which process asks for what. Its own process is answered at once;
anybody else's questions about the file are never answered, until the mount is given up.
"""

import contextlib
import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

_IN = struct.Struct("<IIQQIIIHH")  # linux/fuse.h: fuse_in_header
_OUT = struct.Struct("<IiQ")  # fuse_out_header
_LOOKUP, _FORGET, _GETATTR, _OPEN, _RELEASE, _FLUSH, _INIT = 1, 2, 3, 14, 18, 25, 26
_INTERRUPT, _BATCH_FORGET = 36, 42
_ENOSYS = 38
_ROOT, _FILE = 1, 2
_MNT_FORCE, _MNT_DETACH = 1, 2
SIZE = 1 << 20


def _attributes(node: int) -> bytes:
    mode, size = (0o40755, 4096) if node == _ROOT else (0o100666, SIZE)
    return struct.pack("<6Q10I", node, size, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


class SlowFilesystem:
    """The file system, mounted while it lives; `asked` are the threads that asked for its file."""

    def __init__(self, folder: Path, fuse: int) -> None:
        self.file = folder / "file"
        self._folder = folder
        self.asked: set[int] = set()
        self._fuse = fuse
        self._quick = {os.getpid()}
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def waiting(self, pid: int) -> int:
        """How many threads of a process wait for an answer."""
        threads = {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()}
        return len(threads & self.asked)

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._fuse, 1 << 18)
            except OSError:  # given up
                return
            _, kind, unique, node, _, _, pid, _, _ = _IN.unpack_from(request)
            if node == _FILE and kind in (_GETATTR, _FLUSH, _RELEASE):
                self.asked.add(pid)
            if kind in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                continue
            if node == _FILE and kind in (_GETATTR, _FLUSH) and pid not in self._quick:
                continue  # for ever
            error, body = self._answer(kind, node)
            with contextlib.suppress(OSError):  # who asked has ended, or all is given up
                os.write(self._fuse, _OUT.pack(_OUT.size + len(body), -error, unique) + body)

    def give_up(self) -> None:
        """Unmount it, which frees all that wait. May be called again."""
        ctypes.CDLL(None).umount2(os.fsencode(self._folder), _MNT_FORCE | _MNT_DETACH)
        self._thread.join(PATIENCE)  # or it would read what gets its descriptor's number next

    def _answer(self, kind: int, node: int) -> tuple[int, bytes]:
        if kind == _INIT:
            return 0, struct.pack("<4I2HII2H8I", 7, 31, 0, 0, 8, 6, 4096, 1, 1, 0, *[0] * 8)
        if kind == _LOOKUP:
            return 0, struct.pack("<4Q2I", _FILE, 1, 0, 0, 0, 0) + _attributes(_FILE)
        if kind == _GETATTR:
            return 0, struct.pack("<Q2I", 0, 0, 0) + _attributes(node)
        if kind == _OPEN:
            return 0, struct.pack("<Q2I", 1, 0, 0)
        if kind in (_FLUSH, _RELEASE):
            return 0, b""
        return _ENOSYS, b""


@contextmanager
def slow_filesystem(folder: Path) -> Iterator[SlowFilesystem]:
    """Mounted on a new folder; given up at the end, which frees whoever waits for it."""
    try:
        fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"no FUSE here: /dev/fuse: {error.strerror}")
    folder.mkdir()
    options = f"fd={fuse},rootmode=40000,user_id={os.geteuid()},group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"slow", os.fsencode(folder), b"fuse", 0, options.encode()):
        os.close(fuse)
        pytest.skip(f"no FUSE can be mounted here: {os.strerror(ctypes.get_errno())}")
    slow = SlowFilesystem(folder, fuse)
    try:
        yield slow
    finally:
        slow.give_up()
        os.close(fuse)
