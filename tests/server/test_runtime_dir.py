"""What a daemon finds in its runtime directory: locks, resets, and whom it lets in."""

import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.cache.recovery import RESET_BYTES
from kvd.client_names import Peer
from kvd.errors import AlreadyRunning, ConfigError
from kvd.machine import process
from kvd.server.persistent_pool import PersistentPool
from kvd.server.reset_file import ResetFile
from kvd.server.runtime_dir import AllowList, RuntimeDir
from kvd.wire.clients import peer_of
from tests.daemon.users import needs_root
from tests.descriptors import open_files
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
    (lock,) = (fd for fd, path in open_files().items() if path == str(runtime_dir))
    os.close(lock)  # as the kernel does; no public way lets go without a farewell
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

    def refuse(*_: object) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr("fcntl.flock", refuse)
    remedy = "cannot be locked: Bad file descriptor; choose a local directory .*--runtime-dir"
    with pytest.raises(ConfigError, match=f"runtime_dir = {runtime_dir}: it {remedy}"):
        RuntimeDir(runtime_dir).lock()


@pytest.mark.parametrize(
    "plant",
    [
        Path.symlink_to,
        lambda lock, other: lock.symlink_to(other.parent / "new"),
        Path.hardlink_to,
        lambda lock, _: os.mkfifo(lock),
        lambda lock, _: lock.mkdir(),
    ],
    ids=["link", "link to nothing", "second name", "pipe", "folder"],
)
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


@pytest.mark.parametrize(
    ("name", "put"),
    [
        ("http.sock", Path.mkdir),
        ("lane-host-3.sock", lambda place: place.write_text("precious")),
        ("lane-host-3.sock", lambda place: place.symlink_to("elsewhere")),
    ],
    ids=["folder", "file", "link"],
)
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


ONE, TWO = "01" * 16, "02" * 16


def salts(table: ResetFile) -> list[bytes]:
    """Of both namespaces, and of those that were not reset."""
    return [table.salt_of(ONE), table.salt_of(TWO), table.base]


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Make something else in its place."""

    def replace(path: Path) -> None:
        path.rename(path.with_name("b"))
        make(path)

    return replace


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: os.truncate(path, 0),
    "cut off": lambda path: os.truncate(path, 100),
    "longer": lambda path: os.truncate(path, RESET_BYTES + 1),
    "zeros": lambda path: path.write_bytes(bytes(RESET_BYTES)),
    "other bytes": lambda path: path.write_bytes(b"x" * RESET_BYTES),
    "another user's": lambda path: os.chown(path, 65534, 65534),
    "directory": replace_by(lambda path: (path / "a").mkdir(parents=True)),
    "pipe": replace_by(os.mkfifo),
    "link": replace_by(lambda path: path.symlink_to("b")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_an_invalid_reset_file_costs_misses(
    tmp_path: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    """All that was kept is of before; that is said once, and holds for the next daemon, too."""
    if os.geteuid():
        pytest.skip("only root can make a file another user's")
    path = tmp_path / "kvd.resets"
    file = ResetFile(path)
    file.draw(ONE)
    assert path.stat().st_mode & 0o777 == 0o600
    damage(path)
    caplog.set_level(logging.ERROR)
    second = ResetFile(path)
    assert second.salt_of(ONE) == second.salt_of(TWO) == second.base
    assert second.base not in {b"", file.salt_of(ONE)}
    assert "is not valid" in caplog.text
    caplog.clear()
    third = ResetFile(path)
    assert (third.base, caplog.text) == (second.base, "")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from([ONE, TWO, "03" * 16]), min_size=1, max_size=8),
    st.integers(0, RESET_BYTES),
)
def test_no_write_that_is_cut_short_forgets_a_reset(
    tmp_path: Path, names: list[str], cut: int
) -> None:
    """At any byte: the next daemon uses nothing that is older than what was answered."""
    path = tmp_path / "kvd.resets"
    path.unlink(missing_ok=True)
    file, dropped = ResetFile(path), dict[str, set[bytes]]()
    for name in names[:-1]:
        dropped.setdefault(name, {b""}).add(file.salt_of(name))
        file.draw(name)
    before = path.read_bytes() if dropped else b""
    file.draw(names[-1])
    after = path.read_bytes()
    for at in {cut, cut // 64} if before else ():
        path.write_bytes(after[:at] + before[at:])
        following = ResetFile(path)
        assert all(following.salt_of(name) not in salts for name, salts in dropped.items())


def test_a_file_that_cannot_be_written_is_told_to_who_resets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each reset is told, the log says it once; what was noted meanwhile is written later.

    So is what was in a file that is spoilt while the daemon runs.
    """

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = tmp_path / "kvd.resets"
    file = ResetFile(path)
    caplog.set_level(logging.INFO)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails)
        (lack,) = {file.draw(ONE), file.draw(TWO)}
    assert lack.startswith(f"{path} cannot be written: Input/output error; ")
    assert caplog.text.count("cannot be written") == 1
    assert file.draw(TWO) == ""
    assert "can be written again" in caplog.text
    for change in (Path.unlink, *(DAMAGE[name] for name in ("other bytes", "directory", "pipe"))):
        assert salts(ResetFile(path)) == salts(file)
        change(path)
        assert file.draw(TWO) == ""
    assert salts(ResetFile(path)) == salts(file)


def test_a_list_lets_in_its_users_groups_root_and_the_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A user or any group suffices, by name or number; ids of users are not those of groups."""
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    allowed = AllowList("1001, root", "50")
    for peer in (Peer(1, 1001, 1), Peer(1, 1, 50), Peer(1, 1, 1, (7, 50)), Peer(1, 7, 1)):
        assert allowed.objection(peer) == ""
    assert AllowList("", "root").objection(Peer(1, 1002, 0)) == ""
    for groups in ((), (7, 1001)):
        objection = allowed.objection(Peer(1, 1002, 1, groups))
        assert "1002" in objection
        assert "allow_users" in objection
    with pytest.raises(ConfigError, match=r"allow_groups: this machine has no group 'no-such-"):
        AllowList("", "no-such-group")


@needs_root
@pytest.mark.parametrize(("count", "known"), [(3, 3), (256, 256), (257, 0)])
def test_a_process_of_many_groups_is_known_by_them_or_by_none(count: int, known: int) -> None:
    """The kernel tells 256 of them in one answer; more are no reason to end anything."""
    before = os.getgroups()
    os.setgroups(range(100, 100 + count))
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    os.setgroups(before)
    with ours, theirs:
        assert len(peer_of(ours).groups) == known
