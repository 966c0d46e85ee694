"""Pages in this process's page table, before a copy needs them."""

import mmap
import os
from pathlib import Path

import numpy as np

from kvd.lane.device import MemoryPretouch
from tests.lane.support import Memory

PAGE = mmap.PAGESIZE
SIZE = 5 * 2**20 + PAGE


def mapped(memory: Memory) -> memoryview:
    """Another mapping of it, as a lane has one."""
    return memoryview(mmap.mmap(memory.fd, SIZE))


def resident(view: memoryview) -> int:
    """KiB of a mapping that are in the page table."""
    address = f"{np.frombuffer(view, np.uint8).ctypes.data:x}-"
    lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(address))
    return next(int(line.split()[1]) for line in lines[first:] if line.startswith("Rss:"))


def test_what_is_there_is_mapped_up_to_the_last_page() -> None:
    """No copy into a worker's memory has to wait for a page that it has already."""
    memory = Memory(SIZE)
    memory.bytes[::PAGE] = 1
    view = mapped(memory)
    assert resident(view) == 0
    touch = MemoryPretouch([view])
    touch.thread.join()
    assert resident(view) == SIZE // 1024
    touch.stop()
    memory.close()


def test_what_is_not_there_is_not_allocated() -> None:
    """Pages that a worker has not used stay free, and are not charged to the lane."""
    memory = Memory(SIZE)
    memory.bytes[3 * PAGE] = 1
    touch = MemoryPretouch([mapped(memory)])
    touch.thread.join()
    assert os.fstat(memory.fd).st_blocks * 512 == PAGE
    memory.close()
