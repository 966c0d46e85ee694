"""The CUDA backend: the device's copy engines move the bytes, threads only enqueue and look.

The device is found by UUID, since indices differ from process to process. The lane's threads and
its own memory stay near it; the pool's memory is placed by who allocates it.

A worker's memory is opened by handle. Allocations are opened once, however many storages lie in
them. How large they are is the driver's word, not the worker's: of an IPC handle it tells the size,
and of a descriptor it maps no more than there is. (Virtual memory's size is not asked for:
`cuMemGetAddressRange` tells it in some drivers, and only once it may be reached.)

Each piece is enqueued on the stream of its direction, with an event after it: one of few runs by
the lane's thread, one of many by the direction's own (flow.py). `progress` asks the events. No
stream ever waits for something that another process must do; the worker's timeline is the
runner's to look at.

An error of one transfer is reported with that transfer, when nothing of it can move any more. An
error of an import or a release concerns that memory alone. After an error the context is asked
whether it still answers; where it does not, DeviceLost leaves this object: the lane process ends,
the broker starts another, and the pool and its directory are as they were.
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
from kvd.lane.cuda.copies import CudaRuns, PoolSide, RunSlice, choose, prepare
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


def show_slice(name: str) -> None:
    """Let this process see the MIG slice that is named, if one is.

    A process sees no more than one slice, and which one is settled before the driver starts.
    """
    if name.startswith("cuda:MIG-"):
        os.environ["CUDA_VISIBLE_DEVICES"] = f"MIG-{_uuid(name)}"


def find(name: str) -> int:
    """Return the driver's handle of the device with this name, as a registration has it.

    Raises:
        CudaMissing: no device that this process sees has this UUID.
        CudaDriverError: the driver fails.
    """
    uuid = _uuid(name).bytes
    seen = cuda.devices()
    for device, other in seen:
        if other == uuid:
            return device
    listed = ", ".join(other.hex() for _, other in seen) or "none"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hint = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
    raise CudaMissing(
        f"no CUDA device has the UUID {uuid.hex()}; the lane sees {listed}{hint}. Let kvd see all"
        " devices (NVIDIA_VISIBLE_DEVICES=all), and name a MIG slice as cuda:MIG-<uuid>"
    )


def _uuid(name: str) -> UUID:
    return UUID(name.removeprefix("cuda:").removeprefix("MIG-"))


def stay_near(pci_bus_id: str, sysfs: Path = Path("/sys")) -> None:
    """Bind this process to the processors near a device; threads that are started later follow."""
    try:
        folder = sysfs / "bus/pci/devices" / pci_bus_id.lower()
        near = parse_cpu_list((folder / "local_cpulist").read_text("ascii"))
        allowed = os.sched_getaffinity(0)
        if near & allowed and not near >= allowed:
            os.sched_setaffinity(0, near & allowed)
            _log.info("on the %d processors near the device", len(near & allowed))
    except (OSError, ValueError) as error:
        _log.info("the processors near device %s are not known: %s", pci_bus_id, error)


_Key = bytes | tuple[VmmSegment, ...]
# Storages that begin and end in the midst of segments map some of them up to three times.
_MAPPED_TIMES = 4


class ImportedMemory:
    """The storages of one worker.

    addresses: uint64[storages].
    close: unmaps everything; nothing may be in flight. Where the driver refuses, the memory stays
        the worker's and this process's until this process ends.

    Args:
        handles: one per storage.
        sizes: bytes of each storage.
        descriptors: what `fd_index` counts in; they stay the caller's.
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
        self._descriptors = descriptors
        self._device = device
        self._opened: dict[_Key, tuple[int, int]] = {}
        self._mapped = 0  # bytes that descriptors name, as claimed
        try:
            with Undo() as self._undo:
                starts = [
                    self._storage(handle, size) for handle, size in zip(handles, sizes, strict=True)
                ]
                self.close = self._undo.pop_all().close
        except CudaDriverError as error:
            raise ImportFailed(str(error)) from error
        self.addresses: Addresses = np.array(starts, np.uint64)

    def _storage(self, handle: Handle, size: int) -> int:
        if isinstance(handle, IpcHandle):
            key: _Key = handle.handle
        elif isinstance(handle, VmmHandle):
            key = handle.segments
        else:
            raise ImportFailed(
                f"{type(handle).__name__} is host memory; this is the lane of a CUDA device"
            )
        if key not in self._opened:
            self._opened[key] = (
                self._open_ipc(handle)
                if isinstance(handle, IpcHandle)
                else self._open_descriptors(handle.segments)
            )
        start, nbytes = self._opened[key]
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
        # Offsets count from the allocation's start, which is what opening it returns.
        return address, nbytes - (address - start)

    def _open_descriptors(self, segments: Sequence[VmmSegment]) -> tuple[int, int]:
        nbytes, limit = sum(segment.nbytes for segment in segments), cuda.total_memory(self._device)
        self._mapped += nbytes
        if nbytes > limit or self._mapped > _MAPPED_TIMES * limit:
            raise ImportFailed(
                f"an allocation of {nbytes} bytes is claimed, {self._mapped} bytes in all; the"
                f" device has {limit}"
            )
        named = [(self._descriptors[segment.fd_index], segment.nbytes) for segment in segments]
        return driver.map_descriptors(named, self._device, self._undo), nbytes


