"""Unused pools in one process: locks, directories, steps of an adoption, tables of resets."""

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvd.cache.namespaces import Namespaces
from kvd.cache.recovery import MAX_RESETS, ResetTable
from kvd.errors import PoolError
from kvd.machine import process
from kvd.machine.memory import pool_directory_name
from kvd.machine.pools import PoolClaim, remove_unused_pools, unused_pools
from kvd.server.persistent_pool import PersistentPool
from kvd.server.reset_file import ResetFile
from kvd.server.state_files import PoolFiles
from tests.cache.tables import PAGE, add, make_namespaces, store
from tests.descriptors import open_files
from tests.server.hugetlbfs import hugetlbfs_double
from tests.waiting import PATIENCE, eventually

SIZE = 512 * PAGE
KEYS = [b"1", b"2", b"3"]
NAMESPACE = "00" * 16  # which `add` opens


@contextmanager
def daemon(
    pool_dir: Path, runtime_dir: Path, *, adopts: bool = False
) -> Iterator[tuple[PersistentPool, Namespaces]]:
    """A daemon's pool and namespaces, without processes; the pool is kept at the end."""
    runtime_dir.mkdir(exist_ok=True)
    resets = ResetFile(runtime_dir / "kvd.resets")
    keep = PersistentPool(pool_dir, runtime_dir, persistent=True, resets=resets, access="a")
    with ExitStack() as end:
        end.callback(keep.close)
        if adopts:
            keep.adopt(SIZE)
        pool, namespaces = keep.open(
            SIZE,
            lambda setup, fill: make_namespaces(SIZE, ledger_setup=setup, fill=fill, resets=resets),
        )
        end.callback(pool.close)
        pool.start(lambda: None)
        eventually(lambda: pool.ready and pool.may_be_used)
        keep.commit()
        yield keep, namespaces


def leave(pool_dir: Path, runtime_dir: Path) -> None:
    """Have a daemon leave a pool with chunks."""
    with daemon(pool_dir, runtime_dir) as (_, namespaces):
        store(add(namespaces, 0, PAGE).table, KEYS)


def num_chunks(namespaces: Namespaces) -> int:
    """READY chunks of all namespaces."""
    return sum(len(namespace.directory.ledger or ()) for namespace in namespaces)


