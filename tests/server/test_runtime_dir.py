"""The lock on a runtime directory, and the directories that a daemon accepts."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.errors import AlreadyRunning, ConfigError
from kvd.machine import process
from kvd.server.persistent_pool import PersistentPool
from kvd.server.runtime_dir import RuntimeDir
from tests.waiting import PATIENCE


def test_of_two_daemons_the_second_one_reads_who_holds_the_directory(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the pid; after a release the directory is empty, and can be locked again."""
    monkeypatch.setattr(process, "LOCK_SECONDS", 0.0)
    first, second = RuntimeDir(runtime_dir), RuntimeDir(runtime_dir)
    first.lock()
    with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()} serves"):
        second.lock()
    first.release()
    assert list(runtime_dir.iterdir()) == []
    second.lock()
    second.release()


def test_a_child_that_begins_as_its_daemon_dies_keeps_no_successor_out(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the lock until it runs its own program, and is waited for."""
    dead = RuntimeDir(runtime_dir)
    dead.lock()
    child = os.fork()
    if child == 0:  # has all descriptors, as before an exec
        time.sleep(0.2)
        os._exit(0)
    os.close(dead._lock_fd)  # as the kernel does; no public way lets go without a farewell
    monkeypatch.setattr(process, "LOCK_SECONDS", PATIENCE)
    successor = RuntimeDir(runtime_dir)
    try:
        successor.lock()
    finally:
        os.waitpid(child, 0)
    successor.release()


def test_a_file_system_that_locks_no_directory_is_named(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS, which answers that the descriptor is bad: the error has the path and the remedy."""

    def refuse(fd: int, how: int) -> None:
        del fd, how
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr("fcntl.flock", refuse)
    remedy = "cannot be locked: Bad file descriptor; choose a local directory .*--runtime-dir"
    with pytest.raises(ConfigError, match=f"runtime_dir = {runtime_dir}: it {remedy}"):
        RuntimeDir(runtime_dir).lock()


PLANTS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda lock, other: lock.symlink_to(other),
    "link to nothing": lambda lock, other: lock.symlink_to(other.parent / "new"),
    "second name": lambda lock, other: lock.hardlink_to(other),
    "pipe": lambda lock, _: os.mkfifo(lock),
    "folder": lambda lock, _: lock.mkdir(),
}


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_where_a_lock_leads_elsewhere_nothing_is_written(
    runtime_dir: Path, tmp_path: Path, plant: Callable[[Path, Path], object]
) -> None:
    """A link, another file's second name or a pipe is replaced; a folder is refused."""
    other = tmp_path / "other"
    other.write_text("what another program keeps")
    runtime_dir.mkdir(mode=0o750)
    lock = runtime_dir / "kvd.lock"
    plant(lock, other)
    runtime = RuntimeDir(runtime_dir)
    if lock.is_dir():
        with pytest.raises(ConfigError, match=f"{lock}: Is a directory"):
            runtime.lock()
    else:
        runtime.lock()
        assert lock.read_text() == f"{os.getpid()}\n"
        runtime.release()
    assert [file.read_text() for file in tmp_path.iterdir()] == ["what another program keeps"]


@pytest.mark.parametrize("mode", [0o777, 0o2777, 0o707])
def test_a_directory_that_every_user_may_write_is_refused(runtime_dir: Path, mode: int) -> None:
    """As runtime_dir and as pool_dir: with the mode and the remedy."""
    runtime_dir.mkdir()
    runtime_dir.chmod(mode)
    remedy = rf"{mode:04o} lets every user .* chmod o-w {runtime_dir}, or chmod \+t"
    with pytest.raises(ConfigError, match=f"runtime_dir = .*{remedy}"):
        RuntimeDir(runtime_dir).lock()
    with pytest.raises(ConfigError, match=f"pool_dir = .*{remedy}"):
        PersistentPool(runtime_dir, Path("/run/some"), persistent=True)
    assert list(runtime_dir.iterdir()) == []


PUT: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "file": lambda place: place.write_text("precious"),
    "link": lambda place: place.symlink_to("elsewhere"),
}


@pytest.mark.parametrize("name", ["http.sock", "lane-host-3.sock"])
@pytest.mark.parametrize("put", PUT.values(), ids=PUT)
def test_what_is_no_socket_is_left_and_named(
    runtime_dir: Path, name: str, put: Callable[[Path], object]
) -> None:
    """A daemon does not start over it, removes nothing, and holds no lock afterwards."""
    runtime_dir.mkdir()
    put(runtime_dir / name)
    before = {place: place.lstat() for place in runtime_dir.iterdir()}
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"{name} is no socket.*--runtime-dir"):
            RuntimeDir(runtime_dir).lock()
        assert {place: place.lstat() for place in runtime_dir.iterdir()} == before
    RuntimeDir(runtime_dir).release()
    assert {place: place.lstat() for place in runtime_dir.iterdir()} == before
