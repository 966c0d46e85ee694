"""How much memory `--cpu-bytes auto` may take."""

from pathlib import Path

import pytest

from kvd.machine import room
from kvd.machine.room import available_bytes, memory_limit


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cgroup tree of our own, with this process in its group `outer/inner`."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("1:name=systemd:/\n0::/outer/inner\n")
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    monkeypatch.setattr(room, "memory_limit", lambda: memory_limit(None, tmp_path, proc))
    return tmp_path


def limit(group: Path, maximum: str, current: int) -> None:
    """Write a group's memory files."""
    (group / "memory.max").write_text(f"{maximum}\n")
    (group / "memory.current").write_text(f"{current}\n")


def test_the_tightest_group_above_counts(cgroup: Path) -> None:
    """A group without a limit changes nothing, one with less left does; more in use leaves 0."""
    limit(cgroup / "outer", "max", 5)
    assert available_bytes(Path("/dev/shm")) > 10 * 2**20
    limit(cgroup / "outer" / "inner", str(10 * 2**20), 2**20)
    assert available_bytes(Path("/dev/shm")) == 9 * 2**20
    limit(cgroup / "outer", str(8 * 2**20), 3 * 2**20)
    assert available_bytes(Path("/dev/shm")) == 5 * 2**20
    limit(cgroup / "outer" / "inner", str(2**20), 2**21)
    assert available_bytes(Path("/dev/shm")) == 0


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path) -> None:
    """The memory controller's own tree counts; its "no limit" is none."""
    inner = tmp_path / "memory" / "docker" / "kvd"
    inner.mkdir(parents=True)
    (tmp_path / "proc" / "41").mkdir(parents=True)
    (tmp_path / "proc" / "41" / "cgroup").write_text(
        "9:cpu,cpuacct:/\n8:memory:/docker/kvd\n0::/\n"
    )
    (inner / "memory.limit_in_bytes").write_text(f"{2**30}\n")
    (inner / "memory.usage_in_bytes").write_text(f"{2**20}\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text(f"{2**20}\n")
    found = memory_limit(41, tmp_path, tmp_path / "proc")
    assert found is not None
    assert (found.group, found.room) == (inner, 2**30 - 2**20)
    (inner / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limit(41, tmp_path, tmp_path / "proc") is None
