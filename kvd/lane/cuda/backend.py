"""The CUDA backend: the device's copy engines move the bytes; threads only enqueue and poll.

The device is found by UUID, since indices differ between processes. The lane's threads and its own
memory stay near it; the broker places the pool's memory.

A worker's memory is opened by handle; an allocation is opened once, however many storages lie in
it. Its size is the driver's word, not the worker's: the driver returns the size of an IPC handle's
allocation, and maps no more of a descriptor's allocation than it has. (Not by
`cuMemGetAddressRange`, which returns virtual memory's size in some drivers only, and only once the
memory may be accessed.)

Each piece is enqueued on the stream of its direction, with an event after it (streams.py);
`progress` polls the events. No stream ever waits for another process; the runner reads workers'
timelines.

An error of one transfer is reported with that transfer, when nothing of it can move any more. An
error of an import or release affects that memory only. After any error the context is queried. If
it does not answer, DeviceLost is raised: the lane process ends and the broker starts another; pool
and directory are unchanged.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import numpy as np

from kvd.errors import (
    CudaDriverError,
    CudaMissing,
    DeviceLost,
    HandleRefused,
    ImportFailed,
    LaneError,
)
from kvd.lane.cuda import driver
from kvd.lane.cuda.copies import CudaRuns, PoolSide, RunSlice, choose_copier, prepare
from kvd.lane.cuda.driver import Addresses
from kvd.lane.cuda.pinning import PinnedPool
from kvd.lane.cuda.streams import TransferStream
from kvd.lane.device import PIECE_BYTES, CompletedTransfer, Device, Direction, MemoryId, Transfer
from kvd.machine import cuda
from kvd.machine.cuda import Undo
from kvd.machine.numa import parse_cpu_list
from kvd_proto.copies import Copies
from kvd_proto.messages import Handle, IpcHandle, VmmHandle, VmmSegment

_log = logging.getLogger(__name__)


def show_mig_slice(name: str) -> None:
    """Make the MIG slice of this name visible to this process, if the name is of one.

    A process sees one slice at most, which must be chosen before the driver starts.
    """
    if name.startswith("cuda:MIG-"):
        os.environ["CUDA_VISIBLE_DEVICES"] = f"MIG-{_uuid(name)}"


def find_device(name: str) -> int:
    """Return the driver's handle of the device that a registration names.

    Raises:
        CudaMissing: no device that this process sees has this UUID.
        CudaDriverError: the driver fails.
    """
    uuid = _uuid(name).bytes
    devices = cuda.devices()
    for device, device_uuid in devices:
        if device_uuid == uuid:
            return device
    listed = ", ".join(device_uuid.hex() for _, device_uuid in devices) or "none"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hint = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
    raise CudaMissing(
        f"no CUDA device has the UUID {uuid.hex()}; the lane sees {listed}{hint}. Let kvd see all"
        " devices (NVIDIA_VISIBLE_DEVICES=all), and name a MIG slice as cuda:MIG-<uuid>"
    )


def _uuid(name: str) -> UUID:
    return UUID(name.removeprefix("cuda:").removeprefix("MIG-"))


def bind_near_device(pci_bus_id: str, sysfs: Path = Path("/sys")) -> None:
    """Bind this thread, and threads started later, to the processors near a device."""
    try:
        folder = sysfs / "bus/pci/devices" / pci_bus_id.lower()
        near = parse_cpu_list((folder / "local_cpulist").read_text("ascii"))
        allowed = os.sched_getaffinity(0)
        if near & allowed and not near >= allowed:
            os.sched_setaffinity(0, near & allowed)
            _log.info("bound to the %d processors near the device", len(near & allowed))
    except (OSError, ValueError) as error:
        _log.info("the processors near device %s are not known: %s", pci_bus_id, error)


_AllocationKey = bytes | tuple[VmmSegment, ...]
# Storages that begin or end inside segments map some of them up to three times.
_MAX_MAPPINGS = 4


class ImportedMemory:
    """The mapped storages of one worker.

    Attributes:
        addresses: uint64[storages].
        close: a function that unmaps everything; nothing may be in flight. If the driver refuses,
            the memory stays mapped until this process ends.

    Args:
        handles, sizes, descriptors: see Device.import_memory.
        device: the device's handle.

    Raises:
        HandleRefused: the driver does not open a handle.
        ImportFailed: the driver fails, or memory is not as described. Nothing stays open.
    """

    def __init__(
        self,
        handles: Sequence[Handle],
        sizes: Sequence[int],
        descriptors: Sequence[int],
        device: int,
    ) -> None:
        self._descriptors, self._device = descriptors, device
        self._allocations: dict[_AllocationKey, tuple[int, int]] = {}
        self._claimed_bytes = 0  # of all descriptors
        try:
            with Undo() as self._undo:
                starts = [
                    self._map_storage(handle, size)
                    for handle, size in zip(handles, sizes, strict=True)
                ]
                self.close = self._undo.pop_all().close
        except CudaDriverError as error:
            raise ImportFailed(str(error)) from error
        self.addresses: Addresses = np.array(starts, np.uint64)

    def _map_storage(self, handle: Handle, size: int) -> int:
        if isinstance(handle, IpcHandle):
            key: _AllocationKey = handle.handle
        elif isinstance(handle, VmmHandle):
            key = handle.segments
        else:
            raise ImportFailed(
                f"{type(handle).__name__} is host memory; this is the lane of a CUDA device"
            )
        if key not in self._allocations:
            self._allocations[key] = (
                self._open_ipc(handle)
                if isinstance(handle, IpcHandle)
                else self._open_descriptors(handle.segments)
            )
        start, nbytes = self._allocations[key]
        claimed = handle.allocation if isinstance(handle, IpcHandle) else nbytes
        if claimed > nbytes or handle.offset + size > nbytes:
            raise ImportFailed(
                f"{size} bytes from offset {handle.offset} of an allocation of"
                f" {claimed} bytes do not lie inside the {nbytes} bytes that it has"
            )
        return start + handle.offset

    def _open_ipc(self, handle: IpcHandle) -> tuple[int, int]:
        try:
            address = driver.open_ipc(handle.handle)
        except CudaDriverError as error:
            raise HandleRefused(
                f"{error}; the worker must run on this machine and use this device, and its pid"
                " must differ from the lane's as a number: share the host's pids with containers"
            ) from error
        self._undo.add(driver.close_ipc, address)
        start, nbytes = driver.address_range(address)
        # Offsets count from the opened address.
        return address, nbytes - (address - start)

    def _open_descriptors(self, segments: Sequence[VmmSegment]) -> tuple[int, int]:
        nbytes, limit = sum(segment.nbytes for segment in segments), cuda.total_memory(self._device)
        self._claimed_bytes += nbytes
        if nbytes > limit or self._claimed_bytes > _MAX_MAPPINGS * limit:
            raise ImportFailed(
                f"an allocation of {nbytes} bytes is claimed, {self._claimed_bytes} bytes in all;"
                f" the device has {limit}"
            )
        sized = [(self._descriptors[segment.fd_index], segment.nbytes) for segment in segments]
        return driver.map_descriptors(sized, self._device, self._undo), nbytes


MAX_IN_FLIGHT = 256  # transfers of each direction


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """Options of a CUDA device that tests set.

    registration_bytes: of one registration of the pool; see PinnedPool.
    piece_bytes, bulk_bytes: see Device.
    bytes_in_flight: of each direction, from which on the device has no room.
    stuck_seconds: the lane ends if no transfer ends, or a call of the driver to pin or unpin does
        not return, for this long.
    inline_runs: see TransferStream.
    """

    registration_bytes: int | None = None
    piece_bytes: int = PIECE_BYTES
    bulk_bytes: int = 32 * 2**20
    bytes_in_flight: int = 64 * 2**20
    stuck_seconds: float = 120.0
    inline_runs: int | None = None


class CudaDevice(Device):
    """Moves bytes between workers' memory on one CUDA device and the pool.

    Args:
        name: of the device, with its UUID.
        pool_fd, pool_bytes, pin_lock: see PinnedPool.
        options: for tests.

    Raises:
        CudaMissing: no driver, no bindings, no such device, or one that allows no context.
        PoolError: the pool's file is smaller than `pool_bytes`, or cannot be mapped.
        CudaDriverError: the device cannot be set up. Nothing stays mapped or pinned.
    """

    pins = True

    def __init__(
        self,
        name: str,
        pool_fd: int,
        pool_bytes: int,
        options: CudaOptions | None = None,
        pin_lock: int | None = None,
    ) -> None:
        self._options = options = options or CudaOptions()
        self.piece_bytes: Mapping[Direction, int] = dict.fromkeys(Direction, options.piece_bytes)
        self.bulk_bytes: Mapping[Direction, int] = dict.fromkeys(Direction, options.bulk_bytes)
        self._memories: dict[MemoryId, ImportedMemory] = {}
        self._last_id = 0
        self._seen_pool_failures = 0  # after these the context has answered
        cuda.start()
        if warning := cuda.version_warning():
            _log.warning("%s", warning)
        self._device = find_device(name)
        if problem := cuda.compute_mode_problem(self._device):
            raise CudaMissing(problem)
        bind_near_device(cuda.pci_bus_id(self._device))
        self._undo = Undo()
        with Undo() as on_failure:
            on_failure.push(self._undo)
            self._set_up(pool_fd, pool_bytes, pin_lock)
            _log.info("%s: %r", cuda.device_name(self._device), self.copier)
            on_failure.pop_all()

    def _set_up(self, pool_fd: int, pool_bytes: int, pin_lock: int | None) -> None:
        undo, options = self._undo, self._options
        context = driver.retain_context(self._device)
        undo.add(driver.release_context, self._device)
        driver.use_context(context)
        least, greatest = driver.priorities()
        with Undo() as trial:
            stream = driver.create_stream(least)
            trial.add(driver.destroy_stream, stream)
            self.copier = choose_copier(stream)
        self._streams = {
            direction: TransferStream(
                direction, priority, self.copier, context, undo, inline_runs=options.inline_runs
            )
            for direction, priority in ((Direction.LOAD, greatest), (Direction.STORE, least))
        }
        self._pool = PinnedPool(pool_fd, pool_bytes, context, options.registration_bytes, pin_lock)
        undo.add(self._pool.close)

    @property
    def usable_bytes(self) -> int:
        """See Device."""
        return self._pool.usable_bytes

    @property
    def pinned_bytes(self) -> int:
        """See Device."""
        return self._pool.pinned_bytes

    def pin_arena(self, memory: MemoryId, begin: int, end: int) -> None:
        """See Device."""
        self._pool.request(memory, begin, end)

    def is_usable(self, begin: int, end: int) -> bool:
        """See Device."""
        return self._pool.is_usable(begin, end)

    @property
    def pool_error(self) -> str:
        """See Device."""
        return self._pool.error

    def unpin(self) -> bool:
        """See Device."""
        return self._pool.unpin()

    def import_memory(
        self, handles: Sequence[Handle], sizes: Sequence[int], descriptors: Sequence[int]
    ) -> MemoryId:
        """See Device.

        Raises:
            DeviceLost: the import failed, and the context does not answer.
        """
        if self._pool.error:
            raise ImportFailed(self._pool.error)
        try:
            imported = ImportedMemory(handles, sizes, descriptors, self._device)
        except ImportFailed as error:
            self._raise_if_lost(error)
            raise
        self._last_id += 1
        memory = MemoryId(self._last_id)
        self._memories[memory] = imported
        return memory

    def release_memory(self, memory: MemoryId) -> None:
        """See Device.

        Raises:
            DeviceLost: the release failed, and the context does not answer.
        """
        if memory not in self._memories:
            raise LaneError(f"memory {memory} is not mapped")
        if any(stream.uses(memory) for stream in self._streams.values()):
            raise LaneError(f"transfers are in flight on memory {memory}")
        self._pool.release(memory)
        try:
            self._memories.pop(memory).close()
        except CudaDriverError as error:
            self._raise_if_lost(error)
            _log.error("a worker's memory stays mapped until this lane ends: %s", error)

    def has_room(self, direction: Direction) -> bool:
        """See Device."""
        stream = self._streams[direction]
        return stream.nbytes < self._options.bytes_in_flight and len(stream) < MAX_IN_FLIGHT

    @property
    def in_flight(self) -> int:
        """See Device."""
        return sum(map(len, self._streams.values()))

    def prepare(
        self, memory: MemoryId, direction: Direction, pool_base: int, copies: Copies
    ) -> CudaRuns:
        """See Device."""
        if memory not in self._memories:
            raise LaneError(f"memory {memory} is not mapped")
        pool = PoolSide(pool_base, self._pool.piece_bytes, self._pool.address_bases)
        addresses = self._memories[memory].addresses
        return prepare(copies, pool, addresses, self.piece_bytes[direction])

    def submit(self, transfer: Transfer) -> None:
        """See Device."""
        if transfer.memory not in self._memories:
            raise LaneError(f"memory {transfer.memory} is not mapped")
        if not isinstance(transfer.runs, CudaRuns):
            raise LaneError("the runs were not prepared by this device")
        runs = RunSlice(transfer.runs.columns, transfer.begin, transfer.end)
        self._streams[transfer.direction].enqueue(transfer, runs)

    def progress(self) -> list[CompletedTransfer]:
        """See Device.

        Raises:
            DeviceLost: the context does not answer.
            LaneError: a transfer or a call of the driver hangs.
        """
        completed = []
        for stream in self._streams.values():
            completed += stream.progress()
        self._check_liveness()
        return completed

    def close(self) -> None:
        """See Device.

        Raises:
            CudaDriverError: the driver does not release something; the rest was released.
        """
        if self.in_flight:
            raise LaneError(f"{self.in_flight} transfers are in flight")
        for memory in self._memories.values():
            self._undo.add(memory.close)
        self._memories.clear()
        self._undo.close()

    def _raise_if_lost(self, error: LaneError) -> None:
        if not driver.is_alive(self._streams[Direction.LOAD].stream):
            raise DeviceLost(str(error)) from error

    def _check_liveness(self) -> None:
        """Raise if the device or the driver hangs, or the context is lost."""
        limit, pool = self._options.stuck_seconds, self._pool
        for stream in self._streams.values():
            if stream.stuck_seconds > limit:
                raise LaneError(f"the device hangs: {stream!r}, none has ended in {limit:g} s")
        if pool.stuck_seconds > limit:
            raise LaneError(f"the driver hangs: {pool!r} are pinned, unchanged for {limit:g} s")
        if pool.num_failures != self._seen_pool_failures:
            self._seen_pool_failures = pool.num_failures
            self._raise_if_lost(LaneError(pool.error or "the pool cannot be unpinned"))
