"""What kind of filesystem a pool may lie on, and how much it has to give.

tmpfs (such as /dev/shm) takes files of any size and has room as statvfs says. hugetlbfs
hands out huge pages: files are whole pages long, can be mapped but not written with
write(), and without a size option of the mount statvfs knows nothing of the room.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvd_proto.sizes import format_size

_HUGETLBFS = "hugetlbfs"
_TMPFS = "tmpfs"
_FREE_PAGES = Path("/sys/kernel/mm/hugepages")
_SMALL_PAGE = 4096


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
    place = str(directory.resolve())
    nearest = max(
        (
            part
            for part in reversed(psutil.disk_partitions(all=True))  # the last one is on top
            if Path(place).is_relative_to(part.mountpoint)
        ),
        key=lambda part: len(part.mountpoint),
        default=None,
    )
    if nearest is None:
        return "", "/"
    return str(nearest.fstype), str(nearest.mountpoint)


def _free_huge_pages(page_bytes: int) -> int:
    try:
        file = _FREE_PAGES / f"hugepages-{page_bytes // 1024}kB" / "free_hugepages"
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
