import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvd.errors import ImportFailed, PoolError
from kvd.lane.device import Direction, MemoryId
from kvd.lane.host_device import HostDevice
from kvd.lane.pretouch import SHORT_STEP, MemoryPretouch
from kvd.lane.workers import map_control_page
from kvd_client.memory import sealed_file
from kvd_proto import copies
from kvd_proto.jobs import FEW
from kvd_proto.messages import HostHandle
from tests.lane.device_contract import Bytes, DeviceContract, Rig, Source, drain
from tests.lane.support import Memory
from tests.waiting import eventually


class HostRig(Rig):
    """Memory files that are read and written with pread and pwrite."""

    def __init__(self) -> None:
        self.pool = Memory(2**20)
        self.device = HostDevice(self.pool.fd, 2**20)
        self.files = [self.pool]

    def make_worker(self, sizes: Sequence[int]) -> Source:
        """One file for all storages, each behind a 64-byte gap."""
        file = Memory(sum(sizes) + 64 * len(sizes))
        self.files.append(file)
        starts = [sum(sizes[:index]) + 64 * (index + 1) for index in range(len(sizes))]
        # Descriptor 0 stands for the control page, which is not the device's business.
        handles = tuple(HostHandle(1, start) for start in starts)
        return Source(handles, (self.pool.fd, file.fd), starts)

    def spoil(self, source: Source) -> Source:
        """A place behind the file's end."""
        return replace(source, handles=(*source.handles[:-1], HostHandle(1, 2**40)))

    def get(self, source: Source, storage: int, offset: int, nbytes: int) -> Bytes:
        """By pread."""
        place = source.addresses[storage] + offset
        return np.frombuffer(os.pread(source.descriptors[1], nbytes, place), np.uint8)

    def put(self, source: Source, storage: int, offset: int, data: Bytes) -> None:
        """By pwrite."""
        place = source.addresses[storage] + offset
        assert os.pwrite(source.descriptors[1], data.tobytes(), place) == len(data)

    def close(self) -> None:
        """Unmap and close."""
        drain(self.device)
        self.device.close()
        for file in self.files:
            file.close()


@pytest.fixture
def host() -> Iterator[HostRig]:
    """A backend of its own."""
    made = HostRig()
    yield made
    made.close()


@pytest.mark.parametrize("few", [FEW, 0], ids=["few runs", "many runs"])
class TestHostDevice(DeviceContract):
    """The host backend keeps the contract, whether it takes a transfer's runs for few or many."""

    @pytest.fixture(autouse=True)
    def limit(self, monkeypatch: pytest.MonkeyPatch, few: int) -> None:
        """Of what are few."""
        monkeypatch.setattr(copies, "FEW", few)

    @pytest.fixture
    def rig(self, host: HostRig) -> Rig:
        """That backend."""
        return host


def test_a_run_outside_the_memory_fails_alone(host: HostRig) -> None:
    """What slipped through every check is an error of that transfer, and the next one works."""
    memory, _ = host.attach((4096,))
    host.submit(1, memory, Direction.STORE, [(0, 4090, 0, 100)])
    host.submit(2, memory, Direction.STORE, [(0, 0, 0, 100)])
    done = drain(host.device)
    assert "copy failed" in done[1].error
    assert (done[1].arrived_bytes, done[2].arrived_bytes, done[2].error) == (0, 100, "")


def test_files_smaller_than_promised_are_refused(host: HostRig) -> None:
    """Mapping more than the pool has would end in SIGBUS later; an empty file is named."""
    with pytest.raises(PoolError, match="1048576 bytes"):
        HostDevice(host.pool.fd, 2**21)
    empty = sealed_file("empty", 0)
    with pytest.raises(ImportFailed, match="0 bytes"):
        host.device.import_memory((HostHandle(0),), (1,), (empty,))
    os.close(empty)


