"""The CUDA backend on the test with everything that tests look at behind its back."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd.lane.cuda.backend import CudaDevice, CudaOptions
from kvd.lane.device import Direction, MemoryId
from kvd.machine import cuda
from kvd_proto.messages import Handle, IpcHandle, VmmHandle, VmmSegment
from tests.fakecuda import cudatensor
from tests.fakecuda.harness import FakeCuda, calls, mark, switch
from tests.lane.cuda_memory import CudaWorkers
from tests.lane.device_contract import Bytes, Rig, Source, drain
from tests.lane.support import Memory
from tests.waiting import eventually

POOL_BYTES = 2**20
WHOLE_POOL = MemoryId(0)  # needs all of it; no worker's memory has the number


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
        switches = ("fail=", "unhang=", "hold=", "any=", "seed=", "max_pin=0", "vmm_ranges=1")
        for text in (*switches, "elsewhere=1", "driver_version=13000", "compute_mode=0", "mps=0"):
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


class CudaRig(Rig):
    """One backend, its pool, and workers whose device memory another process owns.

    workers: whose memory is made from now on.
    pinned: the whole pool is, from the start. Otherwise only what `pin_arena` names.
    """

    def __init__(
        self,
        fake_driver: TestDriver,
        workers: CudaWorkers,
        options: CudaOptions,
        *,
        pinned: bool = True,
        pool: Memory | None = None,
        pool_bytes: int = POOL_BYTES,
    ) -> None:
        self.driver = fake_driver
        self.workers = workers
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
        cuda, nbytes = self.cuda, len(self.pool.bytes)
        eventually(lambda: cuda.pool_error or cuda.pinned_bytes == nbytes)

    def make_worker(self, sizes: Sequence[int]) -> Source:
        """In the other process."""
        return self.workers.make(sizes)

    def spoil(self, source: Source) -> Source:
        """A descriptor of no device memory, or a handle that was never made."""
        last = source.handles[-1]
        bad: Handle
        if isinstance(last, IpcHandle):
            bad = IpcHandle(bytes(64), last.allocation, last.offset)
        else:
            assert isinstance(last, VmmHandle)
            bad = VmmHandle((*last.segments[:-1], VmmSegment(0, 2**21)), last.offset)
        return Source((*source.handles[:-1], bad), source.descriptors)

    def get(self, source: Source, storage: int, offset: int, nbytes: int) -> Bytes:
        """By the other process."""
        return self.workers.get(source, storage, offset, nbytes)

    def put(self, source: Source, storage: int, offset: int, data: Bytes) -> None:
        """By the other process."""
        self.workers.put(source, storage, offset, data)

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
