"""Limits on a pool's size: the machine's memory, the control group, the filesystem.

`PoolLimits` is the only calculation: for a configured size, for `auto`, and for the doctor.

tmpfs (such as /dev/shm): files have any size, and statvfs reports the free space, which may exceed
the machine's memory. hugetlbfs: files consist of whole huge pages, which were set aside from the
machine's memory, and can be mapped but not written with write(). Without a size option of the
mount, statvfs does not report its free space.
"""

import hashlib
import mmap
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvd.machine.numa import has_gpus
from kvd_proto.capacity import PIN_KERNEL_BYTES, pin_kernel_bytes
from kvd_proto.text import format_size

TRAILER_BYTES = 33 * 4096  # behind the chunks in the pool's file, see kvd.cache.recovery
HEADROOM_BYTES = 2**30  # for the daemon's processes; at most half of what is available
ADDRESS_BYTES = 2**30
"""Address space for a child process beside the pool; a tier's was seen to take 780 MiB."""
_HUGETLBFS = "hugetlbfs"
_TMPFS = "tmpfs"
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages")
_MEMINFO = Path("/proc/meminfo")
_MOUNTS = Path("/proc/self/mounts")
_ESCAPED = str.maketrans({c: rf"\{ord(c):03o}" for c in " \t\n\\#"})  # as the kernel writes paths
_CGROUPS = Path("/sys/fs/cgroup")
_V1_UNLIMITED = 2**62  # version 1 writes "no limit" as the largest number of whole pages


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a pool does not fit, with the sizes, and the remedy."""

    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class Filesystem:
    """The filesystem under a directory.

    kind, mounted_at: type and path of its mount.
    page_bytes: file sizes are multiples of it.
    total_bytes, free_bytes: of the filesystem.
    huge_pages: on hugetlbfs: pages of `page_bytes` that the machine has set aside.
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
        status = os.statvfs(directory)
        total_bytes = status.f_blocks * status.f_frsize
        free_bytes = status.f_bavail * status.f_frsize
        kind, mounted_at = _mount(directory)
        if kind != _HUGETLBFS:
            page_bytes = max(4096, mmap.ALLOCATIONGRANULARITY)  # the trailer is mapped separately
            return cls(directory, kind, mounted_at, page_bytes, total_bytes, free_bytes)
        page_bytes = status.f_bsize
        num_pages = _huge_pages(page_bytes, "nr")
        free_page_bytes = _huge_pages(page_bytes, "free") * page_bytes
        if not status.f_blocks:  # the mount has no size option
            total_bytes, free_bytes = num_pages * page_bytes, free_page_bytes
        free_bytes = min(free_bytes, free_page_bytes)
        return cls(directory, kind, mounted_at, page_bytes, total_bytes, free_bytes, num_pages)

    @property
    def writable(self) -> bool:
        """Whether files can be written with write()."""
        return self.kind != _HUGETLBFS

    @property
    def is_memory(self) -> bool:
        """Whether files lie in memory only."""
        return self.kind in (_TMPFS, _HUGETLBFS)

    def whole_pages(self, nbytes: int) -> int:
        """Return `nbytes` rounded up to whole pages."""
        return -(-nbytes // self.page_bytes) * self.page_bytes


def _mount(directory: Path) -> tuple[str, str]:
    """Return filesystem type and path of the mount that contains `directory`."""
    mount_point = directory.resolve()
    while not mount_point.is_mount():
        mount_point = mount_point.parent
    kind, escaped = "", str(mount_point).translate(_ESCAPED)
    for line in _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        _, mounted_at, fs_type, *_ = line.split(" ")
        if mounted_at == escaped:  # the last mount covers earlier ones
            kind = fs_type
    return kind, str(mount_point)


def _pages_file(page_bytes: int, which: str) -> Path:
    return _HUGE_PAGES / f"hugepages-{page_bytes // 1024}kB" / f"{which}_hugepages"


def _huge_pages(page_bytes: int, which: str) -> int:
    text = _read(_pages_file(page_bytes, which)).strip()
    return int(text) if text.isdigit() else 0


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Memory of the machine in bytes, without swap and huge pages.

    available: without swapping; includes the page cache.
    """

    total: int
    available: int

    @classmethod
    def read(cls) -> Self:
        """Return the current values of /proc/meminfo."""
        fields = {}
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) * 1024
        return cls(fields["MemTotal"] - fields.get("Hugetlb", 0), fields["MemAvailable"])


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The tightest memory limit of a control group and its ancestors, in bytes.

    Memory files count against the group that first touched them: a kept pool may count against the
    previous daemon's group.

    used: without the page cache, which the kernel drops before it kills processes.
    """

    group: Path
    limit: int
    used: int

    @property
    def free_bytes(self) -> int:
        """Bytes up to the limit."""
        return max(0, self.limit - self.used)


def memory_limit(
    pid: int | None = None, root: Path = _CGROUPS, proc: Path = Path("/proc")
) -> MemoryLimit | None:
    """Return the limit of process `pid` (None: this one); None if it has none.

    Args:
        pid: in this process's own pid namespace.
        root: mount point of the control groups.
        proc: mount point of procfs.
    """
    limits = []
    for line in _read(proc / (str(pid) if pid else "self") / "cgroup").splitlines():
        hierarchy, controllers, name = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            base, limit_file, usage_file, prefix = root, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            base, prefix = root / "memory", "total_"
            limit_file, usage_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / name.lstrip("/")
        while group.is_relative_to(base):
            limit_text = _read(group / limit_file).strip()
            usage_text = _read(group / usage_file).strip()
            if limit_text.isdigit() and usage_text.isdigit() and int(limit_text) < _V1_UNLIMITED:
                used = max(0, int(usage_text) - _page_cache(group, prefix))
                limits.append(MemoryLimit(group, int(limit_text), used))
            group = group.parent
    return min(limits, key=lambda candidate: candidate.free_bytes, default=None)


def _page_cache(group: Path, prefix: str) -> int:
    """Return the bytes of a group's page cache, without tmpfs files."""
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    fields = (line.split() for line in _read(group / "memory.stat").splitlines())
    return sum(int(value) for name, value in fields if name in names)


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """A limit of a process that bounds the pool; see setrlimit(2).

    pool_bytes: of the largest pool that it allows, without the trailer.
    needs: what else counts against it; empty if nothing.
    remedy: how to raise it.
    """

    name: str
    limit: int
    pool_bytes: int
    needs: str
    remedy: str


def resource_limit(pid: int | None = None) -> ResourceLimit | None:
    """Return the tightest resource limit of process `pid` (None: this one); None if it has none."""
    limits = []
    for name, number, nbytes, needs in (
        ("AS", resource.RLIMIT_AS, ADDRESS_BYTES, "a lane maps the pool and takes {} itself"),
        ("FSIZE", resource.RLIMIT_FSIZE, TRAILER_BYTES, "the pool's file has {} more"),
    ):
        limit, _ = resource.prlimit(pid or 0, number)
        if limit != resource.RLIM_INFINITY:
            flag = "-v" if name == "AS" else "-f"
            limits.append(
                ResourceLimit(
                    f"RLIMIT_{name}",
                    limit,
                    max(0, limit - nbytes),
                    needs.format(format_size(nbytes)),
                    f"raise it: Limit{name}=infinity in the unit, ulimit {flag} unlimited",
                )
            )
    return min(limits, key=lambda candidate: candidate.pool_bytes, default=None)


def _without_headroom(nbytes: int) -> int:
    return nbytes - min(HEADROOM_BYTES, nbytes // 2)


def size_as_setting(nbytes: int) -> str:
    """Return `nbytes` as a setting's text, rounded down to GiB, or to MiB below 4 GiB."""
    return f"{nbytes // 2**30}GiB" if nbytes >= 2**32 else f"{nbytes // 2**20}MiB"


def pool_directory_name(*paths: Path) -> str:
    """Return the directory name of a pool, derived from its runtime directory or several paths."""
    digest = hashlib.blake2b(b"\0".join(map(os.fsencode, paths)), digest_size=6).hexdigest()
    return f"kvd-{digest}"


def allocated_bytes(pool_file: Path) -> int:
    """Return the memory that a pool's file takes now, 0 without a file."""
    try:
        return pool_file.lstat().st_blocks * 512
    except (FileNotFoundError, NotADirectoryError):
        return 0


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits on the size of a pool.

    `HEADROOM_BYTES` of the machine and of the control group stay free for the daemon's processes. A
    pool in huge pages takes none of that memory. Pinning a pool takes kernel memory, which counts
    against the machine only.

    existing_bytes: memory that the pool's file takes already. It is reused, so a pool of at most
        this size always fits.
    pinning_lanes: number of lanes that pin the whole pool; lanes whose arenas divide it count as
        one.
    resource_limit: of the daemon's processes.
    """

    filesystem: Filesystem
    memory: MachineMemory
    group: MemoryLimit | None
    existing_bytes: int
    pinning_lanes: int = 0
    resource_limit: ResourceLimit | None = None

    @classmethod
    def of(cls, pool_dir: Path, existing_bytes: int, pinning_lanes: int | None = None) -> Self:
        """Return the current limits of a pool in `pool_dir`, for this process.

        Args:
            pool_dir: directory of pools.
            existing_bytes: memory that the pool's file takes already.
            pinning_lanes: None if the ranks are unknown: then one if GPUs are visible.
        """
        lanes = int(has_gpus()) if pinning_lanes is None else pinning_lanes
        return cls(
            Filesystem.of(pool_dir),
            MachineMemory.read(),
            memory_limit(),
            existing_bytes,
            lanes,
            resource_limit(),
        )

    @property
    def largest(self) -> int:
        """Bytes of the largest pool that fits now, without the trailer."""
        free_bytes = self.filesystem.free_bytes
        if self._counts_as_memory and self.group is not None:
            free_bytes = min(free_bytes, _without_headroom(self.group.free_bytes))
        existing_bytes = self.existing_bytes - self.filesystem.whole_pages(TRAILER_BYTES)
        by_machine = self._largest_of_machine(existing_bytes)
        largest = max(0, existing_bytes, min(existing_bytes + free_bytes, by_machine))
        return (
            largest if self.resource_limit is None else min(largest, self.resource_limit.pool_bytes)
        )

    def _largest_of_machine(self, existing_bytes: int) -> int:
        """Return the largest pool that fits the machine's memory together with its pins."""
        available = _without_headroom(self.memory.available)
        pin_bytes_per_gib = self.pinning_lanes * PIN_KERNEL_BYTES
        if self._counts_as_memory:
            nbytes = (existing_bytes + available) * 2**30 // (2**30 + pin_bytes_per_gib)
        else:
            nbytes = available * 2**30 // pin_bytes_per_gib if pin_bytes_per_gib else sys.maxsize
        return nbytes // self.filesystem.page_bytes * self.filesystem.page_bytes

    def pin_bytes(self, nbytes: int) -> int:
        """Return the kernel memory that pinning a pool of `nbytes` takes."""
        return pin_kernel_bytes(self.filesystem.whole_pages(nbytes), self.pinning_lanes)

    def shortage(self, nbytes: int) -> Shortage | None:
        """Return why a pool of `nbytes` does not fit, or None; the machine's memory comes first."""
        return (
            self.machine_shortage(nbytes)
            or self.cgroup_shortage(nbytes)
            or self.filesystem_shortage(nbytes)
            or self.resource_shortage(nbytes)
        )

    def machine_shortage(self, nbytes: int) -> Shortage | None:
        """Return why a pool of `nbytes` exceeds the machine's memory, or None."""
        missing, pin_bytes = self._missing(nbytes), self.pin_bytes(nbytes)
        if not missing:
            return None
        existing_bytes = self.existing_bytes
        if not self._counts_as_memory:
            missing = existing_bytes = 0
        available = self.memory.available
        usable = _without_headroom(available)
        if missing + pin_bytes <= usable:
            return None
        remedy = ""
        if missing + pin_bytes <= self.memory.total - existing_bytes - HEADROOM_BYTES:
            remedy = "end other processes first"
        pin_text = f", and {format_size(pin_bytes)} for pinning it" if pin_bytes else ""
        return Shortage(
            f"a pool of {format_size(nbytes)} does not fit the machine's memory:"
            f" {format_size(available)} of {format_size(self.memory.total)} are"
            f" available{self._existing_text}, of which {format_size(available - usable)} are for"
            f" kvd's own processes{pin_text}",
            self._remedy(remedy),
        )

    def cgroup_shortage(self, nbytes: int) -> Shortage | None:
        """Return why a pool of `nbytes` exceeds the control group's limit, or None."""
        group, missing = self.group, self._missing(nbytes)
        if group is None or not missing or not self._counts_as_memory:
            return None
        usable = _without_headroom(group.free_bytes)
        if missing <= usable:
            return None
        remedy = ""
        if self.machine_shortage(nbytes) is None:
            limit = -(-(group.used + missing + HEADROOM_BYTES) // 2**20)
            remedy = (
                f"raise the limit to {limit} MiB (memory.max, MemoryMax=, resources.limits.memory)"
            )
        return Shortage(
            f"a pool of {format_size(nbytes)} does not fit the control group {group.group}:"
            f" {format_size(group.free_bytes)} of {format_size(group.limit)} are"
            f" left{self._existing_text}, of which {format_size(group.free_bytes - usable)} are for"
            " kvd's own processes",
            self._remedy(remedy),
        )

    def filesystem_shortage(self, nbytes: int) -> Shortage | None:
        """Return why a pool of `nbytes` exceeds the filesystem, or None."""
        filesystem = self.filesystem
        missing = self._missing(nbytes) - filesystem.free_bytes
        if missing <= 0:
            return None
        return Shortage(
            f"a pool of {format_size(nbytes)} does not fit {filesystem.directory}"
            f" ({filesystem.kind}): {format_size(filesystem.free_bytes)} of"
            f" {format_size(filesystem.total_bytes)} are left{self._existing_text}",
            self._remedy(self._filesystem_remedy(nbytes, missing)),
        )

    def resource_shortage(self, nbytes: int) -> Shortage | None:
        """Return why a pool of `nbytes` exceeds a limit of the daemon's processes, or None."""
        limit = self.resource_limit
        if limit is None or nbytes <= limit.pool_bytes:
            return None
        return Shortage(
            f"a pool of {format_size(nbytes)} does not fit {limit.name}, which is"
            f" {format_size(limit.limit)}: {limit.needs}",
            self._remedy(limit.remedy),
        )

    def medium_problem(self) -> Shortage | None:
        """Return why the filesystem does not suit a pool, or None."""
        if self.filesystem.is_memory:
            return None
        return Shortage(
            f"pool_dir = {self.filesystem.directory} is on {self.filesystem.kind} at"
            f" {self.filesystem.mounted_at}, which is not in memory: the pool is slow there, and"
            " GPUs may not pin it",
            "use a tmpfs such as /dev/shm, or a mounted hugetlbfs",
        )

    def reserve_shortage(self, reserve: int) -> Shortage | None:
        """Return why `auto` leaves nothing for a pool, or None."""
        if reserve < self.largest:
            return None
        return Shortage(
            f"reserve = {format_size(reserve)} leaves nothing to a pool of cpu_bytes = auto, which"
            f" could have {format_size(self.largest)} now: nothing is cached",
            "choose a smaller --reserve or free memory",
        )

    @property
    def _counts_as_memory(self) -> bool:
        """Whether the pool takes available memory: not on disks, nor in huge pages."""
        return self.filesystem.kind == _TMPFS

    def _missing(self, nbytes: int) -> int:
        """Return the memory that a pool of `nbytes` takes in addition; 0 for a pool of 0 bytes."""
        if not nbytes:
            return 0
        filesystem = self.filesystem
        file_bytes = filesystem.whole_pages(nbytes) + filesystem.whole_pages(TRAILER_BYTES)
        return max(0, file_bytes - self.existing_bytes)

    @property
    def _existing_text(self) -> str:
        return (
            f" beside the {format_size(self.existing_bytes)} of the kept pool"
            if self.existing_bytes
            else ""
        )

    def _remedy(self, alternative: str) -> str:
        """Return the remedies as text: a smaller pool if one fits, and `alternative` if any."""
        remedies = [alternative] if alternative else []
        if self.largest >= 2**20:
            remedies.insert(0, f"choose --cpu-bytes {size_as_setting(self.largest)} or less")
        return ", or ".join(remedies) or "free memory first: no smaller pool fits either"

    def _filesystem_remedy(self, nbytes: int, missing: int) -> str:
        """Return how to enlarge the filesystem; empty if there is no memory for it."""
        filesystem = self.filesystem
        if filesystem.kind == _HUGETLBFS:
            pages = -(-missing // filesystem.page_bytes)
            if pages * filesystem.page_bytes > _without_headroom(self.memory.available):
                return ""
            num_pages = filesystem.huge_pages + pages
            sysfs_file = _pages_file(filesystem.page_bytes, "nr")
            return (
                f"set huge pages of {format_size(filesystem.page_bytes)} aside: echo {num_pages} >"
                f" {sysfs_file}, early after boot, before memory is fragmented; a size= of the"
                " mount must not be smaller"
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
