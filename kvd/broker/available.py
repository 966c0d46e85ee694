"""How much memory this machine, or this container, still has to give."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(pool_dir: Path) -> int:
    """The least of: available memory, what the cgroup leaves, room in `pool_dir`."""
    limits = [int(psutil.virtual_memory().available), int(psutil.disk_usage(str(pool_dir)).free)]
    cgroup = _cgroup_left(_own_cgroup())
    if cgroup is not None:
        limits.append(cgroup)
    return min(limits)


def _own_cgroup() -> Path:
    try:
        for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
            if line.startswith("0::"):
                return _CGROUP / line[3:].lstrip("/")
    except OSError:
        pass
    return _CGROUP


def _cgroup_left(group: Path) -> int | None:
    """The tightest memory.max - memory.current from `group` up to the root, if any is set."""
    left: int | None = None
    while group.is_relative_to(_CGROUP):
        try:
            limit = (group / "memory.max").read_text(encoding="ascii").strip()
            if limit != "max":
                used = int((group / "memory.current").read_text(encoding="ascii"))
                room = max(0, int(limit) - used)
                left = room if left is None else min(left, room)
        except (OSError, ValueError):
            pass
        group = group.parent
    return left
