"""How much memory a pool may take: of a fixed size, and with `--cpu-bytes auto`."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvd.machine import memory
from kvd.machine.memory import (
    TRAILER_BYTES,
    Filesystem,
    MachineMemory,
    MemoryLimit,
    PoolLimits,
    memory_limit,
)
from kvd_proto.text import format_size
from tests.daemon.engines import engine_of
from tests.daemon.serving import StartDaemon, run_kvd
from tests.nodes import describe

MIB, GIB = 2**20, 2**30
SHM = Filesystem(Path("/dev/shm"), "tmpfs", "/dev/shm", 4096, 64 * GIB, 64 * GIB)
HUGE = Filesystem(Path("/huge"), "hugetlbfs", "/huge", 2 * MIB, 8 * GIB, 6 * GIB, huge_pages=4096)
MEMORY = MachineMemory(24 * GIB, 20 * GIB)
FULL = MachineMemory(2 * GIB, MIB)
GROUP = MemoryLimit(Path("/sys/fs/cgroup/kvd"), 16 * GIB, 4 * GIB)
TRAILER = SHM.whole_pages(TRAILER_BYTES)


def limits(
    filesystem: Filesystem = SHM,
    memory: MachineMemory = MEMORY,
    group: MemoryLimit | None = None,
    existing_bytes: int = 0,
    pinning_lanes: int = 0,
) -> PoolLimits:
    """A machine of 24 GiB, of which 20 are available, with a tmpfs of 64 GiB."""
    return PoolLimits(filesystem, memory, group, existing_bytes, pinning_lanes)


@pytest.mark.parametrize(
    ("machine", "nbytes"),
    [
        pytest.param(limits(), 19 * GIB, id="memory"),
        pytest.param(limits(existing_bytes=3 * GIB), 22 * GIB, id="kept"),
        pytest.param(limits(group=GROUP), 11 * GIB, id="group"),
        pytest.param(limits(group=GROUP, existing_bytes=3 * GIB), 14 * GIB, id="group, kept"),
        pytest.param(limits(group=GROUP, pinning_lanes=8), 11 * GIB, id="group, pins"),
        pytest.param(limits(replace(SHM, free_bytes=5 * GIB)), 5 * GIB, id="tmpfs"),
        pytest.param(limits(memory=MachineMemory(24 * GIB, 0)), 0, id="full"),
        pytest.param(limits(HUGE, FULL, GROUP), 6 * GIB, id="huge pages"),
        pytest.param(limits(HUGE, existing_bytes=2 * GIB), 8 * GIB, id="huge pages, kept"),
    ],
)
def test_the_largest_pool_fits_and_no_larger_one(machine: PoolLimits, nbytes: int) -> None:
    """`auto` and fixed sizes have one calculation; pins are no memory of the control group."""
    largest = max(0, nbytes - machine.filesystem.whole_pages(TRAILER_BYTES))
    assert machine.largest == largest
    assert machine.shortage(largest) is None or not largest
    shortage = machine.shortage(largest + 1)
    assert shortage is not None
    assert format_size(largest + 1) in shortage.text


@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize(
    ("machine", "room"),
    [
        pytest.param(limits(), 19 * GIB - TRAILER, id="memory"),
        pytest.param(limits(existing_bytes=3 * GIB), 22 * GIB - TRAILER, id="kept"),
        pytest.param(limits(HUGE, MachineMemory(2 * GIB, 64 * MIB)), 32 * MIB, id="huge pages"),
    ],
)
def test_the_largest_pool_leaves_room_for_its_pins(
    machine: PoolLimits, room: int, lanes: int
) -> None:
    """Pool and pins, or in huge pages the pins alone, fit the machine's memory, and no larger."""
    machine = replace(machine, pinning_lanes=lanes)
    page, of_pool = machine.filesystem.page_bytes, machine.filesystem is SHM
    assert 0 < machine.largest == machine.largest // page * page
    for more, fits in ((0, True), (page, False)):
        pool = machine.largest + more
        assert (pool * of_pool + lanes * pool * 48 // 4096 <= room) is fits
        assert (machine.machine_shortage(pool) is None) is fits


@pytest.mark.parametrize(
    ("machine", "size", "text", "remedy"),
    [
        (
            limits(pinning_lanes=8),
            19 * GIB - TRAILER,
            "20 GiB of 24 GiB are available, of which 1 GiB are for kvd's own processes, and 1.78",
            "choose --cpu-bytes 17GiB or less, or end other processes first",
        ),
        (limits(existing_bytes=GIB), 30 * GIB, "beside the 1 GiB of the kept pool", "19GiB or"),
        (limits(memory=FULL), GIB // 2, "1 MiB of 2 GiB", "end other processes first"),
        (limits(memory=FULL), 3 * GIB, "1 MiB of 2 GiB", "first: no smaller pool fits either"),
        (
            limits(group=GROUP),
            14 * GIB,
            "control group /sys/fs/cgroup/kvd: 12 GiB of 16 GiB are left",
            "choose --cpu-bytes 10GiB or less, or raise the limit to 19457 MiB (memory.max, ",
        ),
        (
            limits(replace(SHM, total_bytes=12 * GIB, free_bytes=10 * GIB)),
            11 * GIB,
            "does not fit /dev/shm (tmpfs): 10 GiB of 12 GiB are left",
            "9GiB or less, or enlarge it: mount -o remount,size=13313M /dev/shm; in Docker --shm",
        ),
        (
            limits(replace(SHM, kind="ext4", mounted_at="/", free_bytes=10 * GIB)),
            11 * GIB,
            "does not fit /dev/shm (ext4)",
            "choose --cpu-bytes 9GiB or less, or make room at /",
        ),
        (
            limits(HUGE),
            8 * GIB,
            "does not fit /huge (hugetlbfs): 6 GiB of 8 GiB are left",
            "echo 5121 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages,",
        ),
    ],
)
def test_a_pool_that_does_not_fit_is_named_with_figures_and_remedy(
    machine: PoolLimits, size: int, text: str, remedy: str
) -> None:
    """The machine's memory comes first, then the control group, then the filesystem."""
    shortage = machine.shortage(size)
    assert shortage is not None
    assert text in shortage.text
    assert remedy in shortage.remedy


@pytest.mark.parametrize("size", [26 * GIB, 2**60])
@pytest.mark.parametrize("filesystem", [replace(SHM, total_bytes=GIB, free_bytes=GIB), HUGE])
def test_no_remedy_needs_more_than_the_machine_has(filesystem: Filesystem, size: int) -> None:
    """Where a pool is larger than the memory, nothing is to be enlarged for it."""
    machine = limits(filesystem, group=GROUP)
    for shortage in (
        machine.machine_shortage(size),
        machine.cgroup_shortage(size),
        machine.filesystem_shortage(size),
    ):
        for word in ("remount", "nr_hugepages", "raise the limit"):
            assert shortage is None or word not in shortage.remedy


def test_memory_set_aside_as_huge_pages_is_not_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other pools cannot have it, and swap does not count."""
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text(
        "MemTotal: 1000 kB\nMemAvailable: 500 kB\nSwapFree: 900 kB\nHugePages_Total: 2\n"
        "Hugetlb: 200 kB\n"
    )
    assert MachineMemory.read() == MachineMemory(800 * 1024, 500 * 1024)


def limit(group: Path, maximum: str, current: int, page_cache: int = 0) -> None:
    """Write a group's memory files."""
    (group / "memory.max").write_text(f"{maximum}\n")
    (group / "memory.current").write_text(f"{current}\n")
    (group / "memory.stat").write_text(
        f"anon 7\nshmem 9\ninactive_file {page_cache}\nactive_file 1\n"
    )


def test_the_tightest_group_above_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group without a limit changes nothing; what a group has in its page cache is free."""
    proc, outer = tmp_path / "proc", tmp_path / "outer"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("1:name=systemd:/\n0::/outer/inner\n")
    inner = outer / "inner"
    inner.mkdir(parents=True)
    monkeypatch.setattr(memory, "memory_limit", lambda: memory_limit(None, tmp_path, proc))

    def free_bytes() -> int:
        group = PoolLimits.of(Path("/dev/shm"), existing_bytes=0).group
        return -1 if group is None else group.free_bytes

    limit(outer, "max", 5)
    assert free_bytes() == -1
    limit(inner, str(10 * MIB), 9 * MIB + 1, page_cache=8 * MIB)
    assert free_bytes() == 9 * MIB
    limit(outer, str(8 * MIB), 3 * MIB + 1)
    assert free_bytes() == 5 * MIB
    limit(inner, str(MIB), 2 * MIB)
    assert free_bytes() == 0
    assert PoolLimits.of(Path("/dev/shm"), existing_bytes=MIB).largest == MIB - TRAILER


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path) -> None:
    """The memory controller's own tree counts; its "no limit" is none."""
    inner, unlimited = tmp_path / "memory" / "docker" / "kvd", "9223372036854771712\n"
    inner.mkdir(parents=True)
    (tmp_path / "proc" / "41").mkdir(parents=True)
    (tmp_path / "proc" / "41" / "cgroup").write_text(
        "9:cpu,cpuacct:/\n8:memory:/docker/kvd\n0::/\n"
    )
    (inner / "memory.limit_in_bytes").write_text(f"{2**30}\n")
    (inner / "memory.usage_in_bytes").write_text(f"{2**20}\n")
    (inner / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 4096\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(unlimited)
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text(f"{2**20}\n")
    group = memory_limit(41, tmp_path, tmp_path / "proc")
    assert group is not None
    assert (group.group, group.free_bytes) == (inner, 2**30 - 2**20 + 4096)
    (inner / "memory.limit_in_bytes").write_text(unlimited)
    assert memory_limit(41, tmp_path, tmp_path / "proc") is None


def test_pins_count_where_gpus_may_pin(
    tmp_path: Path, start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside GPUs a fixed size must leave room for pins, and a size that a host's ranks decide not.

    The machine is described with 64 MiB available: the largest pool that nothing pins is 32 MiB,
    less its trailer.
    """
    describe(tmp_path, {"0000:17:00.0": "0"}, online="0")
    (tmp_path / "meminfo").write_text("MemTotal: 1048576 kB\nMemAvailable: 65536 kB\n")
    (tmp_path / "sitecustomize.py").write_text(
        "from pathlib import Path; from kvd.machine import numa, memory\n"
        f"numa.GPUS = Path({str(tmp_path / 'gpus')!r})\n"
        f"memory._MEMINFO = Path({str(tmp_path / 'meminfo')!r})"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    largest = 32 * MIB - TRAILER
    done = run_kvd("serve", "--runtime-dir", str(tmp_path / "run"), "--cpu-bytes", str(largest))
    assert done.returncode == 1
    assert "64 MiB of 1 GiB are available" in done.stderr
    assert "for pinning it; choose --cpu-bytes 31MiB or less" in done.stderr
    daemon = start_daemon("--reserve", "0", "--host-ratio", "1000", cpu_bytes="auto", ready=False)
    with engine_of(daemon):
        assert daemon.status()["pool"]["cpu_bytes"] == largest


def test_a_size_or_place_that_can_hardly_be_meant_is_said_at_start(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """A reserve above all memory and a pool on a disk are warnings, and the daemon serves."""
    daemon = start_daemon("--reserve", "100TiB", cpu_bytes="auto", ready=False)
    daemon.wait_log("reserve = 100 TiB leaves nothing to a pool of cpu_bytes = auto")
    events = [event for event in daemon.status()["events"] if "reserve" in event["text"]]
    assert [event["level"] for event in events] == ["warning"]
    daemon.stop()
    if Filesystem.of(tmp_path).is_memory:
        pytest.skip("temporary files are in memory here")
    daemon = start_daemon("--pool-dir", str(tmp_path), cpu_bytes="8MiB")
    assert f"pool_dir = {tmp_path} is on " in daemon.log.read_text()
