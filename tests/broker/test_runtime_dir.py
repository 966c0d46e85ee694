"""The lock on a runtime directory: one daemon has it, and the next one waits for it."""

import os
import select
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.broker.keep import Keep
from kvd.broker.rehearsal import Place
from kvd.broker.runtime_dir import RuntimeDir, Turn
from kvd.errors import AlreadyRunning, ConfigError
from kvd.settings import Settings

PATIENCE = 60.0


@pytest.fixture
def held(runtime_dir: Path) -> RuntimeDir:
    """A directory that is locked."""
    runtime = RuntimeDir(runtime_dir)
    runtime.lock()
    return runtime


@pytest.mark.parametrize("to_another", [False, True], ids=["removed", "left"])
def test_who_waits_has_the_lock_of_the_file_that_is_there(
    held: RuntimeDir, *, to_another: bool
) -> None:
    """Whether the file is removed or stays: afterwards nobody else can lock the directory."""
    next_one = RuntimeDir(held.path)
    turn = Turn(next_one)
    assert not turn.wait(0.05)
    held.release(to_another=to_another)
    assert turn.wait(PATIENCE)
    next_one.lock_after(turn)
    assert next_one.holder() == str(os.getpid())
    with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()} serves"):
        RuntimeDir(held.path).lock()
    next_one.release()
    assert list(held.path.iterdir()) == []


def test_the_lock_is_there_at_once_where_it_is_free(runtime_dir: Path) -> None:
    """Nobody is waited for."""
    runtime_dir.mkdir()
    turn = Turn(RuntimeDir(runtime_dir))
    assert turn.wait(PATIENCE)
    assert turn.fd >= 0
    os.close(turn.fd)
    turn.close()


def test_of_many_that_wait_one_has_it(held: RuntimeDir) -> None:
    """The others go on waiting, each for the one before, until all have had their turn."""
    places = [RuntimeDir(held.path) for _ in range(4)]
    turns = {turn.done_fd: (turn, place) for place in places for turn in [Turn(place)]}
    poller = select.poll()
    for fd in turns:
        poller.register(fd, select.POLLIN)
    held.release()
    while turns:
        ((fd, _),) = poller.poll(PATIENCE * 1000)
        poller.unregister(fd)
        turn, place = turns.pop(fd)
        place.lock_after(turn)
        assert not poller.poll(0)
        place.release()


def _linked(lock: Path, other: Path) -> None:
    lock.symlink_to(other)


def _second_name(lock: Path, other: Path) -> None:
    lock.hardlink_to(other)


def _fifo(lock: Path, _other: Path) -> None:
    os.mkfifo(lock)


def _folder(lock: Path, _other: Path) -> None:
    lock.mkdir()


@pytest.mark.parametrize("plant", [_linked, _second_name, _fifo, _folder])
def test_a_lock_that_leads_elsewhere_is_refused_and_nothing_is_written(
    runtime_dir: Path, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    """A link, another file's second name, a pipe or a directory: one sentence with the remedy."""
    other = tmp_path / "other"
    other.write_text("what another program keeps")
    runtime_dir.mkdir(mode=0o750)
    plant(runtime_dir / "kvd.lock", other)
    runtime = RuntimeDir(runtime_dir)
    with pytest.raises(ConfigError, match=r"kvd\.lock is a link or no plain file.*: remove it"):
        runtime.lock()
    assert runtime.holder() == "unknown"
    assert not Turn(runtime).wait(0.05)
    assert other.read_text() == "what another program keeps"


def test_a_link_to_nothing_makes_no_file(runtime_dir: Path, tmp_path: Path) -> None:
    """Where the link leads there is no file afterwards."""
    runtime_dir.mkdir(mode=0o750)
    (runtime_dir / "kvd.lock").symlink_to(tmp_path / "new")
    with pytest.raises(ConfigError, match="is a link"):
        RuntimeDir(runtime_dir).lock()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("mode", [0o777, 0o2777, 0o707])
def test_a_directory_that_every_user_may_write_is_refused(runtime_dir: Path, mode: int) -> None:
    """As runtime_dir and as pool_dir, also by whoever takes over: with the mode and the remedy."""
    runtime_dir.mkdir()
    runtime_dir.chmod(mode)
    remedy = rf"{mode:04o} lets every user .* chmod o-w {runtime_dir}, or chmod \+t"
    with pytest.raises(ConfigError, match=f"runtime_dir = .*{remedy}"):
        RuntimeDir(runtime_dir).lock()
    with pytest.raises(ConfigError, match=f"pool_dir = .*{remedy}"):
        Keep(runtime_dir, Path("/run/some"), keeps=True)
    with pytest.raises(ConfigError, match=f"pool_dir = .*{remedy}"):
        Place.of(Settings(pool_dir=str(runtime_dir)), Path("/run/some"))
    assert list(runtime_dir.iterdir()) == []


@pytest.mark.parametrize("mode", [0o750, 0o1777, 0o770])
def test_a_directory_whose_files_others_cannot_replace_is_taken(
    runtime_dir: Path, mode: int
) -> None:
    """Such as /tmp with its sticky bit, or one that the daemon's group may write."""
    runtime_dir.mkdir()
    runtime_dir.chmod(mode)
    runtime = RuntimeDir(runtime_dir)
    runtime.lock()
    runtime.release()
    Keep(runtime_dir, Path("/run/some"), keeps=False).close()


def folder(place: Path) -> None:
    """A directory."""
    place.mkdir()


def file(place: Path) -> None:
    """A file that somebody may want."""
    place.write_text("precious")


def link(place: Path) -> None:
    """A link to a file."""
    file(place.with_name("elsewhere"))
    place.symlink_to("elsewhere")


@pytest.mark.parametrize("name", ["broker.sock", "door.sock", "http.sock", "lane-host-3.sock"])
@pytest.mark.parametrize("put", [folder, file, link])
def test_what_is_no_socket_is_left_and_named(
    runtime_dir: Path, name: str, put: Callable[[Path], None]
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


def test_sockets_of_a_dead_daemon_are_cleared_away(runtime_dir: Path) -> None:
    """Nothing of them is in the way of the next one."""
    runtime_dir.mkdir()
    for name in ("broker.sock", "door.sock", "lane-host-3.sock"):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(runtime_dir / name))
    runtime = RuntimeDir(runtime_dir)
    runtime.lock()
    assert [place.name for place in runtime_dir.iterdir()] == ["kvd.lock"]
    runtime.release()
