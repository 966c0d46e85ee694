import subprocess
import sys
import time
from pathlib import Path

from kvd_tools.demo_vllm.engine import kill_group

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
