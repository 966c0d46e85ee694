"""What the doctor finds below the pool, on this machine's own disk and on one that hangs."""

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from kvd.config.values import parse_tier
from kvd.doctor import probes
from kvd.doctor.probes import (
    DiskFacts,
    TierFacts,
    probe_disk,
    probe_store,
    probe_tier,
    run_python,
)
from tests.slowfs import slow_filesystem
from tests.waiting import PATIENCE, eventually


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that takes long to start is not taken for a disk that hangs."""
    monkeypatch.setattr(probes, "PATIENCE_SECONDS", PATIENCE)


def disk_of(facts: TierFacts) -> DiskFacts:
    """What was found of a disk."""
    assert facts.disk is not None
    return facts.disk


def test_a_directory_is_seen_where_it_lies_and_keeps_nothing(tmp_path: Path) -> None:
    """Mount, room and speed are those of the directory's file system, and no file is left."""
    facts = probe_tier(f"disk:{tmp_path}/tier,size=1GiB")
    assert (facts.problem, facts.hung) == ("", "")
    found, room = disk_of(facts), os.statvfs(tmp_path)
    assert found.size == room.f_blocks * room.f_frsize
    assert tmp_path.is_relative_to(found.mounted_at)
    assert (found.exists, found.writable, found.held) == (False, True, 0)
    if found.direct:
        assert found.written
        assert found.read
    assert list(tmp_path.iterdir()) == []


def test_what_the_tier_takes_already_is_counted(tmp_path: Path) -> None:
    """Files in the directory are room that the tier has."""
    folder = tmp_path / "tier"
    folder.mkdir()
    (folder / "slab").write_bytes(bytes(1 << 20))
    found = disk_of(probe_tier(f"disk:{folder},size=1GiB"))
    assert found.exists
    assert found.held >= 1 << 20


def test_memory_is_not_taken_for_a_disk() -> None:
    """A directory in /dev/shm is memory."""
    found = disk_of(probe_tier("disk:/dev/shm/kvd-doctor-tier,size=1GiB"))
    assert (found.filesystem, found.medium) == ("tmpfs", "memory")


def test_a_disk_that_hangs_does_not_hang_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that never answers is named by its mount, and by what was asked of it."""
    monkeypatch.setattr(probes, "PATIENCE_SECONDS", 1.0)
    with slow_filesystem(tmp_path / "slow") as slow:

        def look() -> TierFacts:
            monkeypatch.setattr(probes, "PATIENCE_SECONDS", 2 * probes.PATIENCE_SECONDS)
            return probe_tier(f"disk:{slow.file},size=1GiB")

        facts = eventually(look, lambda facts: disk_of(facts).filesystem)
        assert facts.hung == f"looking at {slow.file}"
        assert disk_of(facts).mounted_at == str(slow.file.parent)
        assert disk_of(facts).filesystem == "fuse"
    ends = {process.wait(PATIENCE) for process in probes.abandoned}  # they end with the mount
    probes.abandoned.clear()
    assert ends == {-signal.SIGKILL}


@pytest.mark.parametrize(
    ("device", "rotational", "medium"),
    [("nvme1n1", "0", "NVMe"), ("sda", "1", "rotating"), ("sdb", "0", "SSD"), ("vda", "1", "")],
)
def test_the_kind_of_a_disk_is_the_kernels_word(
    tmp_path: Path, device: str, rotational: str, medium: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition is its disk, a mapped device is what it is made of, virtual disks are so."""
    disk = tmp_path / "devices" / device
    (disk / "queue").mkdir(parents=True)
    (disk / "queue/rotational").write_text(f"{rotational}\n")
    part = disk / f"{device}1"
    part.mkdir()
    (part / "partition").write_text("1\n")
    mapped = tmp_path / "devices/dm-0/slaves"
    mapped.mkdir(parents=True)
    (mapped / part.name).symlink_to(part)
    numbers = tmp_path / "block"
    numbers.mkdir()
    (numbers / "253:0").symlink_to(mapped.parent)
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "27 1 254:0 / / rw - ext4 /dev/root rw\n"
        "90 27 253:0 / /data/of\\040kvd rw,noatime shared:1 - xfs /dev/mapper/fast rw\n"
    )
    monkeypatch.setattr(probes, "_MOUNTS", mounts)
    monkeypatch.setattr(probes, "_BLOCK_DEVICES", numbers)
    found: dict[str, Any] = {}
    for said in probe_disk(parse_tier("disk:/data/of kvd/tier,size=1GiB")):
        found |= said
        if "mounted_at" in found:
            break
    assert (found["mounted_at"], found["filesystem"]) == ("/data/of kvd", "xfs")
    assert (found["device"], found["medium"]) == (device, medium or "virtual disk")


def test_a_master_that_answers_and_one_that_does_not() -> None:
    """A shared store's master is connected to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        master = f"127.0.0.1:{listener.getsockname()[1]}"
        found = list(probe_store(parse_tier(f"mooncake:master={master}")))
        assert not any("refused" in each for each in found)
    found = list(probe_store(parse_tier(f"mooncake:master={master}")))
    assert any("refused" in each for each in found)


def test_what_is_written_wrongly_is_a_finding() -> None:
    """A backend's own check has its say, and nothing is looked at."""
    facts = probe_tier("disk:relative,size=1GiB")
    assert "absolute" in facts.problem
    assert facts.disk is None


def test_a_process_that_fails_is_a_finding() -> None:
    """Why nothing could be found is told by the last line that it wrote."""
    said, problem, hung = run_python("-c", "print('{}'); raise OSError('no')", seconds=PATIENCE)
    assert (json.loads(said), problem, hung) == ({}, "OSError: no", False)
