"""The runtime directory: one daemon at a time, and no litter of a dead one.

The lock is an flock on ``kvd.lock``: the kernel drops it with the process, so
a SIGKILLed daemon never keeps its successor out.
"""

import contextlib
import fcntl
import os
from pathlib import Path

from kvd.errors import AlreadyRunning, ConfigError

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
        self.door_socket = self.path / "door.sock"
        self.http_socket = self.path / "http.sock"
        self.lock_file = self.path / "kvd.lock"
        self._lock_fd = -1

    def lock(self) -> None:
        """Take the directory, and clear away what a dead daemon left.

        Raises:
            AlreadyRunning: naming the pid of the daemon that holds it.
            ConfigError: the directory cannot be made or written.
        """
        try:
            self.path.mkdir(mode=0o750, parents=True, exist_ok=True)
            fd = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise ConfigError(
                f"runtime_dir = {self.path}: {error.strerror}; choose a directory that this user"
                " may write, with --runtime-dir"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise AlreadyRunning(
                f"a daemon with pid {pid} serves {self.path}; stop it, or choose another"
                " directory with --runtime-dir"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._lock_fd = fd
        self._clear()

    def release(self) -> None:
        """Remove what this daemon made and give the directory back."""
        self._clear()
        if self._lock_fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                self.lock_file.unlink()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _clear(self) -> None:
        stale = [self.broker_socket, self.door_socket, self.http_socket]
        stale += self.path.glob("lane-*.sock")
        for path in stale:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def __repr__(self) -> str:
        return f"<RuntimeDir {self.path} {'locked' if self._lock_fd >= 0 else 'free'}>"
