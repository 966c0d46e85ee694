"""The runtime directory: one daemon at a time, without the sockets of a dead one.

The lock is an flock on ``kvd.lock``: the kernel drops it with the process, so
a SIGKILLed daemon never keeps its successor out. A daemon that ends removes the
file, so after locking it is checked whether the file is still the one at that path.
The file is written to, perhaps by root: no link is followed to it, and nothing but a
file that has this one name is taken.
"""

import contextlib
import errno
import fcntl
import logging
import os
import stat
from pathlib import Path

from kvd.errors import AlreadyRunning, ConfigError
from kvd.machine.trust import check_place

log = logging.getLogger("kvd.daemon")

# sockaddr_un holds 108 bytes with its final zero; the longest name is a lane's socket.
MAX_DIRECTORY_BYTES = 107 - len("/lane-host-9999999999.sock")


class RuntimeDir:
    """The paths in one runtime directory, and the lock on it.

    Raises:
        ConfigError: the path cannot be used, with the reason.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        if len(os.fsencode(self.path)) > MAX_DIRECTORY_BYTES:
            raise ConfigError(
                f"runtime_dir = {self.path}: {len(os.fsencode(self.path))} bytes, a socket's path"
                f" leaves room for {MAX_DIRECTORY_BYTES}; use a shorter one, such as /run/kvd"
            )
        self.broker_socket = self.path / "broker.sock"
        self.control_socket = self.path / "control.sock"
        self.http_socket = self.path / "http.sock"
        self.lock_file = self.path / "kvd.lock"
        self._lock_fd = -1

    def lock(self) -> None:
        """Take the directory, and clear away what a dead daemon left.

        Raises:
            AlreadyRunning: naming the pid of the daemon that holds it.
            ConfigError: the directory cannot be made or written, every user may write it, or
                what is there is no lock, or no socket, of a daemon's.
        """
        try:
            self.path.mkdir(mode=0o750, parents=True, exist_ok=True)
            fd = _locked(self.lock_file)
        except BlockingIOError:
            raise AlreadyRunning(
                f"a daemon with pid {self.holder()} serves {self.path}; stop it, or choose another"
                " directory with --runtime-dir"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"runtime_dir = {self.path}: {error.strerror}; choose a directory that this user"
                " may write, with --runtime-dir"
            ) from error
        self._own(fd)

    def holder(self) -> str:
        """Return the pid of the daemon that has the lock, as that daemon sees itself."""
        try:
            fd = _opened(self.lock_file, os.O_RDONLY)
        except (OSError, ConfigError):
            return "unknown"
        try:
            return os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
        finally:
            os.close(fd)

    def release(self) -> None:
        """Remove what this daemon made and give the directory back."""
        self._clear()
        if self._lock_fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                self.lock_file.unlink()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _own(self, fd: int) -> None:
        self._lock_fd = fd
        foreign = [path for path, mode in self._at_sockets() if not stat.S_ISSOCK(mode)]
        if foreign:
            self.release()
            raise ConfigError(
                f"{foreign[0]} is no socket, so no daemon made it: move it away, or choose another"
                " directory with --runtime-dir"
            )
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._clear()

    def _clear(self) -> None:
        for path, mode in self._at_sockets():
            if stat.S_ISSOCK(mode):
                path.unlink(missing_ok=True)

    def _at_sockets(self) -> list[tuple[Path, int]]:
        """Return what lies in the places of this directory's sockets, with its mode."""
        places = [self.broker_socket, self.control_socket, self.http_socket]
        places += self.path.glob("lane-*.sock")
        found = []
        for path in places:
            with contextlib.suppress(FileNotFoundError):  # a lane of a dead daemon removes its own
                found.append((path, path.lstat().st_mode))
        return found

    def __repr__(self) -> str:
        return f"<RuntimeDir {self.path} {'locked' if self._lock_fd >= 0 else 'free'}>"


def _locked(file: Path) -> int:
    """The file, made if need be, with a lock on what is at that path now.

    Raises:
        BlockingIOError: another daemon has the lock.
        ConfigError: what is there is no lock of a daemon's, or every user may write there.
        OSError: the file cannot be opened.
    """
    check_place("runtime_dir", file.parent)
    while True:
        fd = _opened(file, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), file.lstat()):
                return fd
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _opened(file: Path, flags: int) -> int:
    """The lock's file; no link to another one, and nothing that has other names, too.

    Raises:
        ConfigError: what is there is something else.
        OSError: it cannot be opened.
    """
    wrong = ConfigError(
        f"{file} is a link or no plain file, so no daemon made it: remove it, and see to it that"
        f" only the daemon's user may write {file.parent}"
    )
    try:
        fd = os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o640)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise wrong from None
        raise
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(fd)
        raise wrong
    return fd
