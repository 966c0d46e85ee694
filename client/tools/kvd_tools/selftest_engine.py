"""The engine of the self-test: one rank on one lane, in a temporary namespace, and its memory."""

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvd_client import cuda_driver
from kvd_client.errors import CudaError, UnsupportedMemory
from kvd_client.jobs import JobResult
from kvd_client.memory import DeviceMemory, HostMemory
from kvd_client.scheduler import Scheduler
from kvd_client.tickets import ChunkBlocks, LoadTicket, StoreAnswer, StoreTicket
from kvd_client.worker import Worker
from kvd_proto.directory import LookupResult
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.messages import HOST
from kvd_tools.errors import StepFailed

Bytes = npt.NDArray[np.uint8]
_NO_DEVICE = "CUDA_ERROR_NO_DEVICE"


class CudaRows:
    """Blocks of CUDA memory as rows of an array, u8[size] each."""

    def __init__(self, context: cuda_driver.PrimaryContext, address: int, size: int) -> None:
        self._context, self._address, self._size = context, address, size

    def __setitem__(self, block: int, data: Bytes) -> None:
        contiguous = np.ascontiguousarray(data)
        with self._context.current():
            cuda_driver.copy_in(
                self._address + block * self._size, contiguous.ctypes.data, self._size
            )

    def __getitem__(self, block: int) -> Bytes:
        data = np.empty(self._size, np.uint8)
        with self._context.current():
            cuda_driver.copy_out(data.ctypes.data, self._address + block * self._size, self._size)
        return data


Rows = Bytes | CudaRows


@contextmanager
def blocks_on(
    device: str, num_blocks: int, block_bytes: int
) -> Iterator[tuple[HostMemory | DeviceMemory, Rows]]:
    """Yield new memory of one storage, and its blocks as rows; free it with the context.

    Raises:
        StepFailed: this process does not see the device.
        CudaError: the driver refuses.
        UnsupportedMemory: there is no driver, or it cannot share memory.
    """
    if device == HOST:
        memory = HostMemory.allocate(num_blocks * block_bytes)
        yield memory, memory.array.reshape(num_blocks, block_bytes)
        memory.close()
        return
    ordinal = visible_devices().get(device)
    if ordinal is None:
        raise StepFailed(
            f"this process does not see {device}; run the self-test where the device is visible"
            " (nvidia-smi -L, CUDA_VISIBLE_DEVICES), or leave it out by --device"
        )
    context = cuda_driver.PrimaryContext(ordinal)
    with context.current():
        address = cuda_driver.allocate(num_blocks * block_bytes)
        shared = DeviceMemory.at(address, num_blocks * block_bytes)
    yield shared, CudaRows(context, address, block_bytes)
    shared.close()
    with context.current():
        cuda_driver.free(address)
    context.release()


def visible_devices() -> dict[str, int]:
    """Return the ordinals of this process's CUDA devices, by name.

    Raises:
        CudaError: there is a driver, and it refuses.
    """
    try:
        return {cuda_driver.device_name(n): n for n in range(cuda_driver.count_devices())}
    except UnsupportedMemory:
        return {}
    except CudaError as error:
        if error.name == _NO_DEVICE:
            return {}
        raise


CHUNKS = 16
BLOCKS_PER_CHUNK = 4
MAX_CHUNK_BYTES = 2**20
MIN_CHUNK_BYTES = 4096
POISON = 0xA5
ANSWER_SECONDS = 5.0
PATIENCE_SECONDS = 5.0  # for an effect to become visible
LEND_SECONDS = 0.5  # for more slots than the first
_POLL_SECONDS = 0.005


