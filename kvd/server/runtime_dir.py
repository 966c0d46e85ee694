"""The runtime directory: its lock, its sockets, and the users that may connect.

The lock is an flock on the directory. The kernel releases it when the process, and any child that
it was just starting, has exited or closed it, so a SIGKILLed daemon blocks its successor for a
moment at most. ``kvd.lock`` shows the pid to people; it is created anew, so no link is followed.

A process needs file permissions to open the socket. The settings `allow_users` and `allow_groups`
restrict the processes that have them.
"""

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Callable
from pathlib import Path

from kvd.client_names import Peer
from kvd.config.values import parse_names
from kvd.errors import AlreadyRunning, ConfigError
from kvd.machine.process import MAX_DIRECTORY_BYTES, check_directory, lock_directory
from kvd_proto.text import explain_denied


class RuntimeDir:
    """The paths in one runtime directory, and the lock on it.

    Raises:
        ConfigError: the path is too long for a socket.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        if len(os.fsencode(self.path)) > MAX_DIRECTORY_BYTES:
            raise ConfigError(
                f"runtime_dir = {self.path}: {len(os.fsencode(self.path))} bytes, a socket's path"
                f" leaves {MAX_DIRECTORY_BYTES} for it; use a shorter one, such as /run/kvd"
            )
        self.broker_socket = self.path / "broker.sock"
        self.http_socket = self.path / "http.sock"
        self.pid_file = self.path / "kvd.lock"  # shows the pid; the lock is on the directory
        self.resets = self.path / "kvd.resets"  # outlives the daemon, see kvd.server.state_files
        self._lock_fd = -1

    def lock(self) -> None:
        """Lock the directory, and remove the sockets of a dead daemon.

        Raises:
            AlreadyRunning: another daemon has the lock; names its pid.
            ConfigError: the directory cannot be created or written, every user may write it, or a
                socket's path is another kind of file.
        """
        try:
            self.path.mkdir(mode=0o750, parents=True, exist_ok=True)
            check_directory("runtime_dir", self.path)
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, fd)
                lock_directory(fd)
                for path, is_socket in self._socket_paths():
                    if not is_socket:
                        raise ConfigError(
                            f"{path} is no socket, so no daemon created it: move it away, or choose"
                            " another directory with --runtime-dir"
                        )
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
                f"a daemon with pid {self._lock_holder_pid()} serves {self.path}; stop it, or"
                " choose another directory with --runtime-dir"
            ) from None
        except PermissionError as error:
            reason = explain_denied(self.path) or f"{error.filename}: {error.strerror}"
            raise ConfigError(
                f"runtime_dir = {self.path}: {reason}; or choose a directory that this user may"
                " write, with --runtime-dir"
            ) from error
        except OSError as error:
            subject = error.filename or "it cannot be locked"  # as on NFS
            raise ConfigError(
                f"runtime_dir = {self.path}: {subject}: {error.strerror}; choose a local directory"
                " that this user may write, with --runtime-dir"
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
        for path, is_socket in self._socket_paths():
            if is_socket:
                path.unlink(missing_ok=True)

    def _socket_paths(self) -> list[tuple[Path, bool]]:
        """Return the existing paths of sockets, and whether each is a socket."""
        paths = [self.broker_socket, self.http_socket]
        paths += self.path.glob("lane-*.sock")
        entries = []
        for path in paths:
            # A lane of a dead daemon may remove it meanwhile.
            with contextlib.suppress(FileNotFoundError):
                entries.append((path, stat.S_ISSOCK(path.lstat().st_mode)))
        return entries


class AllowList:
    """The users and groups that may connect; all if both settings are empty.

    Root and the daemon's own user always may.

    Args:
        users, groups: the settings `allow_users` and `allow_groups`.

    Raises:
        ConfigError: this machine has no user or group of a given name.
    """

    def __init__(self, users: str, groups: str) -> None:
        self.users = _parse_ids("allow_users", users, lambda name: pwd.getpwnam(name).pw_uid)
        self.groups = _parse_ids("allow_groups", groups, lambda name: grp.getgrnam(name).gr_gid)

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


def _parse_ids(setting: str, names: str, id_of: Callable[[str], int]) -> frozenset[int]:
    """Return the numeric ids of user or group names; numbers pass unchecked.

    Args:
        setting: its name, for the error.
        names: its value, separated by commas.
        id_of: returns the id of a name; KeyError: unknown.

    Raises:
        ConfigError: a name is unknown.
    """
    ids = set()
    for name in parse_names(names):
        try:
            ids.add(int(name) if name.isdecimal() else id_of(name))
        except KeyError:
            raise ConfigError(
                f"{setting} = {names!r}: this machine has no such user or group as {name!r}; create"
                " it, or give its number"
            ) from None
    return frozenset(ids)
