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
_FREE_PAGES = Path("/sys/kernel/mm/hugepages")
_SMALL_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Filesystem:
    """The filesystem under a directory.

    page_bytes: what files in it are multiples of.
    room: bytes that are left in it.
    writable: files can be written with write().
    """

    page_bytes: int
    room: int
    writable: bool

    @classmethod
    def of(cls, directory: Path) -> "Filesystem":
        """Look at the filesystem that `directory` is on."""
        found = os.statvfs(directory)
        room = found.f_bavail * found.f_frsize
        if _kind(directory) != _HUGETLBFS:
            return cls(_SMALL_PAGE, room, writable=True)
        page = found.f_bsize
        if not found.f_blocks:
            room = _free_huge_pages(page) * page
        return cls(page, room, writable=False)

    def whole_pages(self, nbytes: int) -> int:
        """`nbytes` rounded up to whole pages."""
        return -(-nbytes // self.page_bytes) * self.page_bytes

    def remedy(self, nbytes: int, directory: Path) -> str:
        """What to do where `nbytes` do not fit."""
        if self.writable:
            return (
                "choose a smaller --cpu-bytes or enlarge the filesystem"
                f" (mount -o remount,size=… {directory})"
            )
        pages = self.whole_pages(nbytes) // self.page_bytes
        return (
            f"choose a smaller --cpu-bytes or reserve {pages} huge pages of"
            f" {format_size(self.page_bytes)} (sysctl vm.nr_hugepages)"
        )


def _kind(directory: Path) -> str:
    """The type of the filesystem that is mounted nearest above `directory`."""
    place = str(directory.resolve())
    nearest = max(
        (
            part
            for part in psutil.disk_partitions(all=True)
            if Path(place).is_relative_to(part.mountpoint)
        ),
        key=lambda part: len(part.mountpoint),
        default=None,
    )
    return str(nearest.fstype) if nearest is not None else ""


def _free_huge_pages(page_bytes: int) -> int:
    try:
        file = _FREE_PAGES / f"hugepages-{page_bytes // 1024}kB" / "free_hugepages"
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