@pytest.fixture(params=["tmpfs", "hugetlbfs"])
def pool_dir(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A directory of pools, of both kinds."""
    if request.param == "hugetlbfs":
        return hugetlbfs_double(tmp_path, monkeypatch)[0]
    path = tmp_path / "pools"
    path.mkdir()
    return path


def remove(claim: PoolClaim, tmp_path: Path) -> PoolFiles | None:
    """Remove the pool."""
    del tmp_path
    claim.remove()
    return None


def move(claim: PoolClaim, tmp_path: Path) -> PoolFiles | None:
    """Adopt the pool for another runtime directory, which keeps it locked."""
    files = PoolFiles(claim.pool.directory.parent, tmp_path / "other")
    files.adopt(claim)
    return files


@pytest.mark.parametrize("take", [remove, move])
def test_a_daemon_that_waits_for_a_pool_that_goes_makes_one_of_its_own(
    pool_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    take: Callable[[PoolClaim, Path], PoolFiles | None],
) -> None:
    """It has opened the directory, and gets its lock when the directory is removed or moved."""
    monkeypatch.setattr(process, "LOCK_SECONDS", PATIENCE)
    runtime_dir = tmp_path / "run"
    leave(pool_dir, runtime_dir)
    directory = pool_dir / pool_directory_name(runtime_dir)
    with ThreadPoolExecutor(1) as executor:
        with PoolClaim(directory) as claim:
            starting = executor.submit(PersistentPool, pool_dir, runtime_dir, persistent=True)
            eventually(lambda: list(open_files().values()).count(str(directory)) == 2)
            taken = take(claim, tmp_path)
        keep = starting.result(PATIENCE)
    assert directory.is_dir()
    with pytest.raises(PoolError, match="it is in use"):
        PoolClaim(directory)
    keep.close()
    if taken is not None:
        taken.close()


def test_an_adopted_pool_has_its_chunks_and_is_moved_with_all_files(
    pool_dir: Path, tmp_path: Path
) -> None:
    """The listing names the pool's runtime directory before, and the adopter's afterwards."""
    old, new = tmp_path / "old", tmp_path / "new"
    leave(pool_dir, old)
    (unused,) = unused_pools(pool_dir, new)
    assert unused.runtime_dir == old
    resets = ResetFile(tmp_path / "kvd.resets")
    keep = PersistentPool(pool_dir, tmp_path / "mid", persistent=True, resets=resets, access="a")
    keep.adopt(None)  # as with `auto` before the first engine
    keep.close()
    with daemon(pool_dir, new, adopts=True) as (_, namespaces):
        assert num_chunks(namespaces) == len(KEYS)
        assert not unused_pools(pool_dir, new)
    assert not unused_pools(pool_dir, new)  # its own is not listed
    (unused,) = unused_pools(pool_dir, old)
    assert unused.runtime_dir == new
    with daemon(pool_dir, new) as (_, namespaces):
        assert num_chunks(namespaces) == len(KEYS)
    ((nbytes, text),) = remove_unused_pools(pool_dir, old)
    assert nbytes == unused.nbytes >= SIZE
    assert "is removed" in text
    assert not list(tmp_path.rglob("kvd-*"))


def test_the_pool_of_the_configured_runtime_directory_is_left(
    pool_dir: Path, tmp_path: Path
) -> None:
    """A daemon will use it again; the text has the command that frees it."""
    leave(pool_dir, tmp_path / "run")
    ((nbytes, text),) = remove_unused_pools(pool_dir, tmp_path / "run")
    assert nbytes == 0
    assert f"kvd purge --runtime-dir {tmp_path / 'run'} --pool-dir {pool_dir}" in text
    with daemon(pool_dir, tmp_path / "run") as (_, namespaces):
        assert num_chunks(namespaces) == len(KEYS)


def test_huge_pages_whose_other_files_are_lost_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a container with a /dev/shm of its own."""
    huge, notes = hugetlbfs_double(tmp_path, monkeypatch)
    leave(huge, tmp_path / "run")
    (lost,) = notes.iterdir()
    lost.rename(tmp_path / "lost")
    (unused,) = unused_pools(huge, tmp_path / "other")
    assert "an unknown runtime directory" in str(unused)
    with daemon(huge, tmp_path / "other", adopts=True) as (_, namespaces):
        assert not len(namespaces)
    ((nbytes, _), *_) = sorted(remove_unused_pools(huge, tmp_path / "other"), reverse=True)
    assert nbytes >= SIZE
    assert [path.name for path in huge.iterdir()] == [pool_directory_name(tmp_path / "other")]


class Killed(BaseException):
    """The daemon is killed here."""


def test_an_adoption_that_is_killed_leaves_the_pool_to_the_next_start(
    pool_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the pool is moved, and between the move and the new manifest."""
    old, new = tmp_path / "old", tmp_path / "new"
    leave(pool_dir, old)
    for owner, name in ((PoolFiles, "adopt"), (PoolFiles, "write_manifest")):

        def killed(*_: object) -> None:
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, killed)
            with pytest.raises(Killed), daemon(pool_dir, new, adopts=True):
                pass
    with daemon(pool_dir, new, adopts=True) as (_, namespaces):
        assert num_chunks(namespaces) == len(KEYS)


def test_a_reset_that_is_in_the_copy_holds_for_an_adopter(
    pool_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two namespaces one is reset while its ledger is not in use: the other one is adopted."""
    old, new = tmp_path / "old", tmp_path / "new"
    with daemon(pool_dir, old) as (_, namespaces):
        store(add(namespaces, 0, PAGE).table, KEYS)
        store(add(namespaces, 1, PAGE).table, KEYS[:1])
        namespaces.resets.draw(NAMESPACE)  # and killed here
    (old / "kvd.resets").unlink()
    old.rmdir()
    with daemon(pool_dir, new, adopts=True) as (_, namespaces):
        assert num_chunks(namespaces) == 1
        assert namespaces.resets.salt_of(NAMESPACE)
    assert f"{NAMESPACE}.ledger: its namespace was reset since" in caplog.text


def test_a_copy_that_cannot_be_written_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reset is recorded where it must be; the copy, which lacks it, convinces no adopter."""
    resets, copy = ResetFile(tmp_path / "kvd.resets"), tmp_path / "resets"
    resets.copy_to(copy)
    assert resets.draw(NAMESPACE) == ""
    assert copy.read_bytes() == (tmp_path / "kvd.resets").read_bytes()
    real = os.open

    def fails(path: Path, *arguments: int) -> int:
        if Path(path).name.startswith("resets"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fails)
        assert resets.draw(NAMESPACE) == ""
    assert not copy.exists()
    assert "no daemon of another runtime directory adopts" in caplog.text
    assert ResetFile(tmp_path / "kvd.resets").salts == resets.salts


def names(first: int, count: int) -> list[str]:
    """Ids of namespaces."""
    return [number.to_bytes(16, "big").hex() for number in range(first, first + count)]


@pytest.mark.parametrize("base", [False, True])
def test_a_table_that_learns_another_forgets_no_reset_of_either(base: bool) -> None:
    """Where both know a namespace its own salt stays; where there are too many, a new base counts.

    So no salt of before a reset, such as the empty one, is that of a namespace that was reset.
    """
    own, other = ResetTable(), ResetTable()
    for table, first in ((own, 0), (other, 100)):
        for name in names(first, 120):
            table.draw(name)
    if base:
        other.draw_base()
    before = {name: own.salt_of(name) for name in names(100, 20)}
    own.learn(other)
    assert {name: own.salt_of(name) for name in names(100, 20)} == before
    assert all(own.salt_of(name) for name in names(0, 220))
    assert len(own) == MAX_RESETS
    assert own.base != other.base


def test_memory_that_runs_out_after_the_checks_names_the_unused_pools(
    pool_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a pool that cannot be created has the sizes and the command."""
    leave(pool_dir, tmp_path / "old")

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    named = f"No space left on device; unused pools take .* of {tmp_path / 'old'}, .* --unused"
    with pytest.raises(PoolError, match=named), daemon(pool_dir, tmp_path / "new"):
        pass
