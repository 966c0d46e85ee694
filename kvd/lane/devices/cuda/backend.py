"""The CUDA backend: the device's copy engines move the bytes, threads only enqueue and look.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvd.errors import CudaError, CudaMissing, DeviceLost, ImportFailed, LaneError
from kvd.lane.devices.cuda import copies, driver, moves, uuids
from kvd.lane.devices.cuda.flow import Flow
from kvd.lane.devices.cuda.importing import ImportedMemory
from kvd.lane.devices.cuda.moves import CudaMoves, PoolSide, Runs
from kvd.lane.devices.cuda.pinning import PinnedPool
from kvd.lane.devices.device import (
    PIECE_BYTES,
    Device,
    Direction,
    Finished,
    MemoryId,
    Transfer,
)
from kvd.machine import cuda
from kvd.machine.cuda import Undo
from kvd_proto.copies import Copies
from kvd_proto.messages import Handle

_log = logging.getLogger(__name__)

MOST_IN_FLIGHT = 256  # transfers of each direction


@dataclass(frozen=True, slots=True)
class Options:
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
        name: the device's, with its UUID; see uuids.py.
        pool_fd: the pool's file; stays the caller's.
        pool_bytes: its size.
        options: see Options.
        pin_lock: see PinnedPool.

    Raises:
        CudaMissing: no driver, no bindings, no such device, or one that allows no context.
        PoolError: the pool's file is smaller than `pool_bytes`, or cannot be mapped.
        CudaError: the device cannot be set up. Nothing stays mapped or pinned.
    """

    pins = True

    def __init__(
        self,
        name: str,
        pool_fd: int,
        pool_bytes: int,
        options: Options | None = None,
        pin_lock: int | None = None,
    ) -> None:
        self._options = options = options or Options()
        self.piece_bytes: Mapping[Direction, int] = dict.fromkeys(Direction, options.piece_bytes)
        self.bulk_bytes: Mapping[Direction, int] = dict.fromkeys(Direction, options.bulk_bytes)
        self._memories: dict[MemoryId, ImportedMemory] = {}
        self._last_id = 0
        self._pool_failures = 0  # after which the context answered
        cuda.start()
        if lacking := cuda.shortcomings():
            _log.warning("%s", lacking)
        self._device = uuids.find(name)
        if refusal := cuda.refusal(self._device):
            raise CudaMissing(refusal)
        uuids.stay_near(cuda.pci_bus_id(self._device))
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
            self.copier = copies.choose(stream)
        self._flows = {
            way: Flow(way, priority, self.copier, context, undo, inline_runs=options.inline_runs)
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
        except CudaError as error:
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
    ) -> CudaMoves:
        """See Device."""
        if memory not in self._memories:
            raise LaneError(f"memory {memory} is not mapped")
        pool = PoolSide(pool_base, self._pool.piece_bytes, self._pool.where)
        longest = self.piece_bytes[direction]
        return moves.prepare(copies, pool, self._memories[memory].addresses, longest)

    def submit(self, transfer: Transfer) -> None:
        """See Device."""
        if transfer.memory not in self._memories:
            raise LaneError(f"memory {transfer.memory} is not mapped")
        if not isinstance(transfer.moves, CudaMoves):
            raise LaneError(f"{transfer.moves!r} was not prepared by this device")
        runs = Runs(transfer.moves.columns, transfer.begin, transfer.end)
        self._flows[transfer.direction].enqueue(transfer, runs)

    def progress(self) -> list[Finished]:
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
            CudaError: the driver does not release something; the rest was released.
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