@pytest.mark.parametrize("path", [__file__, "/proc/self/maps", "/dev/zero", "/"])
def test_what_is_no_memory_file_is_refused_and_not_asked_for_its_size(
    host: HostRig, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The kernel alone says what a descriptor is: whoever owns the file system is asked nothing."""
    foreign, ask = os.open(path, os.O_RDONLY), os.fstat

    def fstat(fd: int) -> os.stat_result:
        assert fd != foreign, f"descriptor {fd} is asked for its size"
        return ask(fd)  # the device's own thread asks for the pool's

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fstat)
        with pytest.raises(ImportFailed, match="descriptor 0 is no memory file; make it"):
            host.device.import_memory((HostHandle(0),), (1,), (foreign,))
        with pytest.raises(ImportFailed, match=r"control page .* is no memory file"):
            map_control_page(foreign)
    os.close(foreign)


PAGE = mmap.PAGESIZE
TIB = 2**40


def test_no_more_of_a_sparse_file_is_mapped_than_the_layout_names(host: HostRig) -> None:
    """One mapping from the first storage's page to the last one's; each begins where it should."""
    file = Memory(8 * TIB)
    host.files.append(file)
    begin, sizes = 3 * TIB - 100, (4096, 512)
    offsets = (begin, begin + 3 * PAGE)
    handles = tuple(HostHandle(0, offset) for offset in offsets)
    before = mapped_bytes(file)
    memory = host.device.import_memory(handles, sizes, (file.fd,))
    assert mapped_bytes(file) - before == 5 * PAGE
    for storage, offset in enumerate(offsets):
        data = os.urandom(256)
        os.pwrite(file.fd, data, offset)
        host.move(memory, Direction.STORE, [(storage, 0, 1000, 256)])
        assert host.get_pool(1000, 256).tobytes() == data
    host.device.release_memory(memory)
    assert mapped_bytes(file) == before


def mapped_bytes(file: Memory) -> int:
    """Bytes of all mappings of a file in this process."""
    inode, nbytes = str(os.fstat(file.fd).st_ino), 0
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        addresses, *_, number = line.split()[:5]
        if number == inode:
            begin, end = (int(address, 16) for address in addresses.split("-"))
            nbytes += end - begin
    return nbytes


@pytest.fixture
def pretouch() -> Iterator[Callable[..., MemoryPretouch]]:
    """Makes threads that touch workers' memory; `busy` says whether transfers move."""
    with contextlib.ExitStack() as stack:

        def make(*, busy: bool = False) -> MemoryPretouch:
            made = MemoryPretouch(lambda: busy)
            stack.callback(made.stop)
            return made

        yield make


def view_of(memory: Memory, offset: int = 0) -> memoryview:
    """A mapping of the rest of a file, as a lane has one."""
    return memoryview(mmap.mmap(memory.fd, len(memory.bytes) - offset, offset=offset))


def resident(view: memoryview) -> int:
    """Bytes of a mapping that are in the page table."""
    address = f"{np.frombuffer(view, np.uint8).ctypes.data:x}-"
    lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(address))
    return next(int(line.split()[1]) for line in lines[first:] if line.startswith("Rss:")) * 1024


def test_the_pages_that_memory_has_are_mapped_and_no_others_allocated(
    pretouch: Callable[..., MemoryPretouch],
) -> None:
    """No copy waits for a page that a worker's memory has, and none is charged to the lane.

    The holes of a sparse file are skipped, and the file's position is the worker's own.
    """
    memories = [Memory(5 * 2**20 + PAGE), Memory(4 * TIB)]
    for memory in memories:
        memory.bytes[2 * PAGE : 3 * 2**20 : PAGE] = memory.bytes[-1] = 1
        os.lseek(memory.fd, 12345, os.SEEK_SET)
    views = [view_of(memory, PAGE) for memory in memories]
    assert not any(map(resident, views))
    made = pretouch()
    for number, (memory, view) in enumerate(zip(memories, views, strict=True)):
        made.add(MemoryId(number), memory.fd, PAGE, view)
    nbytes = 3 * 2**20 - PAGE
    eventually(lambda: list(map(resident, views)), lambda resident: resident == [nbytes] * 2)
    for memory in memories:
        assert os.fstat(memory.fd).st_blocks * 512 == nbytes
        assert os.lseek(memory.fd, 0, os.SEEK_CUR) == 12345
        memory.close()


def test_pretouch_gives_way_to_transfers_and_ends_with_the_memory(
    monkeypatch: pytest.MonkeyPatch, pretouch: Callable[..., MemoryPretouch]
) -> None:
    """While they move, one thread makes a step of one worker's memory, then waits."""
    monkeypatch.setattr("kvd.lane.pretouch.BUSY_SECONDS", 3600.0)
    made, memory = pretouch(busy=True), Memory(4 * SHORT_STEP)
    memory.bytes[:] = 1
    views = [view_of(memory) for _ in range(3)]
    num_threads = threading.active_count()
    for number, view in enumerate(views):
        made.add(MemoryId(number), memory.fd, 0, view)
    assert threading.active_count() == num_threads
    eventually(lambda: resident(views[0]))
    for number in range(3):
        made.remove(MemoryId(number))
    assert resident(views[0]) < 2 * SHORT_STEP  # a fault maps neighbours too
    assert [resident(view) for view in views[1:]] == [0, 0]
    for view in views:
        view.release()
    memory.close()
