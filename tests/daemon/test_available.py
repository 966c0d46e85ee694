"""How much memory a pool may take: of a fixed size, and with `--cpu-bytes auto`."""

from collections.abc import Callable
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
from tests.daemon.engines import Engine
from tests.daemon.serving import StartDaemon, run_kvd
from tests.nodes import describe
from tests.processes import python

MIB, GIB = 2**20, 2**30
SHM = Filesystem(Path("/dev/shm"), "tmpfs", "/dev/shm", 4096, 64 * GIB, 64 * GIB)
HUGE = Filesystem(Path("/huge"), "hugetlbfs", "/huge", 2 * MIB, 8 * GIB, 6 * GIB, huge_pages=4096)
MEMORY = MachineMemory(24 * GIB, 20 * GIB)
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
    ("found", "pages"),
    [
        (limits(), 19 * GIB),
        (limits(existing_bytes=3 * GIB), 22 * GIB),
        (limits(group=GROUP), 11 * GIB),
        (limits(group=GROUP, existing_bytes=3 * GIB), 14 * GIB),
        (limits(replace(SHM, free_bytes=5 * GIB)), 5 * GIB),
        (limits(memory=MachineMemory(24 * GIB, GIB), existing_bytes=3 * GIB), 7 * GIB // 2),
        (limits(memory=MachineMemory(24 * GIB, 0)), 0),
        (limits(HUGE, MachineMemory(24 * GIB, 2 * GIB), GROUP), 6 * GIB),
        (limits(HUGE, existing_bytes=2 * GIB), 8 * GIB),
    ],
    ids=[
        "memory",
        "kept",
        "group",
        "group kept",
        "tmpfs",
        "full kept",
        "full",
        "huge",
        "huge kept",
    ],
)
def test_the_largest_pool_fits_and_no_larger_one(found: PoolLimits, pages: int) -> None:
    """One calculation for `auto` and fixed sizes: what is left but for the head room, and held."""
    largest = max(0, pages - found.filesystem.whole_pages(TRAILER_BYTES))
    assert found.largest == largest
    assert found.shortage(largest) is None or not largest
    shortage = found.shortage(largest + 1)
    assert shortage is not None
    assert format_size(largest + 1) in shortage.text


