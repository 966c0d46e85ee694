"""The runtime directory: one daemon at a time, without the sockets of a dead one.

The lock is an flock on the directory: the kernel drops it when the process, and any child that it
was still starting, have ended or closed it. So a SIGKILLed daemon keeps its successor out for a
moment at most. ``kvd.lock`` tells people the pid; it is made anew, so no link that lies there is
followed.

The file rights of the directory come first for who may connect: a process that cannot open the
socket never gets to the settings `allow_users` and `allow_groups`. A list restricts them further.
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
        self.http_socket = self.path / "http.sock"
        self.lock_file = self.path / "kvd.lock"
        self.resets = self.path / "kvd.resets"  # stays, see kvd.server.state_files
        self._lock_fd = -1

    def lock(self) -> None:
        """Take the directory, and clear away what a dead daemon left.

        Raises:
            AlreadyRunning: naming the pid of the daemon that holds it.
            ConfigError: the directory cannot be made or written, every user may write it, or
                what is at a socket's place is none.
        """
        try:
            self.path.mkdir(mode=0o750, parents=True, exist_ok=True)
            check_directory("runtime_dir", self.path)
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, fd)
                lock_directory(fd)
                for path, is_socket in self._at_sockets():
                    if not is_socket:
                        raise ConfigError(
                            f"{path} is no socket, so no daemon made it: move it away, or choose"
                            " another directory with --runtime-dir"
                        )
                self._clear()
                self.lock_file.unlink(missing_ok=True)
                note = os.open(
                    self.lock_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640
                )
                os.write(note, f"{os.getpid()}\n".encode())
                os.close(note)
                undo.pop_all()
        except BlockingIOError:
            raise AlreadyRunning(
                f"a daemon with pid {self._holder()} serves {self.path}; stop it, or choose another"
                " directory with --runtime-dir"
            ) from None
        except PermissionError as error:
            why = explain_denied(self.path) or f"{error.filename}: {error.strerror}"
            raise ConfigError(
                f"runtime_dir = {self.path}: {why}; or choose a directory that this user may"
                " write, with --runtime-dir"
            ) from error
        except OSError as error:
            what = error.filename or "it cannot be locked"  # as on NFS
            raise ConfigError(
                f"runtime_dir = {self.path}: {what}: {error.strerror}; choose a local directory"
                " that this user may write, with --runtime-dir"
            ) from error
        self._lock_fd = fd

    def _holder(self) -> str:
        """The pid of the daemon that has the lock, as that daemon sees itself."""
        try:
            fd = os.open(self.lock_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(fd, "rb") as file:
                pid = file.read(32).strip()
        except OSError:
            pid = b""
        return pid.decode() if pid.isdigit() else "unknown"

    def release(self) -> None:
        """Remove what this daemon made and give the directory back."""
        if self._lock_fd >= 0:
            self._clear()
            self.lock_file.unlink(missing_ok=True)
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _clear(self) -> None:
        for path, is_socket in self._at_sockets():
            if is_socket:
                path.unlink(missing_ok=True)

    def _at_sockets(self) -> list[tuple[Path, bool]]:
        """Return what lies in the places of this directory's sockets, and whether it is one."""
        places = [self.broker_socket, self.http_socket]
        places += self.path.glob("lane-*.sock")
        found = []
        for path in places:
            with contextlib.suppress(FileNotFoundError):  # a lane of a dead daemon removes its own
                found.append((path, stat.S_ISSOCK(path.lstat().st_mode)))
        return found


class AllowList:
    """The users and groups that may connect; everybody where both settings are empty.

    The daemon's own user always may, and so may root, who can do anything.

    Args:
        users, groups: the settings; names are this machine's.

    Raises:
        ConfigError: a name that this machine does not know.
    """

    def __init__(self, users: str, groups: str) -> None:
        self.users = _ids("allow_users", users, lambda name: pwd.getpwnam(name).pw_uid)
        self.groups = _ids("allow_groups", groups, lambda name: grp.getgrnam(name).gr_gid)

    def objection(self, peer: Peer) -> str:
        """Return why the peer may not connect, for its operator; empty where it may."""
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


def _ids(key: str, text: str, find: Callable[[str], int]) -> frozenset[int]:
    ids = set()
    for item in parse_names(text):
        try:
            ids.add(int(item) if item.isdecimal() else find(item))
        except KeyError:
            raise ConfigError(
                f"{key} = {text!r}: {item!r} is not known on this machine; create it, or give its"
                " number"
            ) from None
    return frozenset(ids)
