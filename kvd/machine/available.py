"""How much memory this machine, or this container, still has to give."""

from pathlib import Path

import psutil

from kvd.machine.cgroup import memory_limit


def available_bytes(pool_dir: Path) -> int:
    """The least of: available memory, what the control group leaves, room in `pool_dir`."""
    limits = [int(psutil.virtual_memory().available), int(psutil.disk_usage(str(pool_dir)).free)]
    group = memory_limit()
    if group is not None:
        limits.append(group.room)
    return min(limits)
