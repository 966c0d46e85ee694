"""The file of resets: what the next daemon reads, and what becomes of it in other hands."""

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.cache.recovery import RESET_BYTES
from kvd.server.state_files import ResetFile

ONE, TWO = "01" * 16, "02" * 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where it is."""
    return tmp_path / "kvd.resets"


def salts(table: ResetFile) -> list[bytes]:
    """Of both namespaces, and of those that were not reset."""
    return [table.salt_of(ONE), table.salt_of(TWO), table.base]


def test_the_next_daemon_knows_what_was_reset(path: Path) -> None:
    """Nothing is there before the first reset; each is in the file when `draw` has returned."""
    first = ResetFile(path)
    assert not path.exists()
    assert first.draw(ONE) == ""
    before = salts(first)
    assert salts(ResetFile(path)) == before
    assert path.stat().st_mode & 0o777 == 0o600
    assert first.draw(TWO) == first.draw(ONE) == ""
    assert salts(ResetFile(path)) == salts(first)
    assert len({*before, *salts(first)}) == 4
    assert [file.name for file in path.parent.iterdir()] == ["kvd.resets"]


def foreign(path: Path) -> None:
    """A file of another user's."""
    os.chown(path, 65534, 65534)


def directory(path: Path) -> None:
    """A directory that is not empty."""
    path.unlink()
    path.mkdir()
    (path / "a").touch()


def pipe(path: Path) -> None:
    """A pipe that nobody writes to."""
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    """A link to a file that is sound."""
    path.rename(path.with_name("b"))
    path.symlink_to("b")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: os.truncate(path, 0),
    "cut off": lambda path: os.truncate(path, 100),
    "longer": lambda path: os.truncate(path, RESET_BYTES + 1),
    "zeros": lambda path: path.write_bytes(bytes(RESET_BYTES)),
    "other bytes": lambda path: path.write_bytes(b"x" * RESET_BYTES),
    "another user's": foreign,
    "directory": directory,
    "pipe": pipe,
    "link": link,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_an_invalid_reset_file_costs_misses(
    path: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    """All that was kept is of before; that is said once, and holds for the next daemon, too."""
    if os.geteuid():
        pytest.skip("only root can make a file another user's")
    file = ResetFile(path)
    file.draw(ONE)
    damage(path)
    with caplog.at_level(logging.ERROR):
        found = ResetFile(path)
    assert found.salt_of(ONE) == found.salt_of(TWO) == found.base
    assert found.base not in {b"", file.salt_of(ONE)}
    assert "is not valid" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        again = ResetFile(path)
    assert (again.base, caplog.text) == (found.base, "")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from([ONE, TWO, "03" * 16]), min_size=1, max_size=8),
    st.integers(0, RESET_BYTES),
)
def test_no_write_that_is_cut_short_forgets_a_reset(path: Path, names: list[str], cut: int) -> None:
    """At any byte: the next daemon uses nothing that is older than what was answered."""
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
        found = ResetFile(path)
        assert all(found.salt_of(name) not in salts for name, salts in dropped.items())


def test_a_file_that_cannot_be_written_is_told_to_who_resets(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each reset is told, the log says it once; what was noted meanwhile is written later.

    So is what was in a file that is spoilt while the daemon runs.
    """

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = ResetFile(path)
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.setattr(os, "pwrite", fails)
        (lack,) = {file.draw(ONE), file.draw(TWO)}
    assert lack.startswith(f"{path} cannot be written: Input/output error; ")
    assert caplog.text.count("cannot be written") == 1
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert file.draw(TWO) == ""
    assert "can be written again" in caplog.text
    for change in (Path.unlink, DAMAGE["other bytes"], directory, pipe):
        assert salts(ResetFile(path)) == salts(file)
        change(path)
        assert file.draw(TWO) == ""
    assert salts(ResetFile(path)) == salts(file)
