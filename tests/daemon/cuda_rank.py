"""A rank whose KV memory is CUDA memory, in a process of its own: handles do not open at home."""

import ctypes
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd_client import DeviceMemory, Fingerprint, JobResult, Worker
from tests.daemon.engines import PAGE, POISON, TENSORS, content, make_layout, wait_boot
from tests.waiting import DEADLINE

GAP = 512
GRANULE = 2 * 2**20
PATIENCE = 60.0


class CudaRank:
    """The process, as the test sees it.

    Args:
        runtime_dir: the daemon's.
        engine: the engine's name.
        rank: from 0.
        world_size: how many there are.
        kind: of its memory: "ipc", "vmm" (exportable) or "closed" (not exportable).
        device: ordinal of its device.
        page: bytes of a block's part of each tensor.
        rank_type: what runs there.
    """

    def __init__(
        self,
        runtime_dir: Path,
        engine: str,
        rank: int,
        world_size: int,
        *,
        kind: str = "ipc",
        device: int = 0,
        page: int = PAGE,
        rank_type: type["Rank"] | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments: tuple[object, ...] = (str(runtime_dir), engine, rank, world_size)
        arguments = (rank_type or Rank, theirs, *arguments, kind, device, page)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, name: str, *arguments: object) -> Any:
        """Call a method of `Rank` there; what it returns, or the exception that it raised."""
        self._pipe.send((name, arguments))
        if not self._pipe.poll(PATIENCE):
            raise TimeoutError(f"the rank does not do {name}")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def result(self, job: int) -> JobResult:
        """Wait for a job's end."""
        result = self.ask("result", job)
        assert isinstance(result, JobResult)
        return result

    def kill(self) -> None:
        """End the process as SIGKILL does."""
        self.process.kill()
        self.process.join(PATIENCE)

    def close(self) -> None:
        """End the process, in order where it still can."""
        self._pipe.close()
        self.process.join(5)
        self.kill()


