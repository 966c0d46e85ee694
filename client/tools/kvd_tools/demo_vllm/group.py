"""Kill an engine's processes so that they leave nothing in /dev/shm."""

import contextlib
import os

import psutil

# It removes shared memory and semaphores whose owners are gone, and then ends by itself.
RESOURCE_TRACKER = "multiprocessing.resource_tracker"


def kill_group(group: int) -> bool:
    """Kill every process of a process group but Python's resource trackers; this one last.

    Returns:
        Whether the group had a process left, a resource tracker among others.
    """
    members = [process for process in psutil.process_iter() if _is_member(process, group)]
    for process in sorted(members, key=lambda member: member.pid == os.getpid()):
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any(RESOURCE_TRACKER in word for word in process.cmdline()):
                process.kill()
    return bool(members)


def _is_member(process: psutil.Process, group: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    return False