def chunk_bytes_for(pool_bytes: int) -> int:
    """Return the size of a chunk: 1/1024 of the pool, within bounds."""
    return min(max(pool_bytes // 1024 // 4096 * 4096, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)


class SelftestEngine:
    """An engine on one lane, for the steps of the self-test.

    Leaving the context ends its sessions and frees its memory.

    Args:
        runtime_dir: the daemon's runtime directory.
        device: of the lane: "host" or the name of a CUDA device.
        observer: another session, to request the daemon's status.
        pool_bytes: size of the daemon's pool.
        timeout: seconds that the lane may take for each request.

    Attributes:
        source, destination: block ids to store from and to load into.
        memory, rows: all blocks, once they are allocated.
        content: u8[blocks, block_bytes], the random bytes that are stored.
        namespace_id: in hexadecimal, once registered.
        stored: keys of the stored chunks that have not been evicted.
        samples: by kind, results of jobs and the seconds from submission to end.
    """

    memory: HostMemory | DeviceMemory
    rows: Rows

    def __init__(
        self,
        runtime_dir: Path,
        device: str,
        observer: Scheduler,
        pool_bytes: int,
        timeout: float,
    ) -> None:
        self.device = device
        self.timeout = timeout
        self.chunk_bytes = chunk_bytes_for(pool_bytes)
        self.block_bytes = size = self.chunk_bytes // BLOCKS_PER_CHUNK
        self.keys: Sequence[bytes] = [os.urandom(32) for _ in range(CHUNKS)]
        num_source = CHUNKS * BLOCKS_PER_CHUNK
        self.num_blocks = 2 * num_source
        seed = int.from_bytes(os.urandom(8))
        self.source = list(range(num_source))
        self.destination = list(range(num_source, self.num_blocks))
        random.Random(seed).shuffle(self.destination)  # no regular order of blocks
        self._content_row = {
            block: row
            for blocks in (self.source, self.destination)
            for row, block in enumerate(blocks)
        }
        self.content = np.random.default_rng(seed).integers(0, 256, (num_source, size), np.uint8)
        self.layout = RankLayout(
            num_blocks=self.num_blocks,
            blocks_per_chunk=BLOCKS_PER_CHUNK,
            hash_block_size=16,
            storages=(self.num_blocks * size,),
            tensors=(TensorSpec(storage=0, offset=0, page_bytes=size, block_stride=size),),
            groups=(GroupSpec(refs=(TensorRef(0, size),), block_size=16),),
        )
        self.namespace_id = ""
        self.stored: tuple[bytes, ...] = ()
        self.samples: dict[str, list[tuple[JobResult, float]]] = {"store": [], "load": []}
        self._observer = observer
        self._announced: set[bytes] = set()  # keys that are READY by the ring of changes
        self._job = 0
        self._stack = ExitStack()
        name = f"selftest-{os.getpid()}-{device}"
        self.scheduler = Scheduler(runtime_dir, name, deadline=ANSWER_SECONDS)
        self.worker = Worker(runtime_dir, name, 0, 1, deadline=ANSWER_SECONDS, job_timeout=timeout)

    # --------------------------------------------------------------- memory

    def allocate(self) -> None:
        """Allocate the blocks on the device."""
        blocks = blocks_on(self.device, self.num_blocks, self.block_bytes)
        self.memory, self.rows = self._stack.enter_context(blocks)

    def write(self, blocks: Sequence[int], content: Iterable[Bytes]) -> None:
        """Write these bytes into these blocks."""
        for block, data in zip(blocks, content, strict=True):
            self.rows[block] = data

    def poison(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with POISON."""
        self.write(blocks, [np.full(self.block_bytes, POISON, np.uint8)] * len(blocks))

    def unpoisoned(self, blocks: Sequence[int]) -> list[int]:
        """Return how many bytes of each block are not poison."""
        return [int((self.rows[block] != POISON).sum()) for block in blocks]

    def differences(self, blocks: Sequence[int]) -> int:
        """Return how many bytes of these blocks differ from the content to store."""
        rows, content, content_row = self.rows, self.content, self._content_row
        return sum(int((rows[block] != content[content_row[block]]).sum()) for block in blocks)

    def stored_blocks(self, blocks: Sequence[int]) -> Sequence[int]:
        """Return those of the source or destination blocks whose chunks are stored."""
        keys, stored = self.keys, self.stored
        return [b for n, b in enumerate(blocks) if keys[n // BLOCKS_PER_CHUNK] in stored]

    # --------------------------------------------------------------- engine

    def store(self) -> None:
        """Store the source blocks, as many chunks as the daemon lends slots for."""
        if self.scheduler.reserve(1, PATIENCE_SECONDS):
            self.scheduler.reserve(len(self.keys), LEND_SECONDS)
        ticket = self.scheduler.prepare_store(self.keys)
        if not ticket.keys:
            raise StepFailed(self._refusal_reason(ticket.answers))
        self.stored = ticket.keys
        with ticket:
            self._move("store", ticket, self.stored_blocks(self.source))

    def load(self) -> None:
        """Load the stored chunks into the destination blocks."""
        with self.scheduler.prepare_load(self.stored) as ticket:
            if len(ticket) != len(self.stored):
                raise StepFailed(f"{len(ticket)} of {len(self.stored)} stored chunks can be loaded")
            self._move("load", ticket, self.stored_blocks(self.destination))

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Poll for PATIENCE_SECONDS; return whether the condition became true."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not (is_true := condition()) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        return is_true

    def count(self, *results: LookupResult) -> int:
        """Return the number of keys whose lookup gives one of these results."""
        return sum(result in results for result in self.scheduler.lookup_many(self.keys))

    def ready(self) -> bool:
        """Whether all stored chunks are READY in directory and ring. Drops evicted ones."""
        self.scheduler.end_step()  # processes the daemon's replies
        pairs = zip(self.stored, self.scheduler.lookup_many(self.stored), strict=True)
        self.stored = tuple(key for key, result in pairs if result is not LookupResult.MISS)
        changes = self.scheduler.take_changes()
        self._announced = (self._announced | changes.stored.keys()).difference(changes.removed)
        all_ready = 0 < len(self.stored) == self.count(LookupResult.HIT)
        return all_ready and self._announced.issuperset(self.stored)

    def own_namespace(self) -> dict[str, Any] | None:
        """Return the daemon's status of the temporary namespace; None: there is none."""
        namespaces = self._status()["namespaces"]
        return next((entry for entry in namespaces if entry["id"] == self.namespace_id), None)

    def _status(self) -> dict[str, Any]:
        status = self._observer.status()
        if not status:
            raise StepFailed("the daemon no longer answers")
        return status

    def _refusal_reason(self, answers: Sequence[StoreAnswer]) -> str:
        if answers and set(answers) != {StoreAnswer.FULL}:
            return f"the daemon takes no chunk: {', '.join(sorted({a.name for a in answers}))}"
        status = self._status()
        failed = "; ".join(f"{c['name']}: {c['text']}" for c in status["checks"] if not c["ok"])
        if status["draining"]:
            return f"the daemon is draining and refuses stores: {failed or 'no reason given'}"
        if not answers:
            return f"the daemon does not serve the engine: {failed or 'no reason given'}"
        if not status["ready"]:
            return f"the daemon is not ready: {failed}"
        return (
            "the pool is full, and all of its chunks are pinned or being written; try again when"
            " engines are less busy"
        )

    def leave(self) -> None:
        """End both sessions. The daemon then drops the namespace and unmaps the memory."""
        self.worker.close()
        self.scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        self._stack.close()

    def _move(self, kind: str, ticket: StoreTicket | LoadTicket, blocks: Sequence[int]) -> None:
        self._job += 1
        groups = [ChunkBlocks(ticket.keys, blocks)]
        started = time.perf_counter()
        if isinstance(ticket, StoreTicket):
            self.worker.store(self._job, ticket, groups)
        else:
            self.worker.load(self._job, ticket, groups)
        unfinished = self.worker.wait([self._job], self.timeout)
        latency = time.perf_counter() - started
        if unfinished:
            raise StepFailed(f"the job has not ended within {self.timeout:g} s")
        (result,) = self.worker.get_finished()
        if not result.success:
            raise StepFailed(f"the job ended as {result.status}: {result.text}")
        self.samples[kind].append((result, latency))
