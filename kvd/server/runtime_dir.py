"""The runtime directory: its lock, its sockets, and the users that may connect.

The lock is an flock on the directory. The kernel releases it when the process, and any child that
it was just starting, has exited or closed it, so a SIGKILLed daemon blocks its successor for a
moment at most. ``kvd.lock`` shows the pid to people; it is created anew, so no link is followed.

A process needs file permissions to open the socket. The settings `allow_users` and `allow_groups`
restrict the processes that have them.
"""

import contextlib
import os
import stat
from pathlib import Path

from kvd.client_names import Peer
from kvd.config.values import group_ids, user_ids
from kvd.errors import AlreadyRunning, ConfigError
from kvd.machine.directories import check_runtime_dir, socket_files
from kvd.machine.process import lock_directory

RESETS_FILE = "kvd.resets"


class RuntimeDir:
    """The paths in one runtime directory, and the lock on it."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.broker_socket = self.path / "broker.sock"
        self.http_socket = self.path / "http.sock"
        self.pid_file = self.path / "kvd.lock"  # shows the pid; the lock is on the directory
        self.resets = self.path / RESETS_FILE  # outlives the daemon, see kvd.server.reset_file
        self._lock_fd = -1

    def lock(self) -> None:
        """Lock the directory, and remove the sockets of a dead daemon.

        Raises:
            AlreadyRunning: another daemon has the lock; names its pid.
            ConfigError: see `check_runtime_dir`; or the directory cannot be locked.
        """
        check_runtime_dir(self.path)
        try:
            self.path.mkdir(mode=0o750, parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, fd)
                lock_directory(fd)
                self._remove_sockets()
                self.pid_file.unlink(missing_ok=True)
                pid_file_fd = os.open(
                    self.pid_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640
                )
                os.write(pid_file_fd, f"{os.getpid()}\n".encode())
                os.close(pid_file_fd)
                undo.pop_all()
        except BlockingIOError:
            raise AlreadyRunning(
                f"a daemon with pid {self._lock_holder_pid()} serves {self.path}",
                "stop it, or choose another directory with --runtime-dir",
            ) from None
        except OSError as error:
            subject = error.filename or "it cannot be locked"  # as on NFS
            raise ConfigError(
                f"runtime_dir = {self.path}: {subject}: {error.strerror}",
                "choose a local directory that this user may write, with --runtime-dir",
            ) from error
        self._lock_fd = fd

    def _lock_holder_pid(self) -> str:
        """Return the pid in ``kvd.lock``, in that daemon's own pid namespace, or `unknown`."""
        try:
            fd = os.open(self.pid_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(fd, "rb") as file:
                pid = file.read(32).strip()
        except OSError:
            pid = b""
        return pid.decode() if pid.isdigit() else "unknown"

    def release(self) -> None:
        """Remove this daemon's sockets and lock file, and unlock the directory."""
        if self._lock_fd >= 0:
            self._remove_sockets()
            self.pid_file.unlink(missing_ok=True)
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _remove_sockets(self) -> None:
        for path in socket_files(self.path):
            # A lane of a dead daemon may remove it meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(path.lstat().st_mode):
                    path.unlink()


class AllowList:
    """The users and groups that may connect; all if both settings are empty.

    Root and the daemon's own user always may.

    Args:
        users, groups: the settings `allow_users` and `allow_groups`.

    Raises:
        ConfigError: this machine has no user or group of a given name.
    """

    def __init__(self, users: str, groups: str) -> None:
        self.users = user_ids(users)
        self.groups = group_ids(groups)

    def objection(self, peer: Peer) -> str:
        """Return why the peer may not connect, for its operator; empty if it may."""
        if not self.users and not self.groups:
            return ""
        if peer.uid in {0, os.geteuid(), *self.users}:
            return ""
        if not self.groups.isdisjoint((peer.gid, *peer.groups)):
            return ""
        return (
            f"uid {peer.uid}, gid {peer.gid} may not use this daemon: its settings allow_users and"
            " allow_groups name others"
        )
