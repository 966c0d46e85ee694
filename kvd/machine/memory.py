"""How much memory a pool may take: of the machine, of the control group, of its filesystem.

`PoolLimits` is the one calculation: for a fixed size, for `auto`, and for the doctor.

tmpfs (such as /dev/shm) takes files of any size and has room as statvfs says, even where that
is more than the machine has memory. hugetlbfs hands out huge pages: files are whole pages long,
can be mapped but not written with write(), and their pages were taken from the machine's memory
before; without a size option of the mount statvfs knows nothing of the room.
"""

import hashlib
import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvd.machine.numa import has_gpus
from kvd_proto.capacity import PIN_KERNEL_BYTES, pin_kernel_bytes
from kvd_proto.text import format_size

TRAILER_BYTES = 33 * 4096  # behind the chunks in the pool's file, see kvd.cache.recovery
HEADROOM = 2**30  # for the daemon's own processes; half of the memory where there is little
_HUGETLBFS = "hugetlbfs"
_TMPFS = "tmpfs"
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages")
_MEMINFO = Path("/proc/meminfo")
_MOUNTS = Path("/proc/self/mounts")
_ESCAPED = str.maketrans({c: rf"\{ord(c):03o}" for c in " \t\n\\#"})  # as the kernel writes paths
_GROUPS = Path("/sys/fs/cgroup")
_V1_UNLIMITED = 2**62  # version 1 writes "no limit" as the largest number of whole pages


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a pool does not fit, with the figures, and the remedy."""

    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class Filesystem:
    """The filesystem under a directory.

    kind, mounted_at: as the kernel lists it.
    page_bytes: what files in it are multiples of.
    total_bytes, free_bytes: of the filesystem.
    huge_pages: of hugetlbfs: how many pages of `page_bytes` the machine has set aside.
    """

    directory: Path
    kind: str
    mounted_at: str
    page_bytes: int
    total_bytes: int
    free_bytes: int
    huge_pages: int = 0

    @classmethod
    def of(cls, directory: Path) -> Self:
        """Return the filesystem that `directory` is on."""
        found = os.statvfs(directory)
        total_bytes = found.f_blocks * found.f_frsize
        free_bytes = found.f_bavail * found.f_frsize
        kind, mounted_at = _mount(directory)
        if kind != _HUGETLBFS:
            page = max(4096, mmap.ALLOCATIONGRANULARITY)  # the trailer is mapped by itself
            return cls(directory, kind, mounted_at, page, total_bytes, free_bytes)
        page = found.f_bsize
        num_pages, free_page_bytes = _huge_pages(page, "nr"), _huge_pages(page, "free") * page
        if not found.f_blocks:  # the mount has no size option
            total_bytes, free_bytes = num_pages * page, free_page_bytes
        free_bytes = min(free_bytes, free_page_bytes)
        return cls(directory, kind, mounted_at, page, total_bytes, free_bytes, num_pages)

    @property
    def writable(self) -> bool:
        """Files can be written with write()."""
        return self.kind != _HUGETLBFS

    @property
    def is_memory(self) -> bool:
        """Its files lie in memory, and nowhere else."""
        return self.kind in (_TMPFS, _HUGETLBFS)

    def whole_pages(self, nbytes: int) -> int:
        """Return `nbytes` rounded up to whole pages."""
        return -(-nbytes // self.page_bytes) * self.page_bytes


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


def _pages_file(page_bytes: int, which: str) -> Path:
    return _HUGE_PAGES / f"hugepages-{page_bytes // 1024}kB" / f"{which}_hugepages"


def _huge_pages(page_bytes: int, which: str) -> int:
    text = _read(_pages_file(page_bytes, which)).strip()
    return int(text) if text.isdigit() else 0


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Memory of the machine in bytes, without swap and without the huge pages set aside.

    available: what can be had without swapping; the page cache counts as available.
    """

    total: int
    available: int

    @classmethod
    def read(cls) -> Self:
        """Return what the kernel says now."""
        fields = {}
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) * 1024
        return cls(fields["MemTotal"] - fields.get("Hugetlb", 0), fields["MemAvailable"])


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The tightest limit on the way from a group up to the root, in bytes.

    Memory files count against the group that first touched them: a kept pool may count against
    the group of the daemon before.

    used: without the page cache, which the kernel drops before it kills.
    """

    group: Path
    limit: int
    used: int

    @property
    def free_bytes(self) -> int:
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
            base, limit, used, prefix = root, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            base, prefix = root / "memory", "total_"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / name.lstrip("/")
        while group.is_relative_to(base):
            text, current = _read(group / limit).strip(), _read(group / used).strip()
            if text.isdigit() and current.isdigit() and int(text) < _V1_UNLIMITED:
                in_use = max(0, int(current) - _page_cache(group, prefix))
                found.append(MemoryLimit(group, int(text), in_use))
            group = group.parent
    return min(found, key=lambda each: each.free_bytes, default=None)


def _page_cache(group: Path, prefix: str) -> int:
    """Return the bytes of files on disks that count against a group; those of tmpfs do not."""
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    fields = (line.split() for line in _read(group / "memory.stat").splitlines())
    return sum(int(value) for name, value in fields if name in names)


def _without_headroom(nbytes: int) -> int:
    return nbytes - min(HEADROOM, nbytes // 2)


def size_as_setting(nbytes: int) -> str:
    """Return a size as a setting is written, not above `nbytes`: whole GiB, or MiB below 4 GiB."""
    return f"{nbytes // 2**30}GiB" if nbytes >= 2**32 else f"{nbytes // 2**20}MiB"


def pool_directory_name(*paths: Path) -> str:
    """Return the name of the directory that belongs to a runtime directory, or to several paths."""
    digest = hashlib.blake2b(b"\0".join(map(os.fsencode, paths)), digest_size=6).hexdigest()
    return f"kvd-{digest}"


def allocated_bytes(pool_file: Path) -> int:
    """Return the memory that a pool's file takes now, which the next daemon uses again."""
    try:
        return pool_file.lstat().st_blocks * 512
    except (FileNotFoundError, NotADirectoryError):
        return 0


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What limits the size of a pool.

    `HEADROOM` is left to the daemon's own processes, of the machine and of the control group.
    A pool in huge pages takes none of that memory. To pin a pool takes kernel memory, which counts
    against the machine's memory alone.

    existing_bytes: that the pool's file takes already. They are used again, so a pool that is no
        larger fits in any case.
    pinning_lanes: how many lanes pin all of the pool; those whose arenas divide it are one.
    """

    filesystem: Filesystem
    memory: MachineMemory
    group: MemoryLimit | None
    existing_bytes: int
    pinning_lanes: int = 0

    @classmethod
    def of(cls, pool_dir: Path, existing_bytes: int, pinning_lanes: int | None = None) -> Self:
        """Return the limits of a pool in `pool_dir`, as they are now, for this process.

        Args:
            pool_dir: where it goes.
            existing_bytes: that its file takes already.
            pinning_lanes: None where the ranks are not known: one where GPUs can be seen.
        """
        lanes = int(has_gpus()) if pinning_lanes is None else pinning_lanes
        return cls(
            Filesystem.of(pool_dir), MachineMemory.read(), memory_limit(), existing_bytes, lanes
        )

    @property
    def largest(self) -> int:
        """Bytes of the largest pool that fits now, without the trailer of its file."""
        rooms = [self.filesystem.free_bytes]
        if self._counts_as_memory and self.group is not None:
            rooms.append(_without_headroom(self.group.free_bytes))
        trailer = self.filesystem.whole_pages(TRAILER_BYTES)
        held = self.existing_bytes - trailer
        return max(0, held, min(held + min(rooms), self._largest_of_machine(held)))

    def _largest_of_machine(self, held: int) -> int:
        """The same by the machine's memory alone, with `held` bytes there: pool and pins fit."""
        room, pins = (
            _without_headroom(self.memory.available),
            self.pinning_lanes * PIN_KERNEL_BYTES,
        )
        if self._counts_as_memory:
            most = (held + room) * 2**30 // (2**30 + pins)
        else:
            most = room * 2**30 // pins if pins else sys.maxsize
        return most // self.filesystem.page_bytes * self.filesystem.page_bytes

    def pin_bytes(self, nbytes: int) -> int:
        """Return the kernel memory that a pool of `nbytes` takes when it is pinned."""
        return pin_kernel_bytes(self.filesystem.whole_pages(nbytes), self.pinning_lanes)

    def shortage(self, nbytes: int) -> Shortage | None:
        """Return why a pool of `nbytes` does not fit, the machine's memory first."""
        return (
            self.machine_shortage(nbytes)
            or self.cgroup_shortage(nbytes)
            or self.filesystem_shortage(nbytes)
        )

    def machine_shortage(self, nbytes: int) -> Shortage | None:
        """Return why the machine's memory is too small."""
        missing, pins = self._missing(nbytes), self.pin_bytes(nbytes)
        if not missing:
            return None
        held = self.existing_bytes
        if not self._counts_as_memory:
            missing = held = 0
        available = self.memory.available
        room = _without_headroom(available)
        if missing + pins <= room:
            return None
        others = ""
        if missing + pins <= self.memory.total - held - HEADROOM:
            others = "end other processes first"
        to_pin = f", and {format_size(pins)} for pinning it" if pins else ""
        return Shortage(
            f"a pool of {format_size(nbytes)} does not fit the machine's memory:"
            f" {format_size(available)} of {format_size(self.memory.total)} are"
            f" available{self._and_held}, of which {format_size(available - room)} are for kvd's"
            f" own processes{to_pin}",
            self._remedy(others),
        )

    def cgroup_shortage(self, nbytes: int) -> Shortage | None:
        """Return why the control group's limit is too low."""
        group, missing = self.group, self._missing(nbytes)
        if group is None or not missing or not self._counts_as_memory:
            return None
        room = _without_headroom(group.free_bytes)
        if missing <= room:
            return None
        raised = ""
        if self.machine_shortage(nbytes) is None:
            limit = -(-(group.used + missing + HEADROOM) // 2**20)
            raised = (
                f"raise the limit to {limit} MiB (memory.max, MemoryMax=, resources.limits.memory)"
            )
        return Shortage(
            f"a pool of {format_size(nbytes)} does not fit the control group {group.group}:"
            f" {format_size(group.free_bytes)} of {format_size(group.limit)} are"
            f" left{self._and_held}, of which {format_size(group.free_bytes - room)} are for kvd's"
            " own processes",
            self._remedy(raised),
        )

    def filesystem_shortage(self, nbytes: int) -> Shortage | None:
        """Return why the filesystem is too small."""
        filesystem = self.filesystem
        missing = self._missing(nbytes) - filesystem.free_bytes
        if missing <= 0:
            return None
        return Shortage(
            f"a pool of {format_size(nbytes)} does not fit {filesystem.directory}"
            f" ({filesystem.kind}): {format_size(filesystem.free_bytes)} of"
            f" {format_size(filesystem.total_bytes)} are left{self._and_held}",
            self._remedy(self._enlarged(nbytes, missing)),
        )

    def warnings(self, reserve: int | None) -> list[str]:
        """Return what a start says of a pool that can be made, but hardly as it was meant.

        Args:
            reserve: bytes that `auto` leaves to others; None where the size is fixed.
        """
        doubts = [
            self.medium_problem(),
            self.reserve_shortage(reserve) if reserve is not None else None,
        ]
        return [str(doubt) for doubt in doubts if doubt is not None]

    def medium_problem(self) -> Shortage | None:
        """Return why the filesystem is none for a pool."""
        if self.filesystem.is_memory:
            return None
        return Shortage(
            f"pool_dir = {self.filesystem.directory} is on {self.filesystem.kind} at"
            f" {self.filesystem.mounted_at}, which is no memory: the pool is slow there, and GPUs"
            " may not pin it",
            "use a tmpfs such as /dev/shm, or a mounted hugetlbfs",
        )

    def reserve_shortage(self, reserve: int) -> Shortage | None:
        """Return why `auto` makes no pool."""
        if reserve < self.largest:
            return None
        return Shortage(
            f"reserve = {format_size(reserve)} leaves nothing to a pool of cpu_bytes = auto, which"
            f" could have {format_size(self.largest)} now: nothing is cached",
            "choose a smaller --reserve or free memory",
        )

    @property
    def _counts_as_memory(self) -> bool:
        """Of a disk the kernel writes pages back; huge pages were taken from memory before."""
        return self.filesystem.kind == _TMPFS

    def _missing(self, nbytes: int) -> int:
        """Return the bytes that a pool of `nbytes` still takes; none where it is of 0 bytes."""
        if not nbytes:
            return 0
        filesystem = self.filesystem
        whole = filesystem.whole_pages(nbytes) + filesystem.whole_pages(TRAILER_BYTES)
        return max(0, whole - self.existing_bytes)

    @property
    def _and_held(self) -> str:
        return (
            f" beside the {format_size(self.existing_bytes)} of the kept pool"
            if self.existing_bytes
            else ""
        )

    def _remedy(self, other: str) -> str:
        """Join the ways out: a smaller pool, where one fits, and `other`, where it is one."""
        ways = [other] if other else []
        if self.largest >= 2**20:
            ways.insert(0, f"choose --cpu-bytes {size_as_setting(self.largest)} or less")
        return ", or ".join(ways) or "free memory first: no smaller pool fits either"

    def _enlarged(self, nbytes: int, missing: int) -> str:
        """How the filesystem can be made larger, where there is memory for that."""
        filesystem = self.filesystem
        if filesystem.kind == _HUGETLBFS:
            pages = -(-missing // filesystem.page_bytes)
            if pages * filesystem.page_bytes > _without_headroom(self.memory.available):
                return ""
            total, file = filesystem.huge_pages + pages, _pages_file(filesystem.page_bytes, "nr")
            return (
                f"set huge pages of {format_size(filesystem.page_bytes)} aside: echo {total} >"
                f" {file}, early after boot, before memory is in small pieces; a size= of the mount"
                " must not be smaller"
            )
        if filesystem.kind != _TMPFS:
            return f"make room at {filesystem.mounted_at}"
        if self.machine_shortage(nbytes) is not None:
            return ""
        mib = -(-(filesystem.total_bytes + missing) // 2**20)
        return (
            f"enlarge it: mount -o remount,size={mib}M {filesystem.mounted_at}; in Docker"
            " --shm-size, in Kubernetes a larger emptyDir with medium: Memory"
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