class Rank:
    """The rank itself. Blocks are those of `make_layout`, both storages in one allocation."""

    def __init__(
        self,
        runtime_dir: str,
        engine: str,
        rank: int,
        world_size: int,
        kind: str,
        device: int,
        page: int,
    ) -> None:
        from cuda.bindings import driver  # noqa: PLC0415  # only in this process

        self._driver = driver
        self._rank = rank
        self._results: dict[int, JobResult] = {}
        self._layout = make_layout(page=page)
        self._call("cuInit", 0)
        handle = self._call("cuDeviceGet", device)
        self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", handle))
        self._stream = int(self._call("cuStreamCreateWithPriority", 1, 0))
        self._others = [int(self._call("cuStreamCreateWithPriority", 1, 0))]
        self._storages = self._make_storages(kind, device)
        self.worker = Worker(Path(runtime_dir), engine, rank, world_size, deadline=DEADLINE)

    def register(self) -> str:
        """Give the daemon the memory; the device's name."""
        memory = self._share()
        self.worker.register(memory, self._layout, Fingerprint(model="model"), required=True)
        for part in memory:
            part.close()
        return memory[0].device

    def wait_boot(self, boot_id: bytes) -> None:
        """Until its session is one with the daemon of this boot id."""
        wait_boot(self.worker, boot_id)

    def wait_attached(self) -> bool:
        """Until the engine is complete and a lane serves it."""
        return bool(self.worker.wait_attached(PATIENCE / 2))  # `ask` hears of it

    def switch(self, text: str) -> None:
        """Change a switch of the test driver in this process, as `key=value`."""
        assert ctypes.CDLL("libcuda.so.1").fakecuda_set(text.encode()) == 0, text

    def fill(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Write the keys' content into blocks, now."""
        for key, inside, block in _places(keys, blocks):
            for tensor in range(TENSORS):
                self._put(tensor, block, self._wanted(key, tensor, inside))

    def poison(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks, now."""
        for block in blocks:
            for tensor in range(TENSORS):
                self._put(tensor, block, np.full(self._page(tensor), POISON, np.uint8))

    def compute(self, value: int, blocks: Sequence[int], stream: int = 0) -> None:
        """Put on a stream: kernels that set every byte of blocks."""
        for block in blocks:
            for tensor in range(TENSORS):
                self._call(
                    "cuMemsetD8Async",
                    self._address(tensor, block),
                    value,
                    self._page(tensor),
                    self._streams[stream],
                )

    def wrong_bytes(self, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Bytes of blocks that are not the keys' content."""
        return sum(
            int((self._get(tensor, block) != self._wanted(key, tensor, inside)).sum())
            for key, inside, block in _places(keys, blocks)
            for tensor in range(TENSORS)
        )

    def values(self, blocks: Sequence[int]) -> set[int]:
        """The different bytes that there are in blocks."""
        found: set[int] = set()
        for block in blocks:
            for tensor in range(TENSORS):
                found |= set(np.unique(self._get(tensor, block)).tolist())
        return found

    def submit(
        self,
        kind: str,
        job: int,
        blocks: Sequence[int],
        slots: Sequence[int],
        generations: Sequence[int],
        stream: int = 0,
    ) -> int:
        """A job on group 0 that comes after all that is on a stream; its number."""
        after = self.worker.timeline.signal_on(self._streams[stream])
        submit = self.worker.submit_store if kind == "store" else self.worker.submit_load
        submit(job, blocks, [len(blocks), 0], [0, 0], slots, generations, after=after)
        return after

    def submit_many(
        self,
        jobs: Sequence[int],
        kind: str,
        blocks: Sequence[int],
        slots: Sequence[int],
        generations: Sequence[int],
    ) -> None:
        """The same job under many numbers, faster than they can be done."""
        for job in jobs:
            self.submit(kind, job, blocks, slots, generations)

    def finished(self) -> list[int]:
        """Jobs that have ended since the last call."""
        ended = self.worker.get_finished()
        self._results |= {result.job_id: result for result in ended}
        return sorted(self._results)

    def result(self, job: int) -> JobResult:
        """Wait for a job's end."""
        end = time.monotonic() + PATIENCE
        while job not in self.finished():
            assert time.monotonic() < end, f"job {job} does not end"
            time.sleep(0.002)
        result: JobResult = self._results.pop(job)
        return result

    def wait(self, job: int, timeout: float) -> list[int]:
        """Worker.wait."""
        return sorted(self.worker.wait([job], timeout))

    def reached(self) -> int:
        """How far the timeline is."""
        return self.worker.timeline.reached

    # -------------------------------------------------------------- driver

    @property
    def _streams(self) -> list[int]:
        return [self._stream, *self._others]

    def _call(self, name: str, *arguments: object) -> Any:
        code, *values = getattr(self._driver, name)(*arguments)
        assert not int(code), f"{name}: {code}"
        return values[0] if values else None

    def _make_storages(self, kind: str, device: int) -> list[int]:
        """Their addresses; with gaps, in one allocation."""
        total = sum(self._layout.storages) + TENSORS * GAP
        make = self._allocate if kind == "ipc" else self._create
        base = make(total, device, exportable=kind == "vmm")
        found = []
        for size in self._layout.storages:
            found.append(base + GAP)
            base += size + GAP
        return found

    def _share(self) -> Sequence[DeviceMemory]:
        """The storages as memory to register."""
        return [
            DeviceMemory.at(address, size)
            for address, size in zip(self._storages, self._layout.storages, strict=True)
        ]

    def _allocate(self, nbytes: int, device: int, *, exportable: bool) -> int:
        del device, exportable
        return int(self._call("cuMemAlloc", nbytes))

    def _create(self, nbytes: int, device: int, *, exportable: bool) -> int:
        driver = self._driver
        nbytes = -(-nbytes // GRANULE) * GRANULE
        kinds = driver.CUmemAllocationHandleType
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        if exportable:
            properties.requestedHandleTypes = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        allocation = self._call("cuMemCreate", nbytes, properties, 0)
        address = int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))
        self._call("cuMemMap", address, nbytes, 0, allocation, 0)
        access = driver.CUmemAccessDesc()
        access.location = properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, nbytes, [access], 1)
        return address

    def _page(self, tensor: int) -> int:
        return self._layout.tensors[tensor].page_bytes

    def _address(self, tensor: int, block: int) -> int:
        return self._storages[tensor] + block * self._page(tensor)

    def _wanted(self, key: bytes, tensor: int, inside: int) -> npt.NDArray[np.uint8]:
        return content(key, self._rank, tensor, inside, self._page(tensor))

    def _put(self, tensor: int, block: int, data: npt.NDArray[np.uint8]) -> None:
        self._call("cuMemcpyHtoD", self._address(tensor, block), data.ctypes.data, data.nbytes)
        self._call("cuStreamSynchronize", 0)  # it may return before pageable bytes have arrived

    def _get(self, tensor: int, block: int) -> npt.NDArray[np.uint8]:
        data = np.empty(self._page(tensor), np.uint8)
        self._call("cuMemcpyDtoH", data.ctypes.data, self._address(tensor, block), data.nbytes)
        return data


def _places(keys: Sequence[bytes], blocks: Sequence[int]) -> list[tuple[bytes, int, int]]:
    factor = len(blocks) // len(keys)
    return [(keys[at // factor], at % factor, block) for at, block in enumerate(blocks)]


def _serve(rank_type: type[Rank], pipe: Connection, *arguments: Any) -> None:
    """The process: does what it is asked until the other end closes."""
    try:
        rank = rank_type(*arguments)
    except BaseException as error:
        pipe.send(error)
        raise
    while True:
        try:
            name, given = pipe.recv()
        except EOFError:
            break
        try:
            answer = getattr(rank, name)(*given)
        except Exception as error:  # noqa: BLE001  # the test is to see it
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        pipe.send(answer)
    rank.worker.close()
    os._exit(0)  # the streams' threads need no farewell