MOST_IN_FLIGHT = 256  # transfers of each direction


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """What tests choose about a device.

    registration_bytes: of one registration of the pool; see PinnedPool.
    piece_bytes, bulk_bytes: see Device.
    bytes_in_flight: of each direction, above which no more is asked for.
    stuck_seconds: after which a device that ends nothing, or a call that pins or unpins, is given
        up.
    inline_runs: see Flow.
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
        name: the device's, with its UUID.
        pool_fd: the pool's file; stays the caller's.
        pool_bytes: its size.
        options: see Options.
        pin_lock: see PinnedPool.

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
        self._pool_failures = 0  # after which the context answered
        cuda.start()
        if lacking := cuda.version_warning():
            _log.warning("%s", lacking)
        self._device = find(name)
        if refusal := cuda.compute_mode_problem(self._device):
            raise CudaMissing(refusal)
        stay_near(cuda.pci_bus_id(self._device))
        self._undo = Undo()
        with Undo() as failed:
            failed.push(self._undo)
            self._set_up(pool_fd, pool_bytes, pin_lock)
            _log.info("%s: %r", cuda.device_name(self._device), self.copier)
            failed.pop_all()

    def _set_up(self, pool_fd: int, pool_bytes: int, pin_lock: int | None) -> None:
        undo, options = self._undo, self._options
        context = driver.retain_context(self._device)
        undo.add(driver.release_context, self._device)
        driver.use_context(context)
        least, greatest = driver.priorities()
        with Undo() as trial:
            stream = driver.create_stream(least)
            trial.add(driver.destroy_stream, stream)
            self.copier = choose(stream)
        self._flows = {
            way: TransferStream(
                way, priority, self.copier, context, undo, inline_runs=options.inline_runs
            )
            for way, priority in ((Direction.LOAD, greatest), (Direction.STORE, least))
        }
        self._pool = PinnedPool(pool_fd, pool_bytes, context, options.registration_bytes, pin_lock)
        undo.add(self._pool.close)

    @property
    def usable_bytes(self) -> int:
        """See Device."""
        return self._pool.usable

    @property
    def pinned_bytes(self) -> int:
        """See Device."""
        return self._pool.pinned

    def use_arena(self, memory: MemoryId, begin: int, end: int) -> None:
        """See Device."""
        self._pool.need(memory, begin, end)

    def holds(self, begin: int, end: int) -> bool:
        """See Device."""
        return self._pool.holds(begin, end)

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
            DeviceLost: the import failed, and the context does not answer any more.
        """
        if self._pool.error:
            raise ImportFailed(self._pool.error)
        try:
            imported = ImportedMemory(handles, sizes, descriptors, self._device)
        except ImportFailed as error:
            self._end_if_lost(error)
            raise
        self._last_id += 1
        memory = MemoryId(self._last_id)
        self._memories[memory] = imported
        return memory

    def release_memory(self, memory: MemoryId) -> None:
        """See Device.

        Raises:
            DeviceLost: the release failed, and the context does not answer any more.
        """
        if memory not in self._memories:
            raise LaneError(f"memory {memory} is not mapped")
        if any(flow.uses(memory) for flow in self._flows.values()):
            raise LaneError(f"transfers are in flight on memory {memory}")
        self._pool.drop(memory)
        try:
            self._memories.pop(memory).close()
        except CudaDriverError as error:
            self._end_if_lost(error)
            _log.error("a worker's memory stays mapped until this lane ends: %s", error)

    def has_room(self, direction: Direction) -> bool:
        """See Device."""
        flow = self._flows[direction]
        return flow.nbytes < self._options.bytes_in_flight and len(flow) < MOST_IN_FLIGHT

    @property
    def in_flight(self) -> int:
        """See Device."""
        return sum(map(len, self._flows.values()))

    def prepare(
        self,
        memory: MemoryId,
        direction: Direction,
        pool_base: int,
        copies: Copies,
    ) -> CudaRuns:
        """See Device."""
        if memory not in self._memories:
            raise LaneError(f"memory {memory} is not mapped")
        pool = PoolSide(pool_base, self._pool.piece_bytes, self._pool.where)
        longest = self.piece_bytes[direction]
        return prepare(copies, pool, self._memories[memory].addresses, longest)

    def submit(self, transfer: Transfer) -> None:
        """See Device."""
        if transfer.memory not in self._memories:
            raise LaneError(f"memory {transfer.memory} is not mapped")
        if not isinstance(transfer.moves, CudaRuns):
            raise LaneError(f"{transfer.moves!r} was not prepared by this device")
        runs = RunSlice(transfer.moves.columns, transfer.begin, transfer.end)
        self._flows[transfer.direction].enqueue(transfer, runs)

    def progress(self) -> list[CompletedTransfer]:
        """See Device.

        Raises:
            DeviceLost: the context does not answer any more.
            LaneError: a transfer or a call of the driver hangs.
        """
        ended = []
        for flow in self._flows.values():
            ended += flow.progress()
        self._check_pulse()
        return ended

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

    def _end_if_lost(self, error: LaneError) -> None:
        if not driver.is_alive(self._flows[Direction.LOAD].stream):
            raise DeviceLost(str(error)) from error

    def _check_pulse(self) -> None:
        """Raise where the device or the driver hangs, or the context is lost."""
        limit, pool = self._options.stuck_seconds, self._pool
        for flow in self._flows.values():
            if flow.stuck_seconds > limit:
                raise LaneError(f"the device hangs: {flow!r}, none has ended in {limit:g} s")
        if pool.stuck_seconds > limit:
            raise LaneError(f"the driver hangs: {pool!r} are pinned, unchanged for {limit:g} s")
        if pool.failures != self._pool_failures:
            self._pool_failures = pool.failures
            self._end_if_lost(LaneError(pool.error or "the pool cannot be unpinned"))
