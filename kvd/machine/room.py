"""How much memory a pool may take: of its filesystem, of the control group, of the machine.

tmpfs (such as /dev/shm) takes files of any size and has room as statvfs says. hugetlbfs
hands out huge pages: files are whole pages long, can be mapped but not written with
write(), and without a size option of the mount statvfs knows nothing of the room.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from kvd_proto.sizes import format_size

_HUGETLBFS = "hugetlbfs"
_TMPFS = "tmpfs"
_FREE_PAGES = Path("/sys/kernel/mm/hugepages")
_SMALL_PAGE = 4096
_MOUNTS = Path("/proc/self/mounts")
_ESCAPED = str.maketrans({c: rf"\{ord(c):03o}" for c in " \t\n\\#"})  # as the kernel writes paths
_GROUPS = Path("/sys/fs/cgroup")
_V1_UNLIMITED = 2**62  # version 1 writes "no limit" as the largest number of whole pages


@dataclass(frozen=True, slots=True)
class Filesystem:
    """The filesystem under a directory.

    kind, mounted_at: as the kernel lists it.
    page_bytes: what files in it are multiples of.
    size, room: its bytes, and how many are left.
    """

    directory: Path
    kind: str
    mounted_at: str
    page_bytes: int
    size: int
    room: int

    @classmethod
    def of(cls, directory: Path) -> "Filesystem":
        """Return the filesystem that `directory` is on."""
        found = os.statvfs(directory)
        size, room = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        kind, mounted_at = _mount(directory)
        if kind != _HUGETLBFS:
            return cls(directory, kind, mounted_at, _SMALL_PAGE, size, room)
        page = found.f_bsize
        if not found.f_blocks:
            room = _free_huge_pages(page) * page
        return cls(directory, kind, mounted_at, page, size, room)

    @property
    def writable(self) -> bool:
        """Files can be written with write()."""
        return self.kind != _HUGETLBFS

    @property
    def is_memory(self) -> bool:
        """What lies in it counts as memory of the control group that put it there."""
        return self.kind == _TMPFS

    def whole_pages(self, nbytes: int) -> int:
        """Return `nbytes` rounded up to whole pages."""
        return -(-nbytes // self.page_bytes) * self.page_bytes

    def remedy(self, wanted: int, missing: int) -> str:
        """Return the remedy where a pool of `wanted` bytes lacks some; both in whole pages."""
        if not self.writable:
            return (
                f"choose a smaller --cpu-bytes or reserve {wanted // self.page_bytes} huge pages of"
                f" {format_size(self.page_bytes)} (sysctl vm.nr_hugepages)"
            )
        if self.kind == _TMPFS:
            mib = -(-(self.size + missing) // 2**20)
            return (
                "choose a smaller --cpu-bytes or enlarge the filesystem"
                f" (mount -o remount,size={mib}M {self.mounted_at})"
            )
        return (
            f"choose a smaller --cpu-bytes or make room at {self.mounted_at} ({self.kind}); a tmpfs"
            " such as /dev/shm suits a pool better"
        )


def _mount(directory: Path) -> tuple[str, str]:
    """Return type and place of the mount that `directory` is in."""
    place = directory.resolve()
    while not place.is_mount():
        place = place.parent
    kind, sought = "", str(place).translate(_ESCAPED)
    for line in _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        _, mounted_at, found, *_ = line.split(" ")
        if mounted_at == sought:  # the last one covers those before
            kind = found
    return kind, str(place)


def _free_huge_pages(page_bytes: int) -> int:
    try:
        file = _FREE_PAGES / f"hugepages-{page_bytes // 1024}kB" / "free_hugepages"
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The tightest limit on the way from a group up to the root, in bytes.

    Memory files count against the group that first touched them, so `room` is what a pool may take.
    """

    group: Path
    limit: int
    used: int

    @property
    def room(self) -> int:
        """Bytes that are left."""
        return max(0, self.limit - self.used)


def memory_limit(
    pid: int | None = None, root: Path = _GROUPS, proc: Path = Path("/proc")
) -> MemoryLimit | None:
    """Return the limit of process `pid` (None: this one); None where there is none.

    Args:
        pid: in this process's own pid namespace.
        root: where the control groups are mounted.
        proc: where processes are.
    """
    found = []
    for line in _read(proc / (str(pid) if pid else "self") / "cgroup").splitlines():
        number, controllers, name = line.split(":", 2)
        if number == "0" and not controllers:
            base, limit, used = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / name.lstrip("/")
        while group.is_relative_to(base):
            text, current = _read(group / limit).strip(), _read(group / used).strip()
            if text.isdigit() and current.isdigit() and int(text) < _V1_UNLIMITED:
                found.append(MemoryLimit(group, int(text), int(current)))
            group = group.parent
    return min(found, key=lambda each: each.room, default=None)


def available_bytes(pool_dir: Path) -> int:
    """Return the least of available memory, what the control group leaves, room in `pool_dir`."""
    found = os.statvfs(pool_dir)
    limits = [_available_memory(), found.f_bavail * found.f_frsize]
    group = memory_limit()
    if group is not None:
        limits.append(group.room)
    return min(limits)


def _available_memory() -> int:
    """Return the bytes that the machine has without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kib) * 1024


def lack_of_room(filesystem: Filesystem, nbytes: int, held: int) -> str:
    """Return why a pool of `nbytes` does not fit, with figures and remedy; empty where it does.

    Args:
        filesystem: where the pool's file goes.
        nbytes: the pool's size.
        held: bytes that a file there takes now and the pool uses again.
    """
    room, wanted = filesystem.room + held, filesystem.whole_pages(nbytes)
    if room < wanted:
        return (
            f"a pool of {format_size(nbytes)} does not fit {filesystem.directory}, which has"
            f" {format_size(room)} left; {filesystem.remedy(wanted, wanted - room)}"
        )
    group = memory_limit() if filesystem.is_memory else None
    if group is not None and wanted - held > group.limit:
        return (
            f"a pool of {format_size(nbytes)} does not fit the control group {group.group}, which"
            f" may take {format_size(group.limit)}; choose a smaller --cpu-bytes or raise the limit"
            " (memory.max, MemoryMax=, resources.limits.memory)"
        )
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
