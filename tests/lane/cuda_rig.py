"""The CUDA backend on the test driver, with device memory that another process owns.

An allocation cannot be opened where it was made.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from kvd.lane.cuda.backend import CudaDevice, CudaOptions
from kvd.lane.device import Direction, MemoryId
from kvd.machine import cuda
from kvd_client.memory import sealed_file
from kvd_proto.messages import Handle, IpcHandle, VmmHandle, VmmSegment
from tests.asked import Asked
from tests.fakecuda import cudatensor
from tests.fakecuda.cudatensor import GRANULARITY
from tests.fakecuda.harness import FakeCuda, calls, mark, switch
from tests.lane.device_contract import Bytes, Rig, Source, drain
from tests.lane.support import Memory
from tests.waiting import eventually

POOL_BYTES = 2**20
WHOLE_POOL = MemoryId(0)  # needs all of it; no worker's memory has the number
GAP = 256
SWITCHES = (
    *("fail=", "unhang=", "hold=", "any=", "seed=", "max_pin=0", "vmm_ranges=1", "elsewhere=1"),
    *("driver_version=13000", "compute_mode=0", "mps=0"),
)


@dataclass(frozen=True)
class TestDriver:
    """The driver's stand-in, in this process.

    environment: of processes that are to have it too.
    log: a file with a line for each call of any process.
    device: the name of its first device.
    """

    __test__ = False

    environment: dict[str, str]
    log: Path
    device: str

    set = staticmethod(switch)

    def calls(self, since: int = 0) -> list[str]:
        """Functions that this process has called since an earlier `mark`."""
        return calls(self.log, os.getpid(), since)

    def wait_for(self, name: str, count: int, since: int) -> None:
        """Wait until this process has called a function so often."""
        eventually(lambda: self.calls(since).count(name) >= count)

    @property
    def mark(self) -> int:
        """A place in the log: now."""
        return mark(self.log)

    def reset(self) -> None:
        """No delays, nothing held, no failures."""
        for text in SWITCHES:
            switch(text)


def load(fakecuda: FakeCuda, log: Path) -> TestDriver:
    """Load the test driver into this process, for good."""
    log.touch()
    environment = fakecuda.environment(LOG=log)
    with switched(environment):
        fakecuda.load()
    cuda.start()
    (_, uuid), *_ = cuda.devices()
    return TestDriver(environment, log, f"cuda:{uuid.hex()}")


@contextlib.contextmanager
def switched(environment: dict[str, str]) -> Iterator[None]:
    """Another environment, for libraries that look at it and processes that start now."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class CudaWorkers:
    """A process with device memory, as workers' is.

    library: the test driver's, for a process that is forked from this one, which has not loaded it
    yet; without it the process is a fresh one.
    """

    def __init__(self, library: Path | None = None) -> None:
        self._socket, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = Asked(_DeviceMemory, far, library, forked=library is not None)
        far.close()
        self._descriptors: list[int] = []

    def make(self, sizes: Sequence[int], *, ipc: bool) -> Source:
        """Storages with gaps between them, in one allocation with an IPC handle.

        Or in virtual memory, whose first storage begins in the midst of one segment and goes on in
        the next.
        """
        handle: Callable[[int], Handle]
        offset = GAP if ipc else GRANULARITY - sizes[0] // 2
        nbytes = offset + sum(sizes) + GAP * len(sizes)
        descriptors = [sealed_file("control page", 4096)]
        if ipc:
            base, name = self.process.ask("allocate", nbytes)
            handle = partial(IpcHandle, name, nbytes)
        else:
            count = -(-nbytes // GRANULARITY)
            base = self.process.ask("create", count)
            while len(descriptors) <= count:
                descriptors += socket.recv_fds(self._socket, 1, 1)[1]
            segments = tuple(VmmSegment(1 + index, GRANULARITY) for index in range(count))
            handle = partial(VmmHandle, segments)
        self._descriptors += descriptors
        offsets = [offset + sum(sizes[:i]) + GAP * i for i in range(len(sizes))]
        addresses = tuple(base + offset for offset in offsets)
        return Source(tuple(map(handle, offsets)), tuple(descriptors), addresses)

    def close(self) -> None:
        """End the process."""
        self.process.close()
        self._socket.close()
        self._close_descriptors()

    def free(self) -> None:
        """Give back all that was made; nobody uses it any more."""
        self.process.ask("free")
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


class _DeviceMemory:
    """The memory itself, in its process."""

    def __init__(self, descriptors: socket.socket, library: Path | None) -> None:
        if library is not None:
            FakeCuda(library).load()
        cudatensor.use_device()
        self._socket = descriptors
        self._undo: list[Callable[[], None]] = []

    def allocate(self, nbytes: int) -> tuple[int, bytes]:
        """Memory with an IPC handle: its address, and the handle."""
        memory = cudatensor.DeviceMemory(nbytes)
        self._undo.append(memory.free)
        return memory.address, memory.handle()

    def create(self, segments: int) -> int:
        """Virtual memory: its address; the descriptors are sent."""
        memory = cudatensor.VirtualMemory(segments=segments)
        self._undo.append(memory.unmap)
        for descriptor in memory.descriptors():
            socket.send_fds(self._socket, [b"."], [descriptor])
            os.close(descriptor)
        return memory.address

    def free(self) -> None:
        """Give back what was made: the device's memory is as large as a test's."""
        while self._undo:
            self._undo.pop()()

    def get(self, address: int, nbytes: int) -> bytes:
        """A copy of bytes."""
        return cudatensor.DeviceBytes(address, nbytes).read()

    def put(self, address: int, data: bytes) -> None:
        """Write bytes."""
        cudatensor.DeviceBytes(address, len(data)).write(data)

    def close(self) -> None:
        """The process ends, and its memory with it."""


class CudaRig(Rig):
    """One backend, its pool, and workers.

    ipc: memory made from now on has IPC handles; otherwise descriptors.
    pinned: the whole pool is, from the start. Otherwise only what `pin_arena` names.
    """

    def __init__(
        self,
        fake_driver: TestDriver,
        workers: CudaWorkers,
        options: CudaOptions,
        *,
        ipc: bool = True,
        pinned: bool = True,
        pool: Memory | None = None,
        pool_bytes: int = POOL_BYTES,
    ) -> None:
        self.driver, self.ipc = fake_driver, ipc
        self._workers = workers
        self.pool = pool or Memory(pool_bytes)
        if pool is None:
            self.pool.bytes[:] = 0xAB
        self.mark = fake_driver.mark
        self.device = self.cuda = CudaDevice(fake_driver.device, self.pool.fd, pool_bytes, options)
        if pinned:
            self.device.pin_arena(WHOLE_POOL, 0, pool_bytes)
            self.wait_until_pinned()

    def wait_until_pinned(self) -> None:
        """All of it, or until it is given up."""
        nbytes = len(self.pool.bytes)
        eventually(lambda: self.cuda.pool_error or self.cuda.pinned_bytes == nbytes)

    def make_worker(self, sizes: Sequence[int]) -> Source:
        """In the other process."""
        return self._workers.make(sizes, ipc=self.ipc)

    def spoil(self, source: Source) -> Source:
        """A descriptor of no device memory, or a handle that was never made."""
        last = source.handles[-1]
        if isinstance(last, IpcHandle):
            last = IpcHandle(bytes(64), last.allocation, last.offset)
        elif isinstance(last, VmmHandle):
            last = VmmHandle((*last.segments[:-1], VmmSegment(0, 2**21)), last.offset)
        return replace(source, handles=(*source.handles[:-1], last))

    def get(self, source: Source, storage: int, offset: int, nbytes: int) -> Bytes:
        """By the other process."""
        address = source.addresses[storage] + offset
        return np.frombuffer(self._workers.process.ask("get", address, nbytes), np.uint8)

    def put(self, source: Source, storage: int, offset: int, data: Bytes) -> None:
        """By the other process."""
        self._workers.process.ask("put", source.addresses[storage] + offset, data.tobytes())

    def priority(self, direction: Direction) -> int:
        """Of the direction's stream, as the driver tells it."""
        stream = self.cuda._streams[direction].stream
        return int(cudatensor.call("cuStreamGetPriority", stream))

    def close(self) -> None:
        """Let everything end, then close."""
        self.driver.reset()
        drain(self.device)
        self.device.close()
        self.pool.close()


MakeRig = Callable[..., CudaRig]
