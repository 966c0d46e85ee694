"""Memory that is left to a process: its control group's limit, in both versions, and the rest."""

from dataclasses import dataclass
from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")
_V1_UNLIMITED = 2**62  # version 1 writes "no limit" as the largest number of whole pages


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
    pid: int | None = None, root: Path = _ROOT, proc: Path = Path("/proc")
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
    limits = [int(psutil.virtual_memory().available), int(psutil.disk_usage(str(pool_dir)).free)]
    group = memory_limit()
    if group is not None:
        limits.append(group.room)
    return min(limits)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
