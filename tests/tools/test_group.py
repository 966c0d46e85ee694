import subprocess
import sys
import time
from pathlib import Path

import psutil

from kvd_tools.engine_server import RESOURCE_TRACKER, kill_group
from tests.waiting import eventually

# A process with a child of its own, and shared memory that nobody removes.
OWNER = """
import subprocess, sys
from multiprocessing.shared_memory import SharedMemory
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(SharedMemory(create=True, size=4096).name, flush=True)
child.wait()
"""
PATIENCE = 30.0


def test_a_killed_group_leaves_no_shared_memory() -> None:
    """All processes end, and the resource tracker removes what they had in /dev/shm."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert owner.stdout is not None
        memory = Path("/dev/shm", owner.stdout.readline().strip())
        assert memory.is_file()
        # Before its exec the tracker looks like the owner, and would be killed as one.
        children = psutil.Process(owner.pid).children
        eventually(
            lambda: any(RESOURCE_TRACKER in word for c in children() for word in c.cmdline())
        )
        assert kill_group(owner.pid)
        assert owner.wait(PATIENCE) == -9
        end = time.monotonic() + PATIENCE
        while kill_group(owner.pid):
            assert time.monotonic() < end
            time.sleep(0.02)  # nothing tells the end of a process that is no child
        assert not memory.exists()
    finally:
        owner.kill()
        owner.communicate()