@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize(
    ("found", "room"),
    [
        (limits(), 19 * GIB - TRAILER),
        (limits(existing_bytes=3 * GIB), 22 * GIB - TRAILER),
        (limits(HUGE, MachineMemory(2 * GIB, 64 * MIB)), 32 * MIB),
    ],
    ids=["memory", "kept", "huge"],
)
def test_the_largest_pool_leaves_room_for_its_pins(
    found: PoolLimits, room: int, lanes: int
) -> None:
    """Pool and pins, or in huge pages the pins alone, fit the machine's memory, and no larger."""
    found = replace(found, pinning_lanes=lanes)
    page, of_pool = found.filesystem.page_bytes, found.filesystem is SHM
    assert 0 < found.largest == found.largest // page * page
    for more, fits in ((0, True), (page, False)):
        pool = found.largest + more
        assert (pool * of_pool + lanes * pool * 48 // 4096 <= room) is fits
        assert (found.machine_shortage(pool) is None) is fits


def test_pins_are_no_memory_of_the_control_group() -> None:
    """Kernel memory counts against the machine's: the group's limit leaves as large a pool."""
    assert limits(group=GROUP, pinning_lanes=8).largest == limits(group=GROUP).largest


@pytest.mark.parametrize(
    ("found", "wanted", "text", "remedy"),
    [
        (
            limits(),
            300 * GIB,
            (
                "a pool of 300 GiB does not fit the machine's memory: 20 GiB of 24 GiB are"
                " available, of which 1 GiB are for kvd's own processes"
            ),
            "choose --cpu-bytes 18GiB or less",
        ),
        (limits(), 22 * GIB, "20 GiB of 24 GiB", "18GiB or less, or end other processes first"),
        (
            limits(pinning_lanes=8),
            19 * GIB - TRAILER,
            "of which 1 GiB are for kvd's own processes, and 1.78 GiB for pinning it",
            "choose --cpu-bytes 17GiB or less, or end other processes first",
        ),
        (
            limits(existing_bytes=3 * GIB),
            30 * GIB,
            "beside the 3 GiB of the kept pool",
            "21GiB or less",
        ),
        (
            limits(memory=MachineMemory(2 * GIB, GIB // 2)),
            2 * GIB,
            "512 MiB of 2 GiB are available, of which 256 MiB are for kvd's own processes",
            "choose --cpu-bytes 255MiB or less",
        ),
        (
            limits(memory=MachineMemory(2 * GIB, MIB)),
            GIB // 2,
            "1 MiB of 2 GiB",
            "end other processes first",
        ),
        (
            limits(memory=MachineMemory(2 * GIB, MIB)),
            3 * GIB,
            "1 MiB of 2 GiB",
            "free memory first: no smaller pool fits either",
        ),
        (
            limits(group=GROUP),
            14 * GIB,
            "control group /sys/fs/cgroup/kvd: 12 GiB of 16 GiB are left",
            (
                "choose --cpu-bytes 10GiB or less, or raise the limit to 19457 MiB (memory.max,"
                " MemoryMax=, resources.limits.memory)"
            ),
        ),
        (
            limits(replace(SHM, total_bytes=12 * GIB, free_bytes=10 * GIB)),
            11 * GIB,
            "does not fit /dev/shm (tmpfs): 10 GiB of 12 GiB are left",
            (
                "choose --cpu-bytes 9GiB or less, or enlarge it: mount -o remount,size=13313M"
                " /dev/shm; in Docker --shm-size"
            ),
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
            (
                "or set huge pages of 2 MiB aside: echo 5121 >"
                " /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages,"
            ),
        ),
        (limits(HUGE), 300 * GIB, "6 GiB of 8 GiB", "choose --cpu-bytes 5GiB or less"),
    ],
)
def test_a_pool_that_does_not_fit_is_named_with_figures_and_remedy(
    found: PoolLimits, wanted: int, text: str, remedy: str
) -> None:
    """The machine's memory comes first, then the control group, then the filesystem."""
    shortage = found.shortage(wanted)
    assert shortage is not None
    assert text in shortage.text
    assert remedy in shortage.remedy


@pytest.mark.parametrize("wanted", [26 * GIB, 32 * GIB, 300 * GIB, 2**60])
@pytest.mark.parametrize("group", [None, GROUP], ids=["no group", "group"])
@pytest.mark.parametrize(
    "filesystem", [replace(SHM, total_bytes=GIB, free_bytes=GIB), HUGE], ids=str
)
def test_no_remedy_needs_more_than_the_machine_has(
    filesystem: Filesystem, group: MemoryLimit | None, wanted: int
) -> None:
    """Where a pool is larger than the memory, nothing is to be enlarged for it."""
    found = limits(filesystem, group=group)
    for shortage in (
        found.machine_shortage(wanted),
        found.cgroup_shortage(wanted),
        found.filesystem_shortage(wanted),
    ):
        if shortage is not None:
            for word in ("remount", "nr_hugepages", "raise the limit"):
                assert word not in shortage.remedy


@pytest.mark.parametrize(
    ("found", "reserve", "said"),
    [
        (limits(), None, []),
        (limits(), 2 * GIB, []),
        (limits(), 100 * 2**40, ["reserve = 100 TiB leaves nothing", "19 GiB"]),
        (
            limits(replace(SHM, kind="ext4")),
            None,
            ["is on ext4 at /dev/shm, which is not in memory"],
        ),
        (limits(HUGE), None, []),
    ],
)
def test_what_can_hardly_be_meant_is_said_at_start(
    found: PoolLimits, reserve: int | None, said: list[str]
) -> None:
    """A reserve that leaves nothing to the pool, and a pool on a disk, are warnings."""
    warnings = found.warnings(reserve)
    assert len(warnings) == bool(said)
    for text in said:
        assert text in warnings[0]


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


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cgroup tree of our own, with this process in its group `outer/inner`."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("1:name=systemd:/\n0::/outer/inner\n")
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    monkeypatch.setattr(memory, "memory_limit", lambda: memory_limit(None, tmp_path, proc))
    return tmp_path


def limit(group: Path, maximum: str, current: int, page_cache: int = 0) -> None:
    """Write a group's memory files."""
    (group / "memory.max").write_text(f"{maximum}\n")
    (group / "memory.current").write_text(f"{current}\n")
    (group / "memory.stat").write_text(
        f"anon 7\nshmem 9\ninactive_file {page_cache}\nactive_file 1\n"
    )


def group_room() -> int:
    """What this process's group leaves to a pool, with the head room."""
    group = PoolLimits.of(Path("/dev/shm"), existing_bytes=0).group
    return -1 if group is None else group.free_bytes


def test_the_tightest_group_above_counts(cgroup: Path) -> None:
    """A group without a limit changes nothing, one with less left does; more in use leaves 0."""
    limit(cgroup / "outer", "max", 5)
    assert group_room() == -1
    limit(cgroup / "outer" / "inner", str(10 * MIB), MIB + 1)
    assert group_room() == 9 * MIB
    limit(cgroup / "outer", str(8 * MIB), 3 * MIB + 1)
    assert group_room() == 5 * MIB
    limit(cgroup / "outer" / "inner", str(MIB), 2 * MIB)
    assert group_room() == 0
    assert PoolLimits.of(Path("/dev/shm"), existing_bytes=MIB).largest == MIB - TRAILER


def test_the_page_cache_of_a_group_is_room(cgroup: Path) -> None:
    """The kernel drops files of disks before it kills: they are not in use."""
    limit(cgroup / "outer" / "inner", str(10 * MIB), 9 * MIB + 1, page_cache=8 * MIB)
    assert group_room() == 9 * MIB


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
    (inner / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 4096\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text(f"{2**20}\n")
    found = memory_limit(41, tmp_path, tmp_path / "proc")
    assert found is not None
    assert (found.group, found.free_bytes) == (inner, 2**30 - 2**20 + 4096)
    (inner / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limit(41, tmp_path, tmp_path / "proc") is None


def test_a_pool_larger_than_the_memory_does_not_start(
    tmp_path: Path, small_tmpfs: Callable[[Path, int], None]
) -> None:
    """However large the tmpfs: `kvd serve` names both figures and a size that fits."""
    total = MachineMemory.read().total
    small_tmpfs(tmp_path, 4 * total)
    limited = (  # else a daemon that starts would fill the machine
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({GIB}, {GIB}));"
        "import runpy; runpy.run_module('kvd', run_name='__main__', alter_sys=True)"
    )
    options = ("--runtime-dir", str(tmp_path / "run"), "--pool-dir", str(tmp_path))
    size = ("--cpu-bytes", str(2 * total))
    done = python("-c", limited, "serve", *options, *size, "--http-listen", "off")
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert f"a pool of {format_size(2 * total)} does not fit the machine's memory: " in line
    assert f" of {format_size(total)} are available" in line
    assert "choose --cpu-bytes " in line
    assert "remount" not in line
    assert not list(tmp_path.glob("kvd-*"))


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
    with Engine(daemon.runtime_dir, world_size=1).wait_attached():
        assert daemon.status()["pool"]["cpu_bytes"] == largest


def test_an_auto_that_leaves_nothing_is_said_at_start(start_daemon: StartDaemon) -> None:
    """A reserve above all memory is a warning in the log and in the list of events."""
    daemon = start_daemon("--reserve", "100TiB", cpu_bytes="auto", ready=False)
    daemon.wait_log("reserve = 100 TiB leaves nothing to a pool of cpu_bytes = auto")
    events = [event for event in daemon.status()["events"] if "reserve" in event["text"]]
    assert [event["level"] for event in events] == ["warning"]


def test_a_pool_on_a_disk_is_said_at_start(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """A pool_dir that is no memory is a warning, and the daemon serves."""
    if Filesystem.of(tmp_path).is_memory:
        pytest.skip("temporary files are in memory here")
    daemon = start_daemon("--pool-dir", str(tmp_path), cpu_bytes="8MiB")
    assert f"pool_dir = {tmp_path} is on " in daemon.log.read_text()
