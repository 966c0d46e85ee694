"""How much memory `--cpu-bytes auto` may take."""

from pathlib import Path

import pytest

from kvd.broker import available
from kvd.broker.available import available_bytes


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cgroup tree of our own, with this process in its group `outer/inner`."""
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.setattr(available, "_CGROUP", tmp_path)
    monkeypatch.setattr(available, "_own_cgroup", lambda: inner)
    return tmp_path


def limit(group: Path, maximum: str, current: int) -> None:
    """Write a group's memory files."""
    (group / "memory.max").write_text(f"{maximum}\n")
    (group / "memory.current").write_text(f"{current}\n")


def test_without_limits_the_machine_decides(cgroup: Path) -> None:
    """A group without a limit changes nothing."""
    limit(cgroup / "outer", "max", 5)
    assert available_bytes(Path("/dev/shm")) > 2**20


def test_the_tightest_group_above_counts(cgroup: Path) -> None:
    """An outer group with less left than the inner one decides."""
    limit(cgroup / "outer" / "inner", str(10 * 2**20), 2**20)
    assert available_bytes(Path("/dev/shm")) == 9 * 2**20
    limit(cgroup / "outer", str(8 * 2**20), 3 * 2**20)
    assert available_bytes(Path("/dev/shm")) == 5 * 2**20


def test_a_group_over_its_limit_leaves_nothing(cgroup: Path) -> None:
    """More in use than allowed counts as zero, not as a negative size."""
    limit(cgroup / "outer" / "inner", str(2**20), 2**21)
    assert available_bytes(Path("/dev/shm")) == 0
