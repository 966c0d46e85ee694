"""The CUDA backend: the device's copy engines move the bytes, threads only enqueue and look.

Each piece is enqueued on the stream of its direction, with an event after it: one of few runs by
the lane's thread, one of many by the direction's own (flow.py). `progress` asks the events. No
stream ever waits for something that another process must do; the worker's timeline is the
runner's to look at.

An error of one transfer is reported with that transfer, when nothing of it can
move any more. DeviceLost leaves this object: the lane process ends, the broker
starts another, and the pool and its directory are as they were.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from kvd.errors import DeviceLost, ImportFailed, LaneError
from kvd.lane.devices.cuda import calibration, driver, moves, uuids
from kvd.lane.devices.cuda.calibration_file import path_in
from kvd.lane.devices.cuda.driver import Undo
from kvd.lane.devices.cuda.flow import Flow
from kvd.lane.devices.cuda.importing import ImportedMemory
from kvd.lane.devices.cuda.moves import CudaMoves, Runs
from kvd.lane.devices.cuda.options import Options
from kvd.lane.devices.cuda.pinning import PinnedPool
from kvd.lane.devices.device import Device, Direction, Finished, MemoryId, Transfer
from kvd_proto.copies import Copies
from kvd_proto.messages import Handle

_log = logging.getLogger(__name__)

MOST_IN_FLIGHT = 256  # transfers of each direction


class CudaDevice(Device):
    """Moves bytes between workers' memory on one CUDA device and the pool.

    Transfers may be submitted before the pool is pinned: they wait for their part of it.

    Args:
        name: the device's, with its UUID; see uuids.py.
        pool_fd: the pool's file; stays the caller's.
        pool_bytes: its size.
        options: see Options.
        folder: where what was measured is kept for the lanes that follow; None: nowhere.

    Raises:
        CudaMissing: no driver, no bindings, or no such device.
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
        folder: Path | None = None,
    ) -> None:
        self._options = options = options or Options()
        self.piece_bytes: Mapping[Direction, int] = dict.fromkeys(Direction, options.piece_bytes)
        self.bulk_bytes: Mapping[Direction, int] = dict.fromkeys(Direction, options.bulk_bytes)
        self._memories: dict[MemoryId, ImportedMemory] = {}
        self._last_id = 0
        self._held: deque[Transfer] = deque()
        self._ended: list[Finished] = []
        self._lost: DeviceLost | None = None
        self._undo = Undo()
        driver.start()
        if lacking := driver.shortcomings():
            _log.warning("%s", lacking)
        self._device = uuids.find(name)
        uuids.stay_near(driver.pci_bus_id(self._device))
        with Undo() as failed:
            failed.push(self._undo)
            self._set_up(name, pool_fd, pool_bytes, folder)
            failed.pop_all()

    def _set_up(self, name: str, pool_fd: int, pool_bytes: int, folder: Path | None) -> None:
        options = self._options
        context = driver.retain_context(self._device)
        self._undo.add(driver.release_context, self._device)
        driver.use_context(context)
        least, greatest = driver.priorities()
        model = driver.device_name(self._device)
        place = folder and path_in(folder, name)
        self.copier = calibration.choose(least, options, (name, model), place, self._undo)
        self._flows = {
            direction: Flow(direction, priority, self.copier, context, self._undo)
            for direction, priority in ((Direction.LOAD, greatest), (Direction.STORE, least))
        }
        for flow in self._flows.values():
            flow.inline_runs = options.inline_runs
        # Last: what was measured above was measured while nothing else moved.
        self._pool = PinnedPool(pool_fd, pool_bytes, context, options.registration_bytes)
        self._undo.add(self._pool.close)
        self._filled_with = np.array(self._pool.fill.filled_with, np.int64)
        _log.info("%s: %r", model, self.copier)

    @property
    def usable_bytes(self) -> int:
        """What is pinned."""
        return self._pool.pinned

    def holds(self, begin: int, end: int) -> bool:
        """See Device."""
        return self._pool.holds(begin, end)

    @property
    def pool_error(self) -> str:
        """See Device."""
        return self._pool.error

    def import_memory(
        self, handles: Sequence[Handle], sizes: Sequence[int], descriptors: Sequence[int]
    ) -> MemoryId:
        """See Device."""
        if self._pool.error:
            raise ImportFailed(self._pool.error)
        imported = ImportedMemory(handles, sizes, descriptors, self._device)
        self._last_id += 1
        memory = MemoryId(self._last_id)
        self._memories[memory] = imported
        return memory

    def release_memory(self, memory: MemoryId) -> None:
        """See Device.

        Raises:
            CudaError: the driver does not release it; only the end of this process will.
        """
        if memory not in self._memories:
            raise LaneError(f"memory {memory} is not mapped")
        if any(flow.uses(memory) for flow in self._flows.values()) or any(
            transfer.memory == memory for transfer in self._held
        ):
            raise LaneError(f"transfers are in flight on memory {memory}")
        self._memories.pop(memory).close()

    def has_room(self, direction: Direction) -> bool:
        """See Device."""
        flow = self._flows[direction]
        held = sum([transfer.nbytes for transfer in self._held])
        return (
            held + flow.nbytes < self._options.bytes_in_flight
            and len(self._held) + len(flow) < MOST_IN_FLIGHT
        )

    @property
    def in_flight(self) -> int:
        """See Device."""
        return len(self._held) + len(self._ended) + sum(map(len, self._flows.values()))

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
        return moves.prepare(
            copies,
            pool_base=pool_base,
            storages=self._memories[memory].addresses,
            longest=self.piece_bytes[direction],
            registration_bytes=self._pool.piece_bytes,
            filled_with=self._filled_with,
            where=self._pool.where if self._pool.pinned == self._pool.nbytes else None,
        )

    def submit(self, transfer: Transfer) -> None:
        """See Device."""
        if transfer.memory not in self._memories:
            raise LaneError(f"memory {transfer.memory} is not mapped")
        if self._is_pinned(transfer):
            self._enqueue(transfer)
        else:
            self._held.append(transfer)

    def progress(self) -> list[Finished]:
        """See Device.

        Raises:
            DeviceLost, LaneError: it is lost, or hangs.
        """
        for _ in range(len(self._held)):
            transfer = self._held.popleft()
            if self._pool.error:
                self._ended.append(Finished(transfer, 0, self._pool.error))
            elif self._is_pinned(transfer):
                self._enqueue(transfer)
            else:
                self._held.append(transfer)
        if self._lost is not None:
            raise self._lost
        ended, self._ended = self._ended, []
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

    def _enqueue(self, transfer: Transfer) -> None:
        made = _made_here(transfer)
        if not made.placed:
            made.place(self._pool.where)
        try:
            self._flows[transfer.direction].enqueue(
                transfer, Runs(made.columns, transfer.begin, transfer.end)
            )
        except DeviceLost as error:
            self._lost = error  # for `progress` to raise: a job's failure is not the place

    def _check_pulse(self) -> None:
        """A device that hangs is not waited for for ever: the next lane may find it well."""
        limit = self._options.stuck_seconds
        for flow in self._flows.values():
            if flow.stuck_seconds > limit:
                raise LaneError(f"the device hangs: {flow!r}, none has ended in {limit:g} s")
        if self._held and self._pool.stuck_seconds > limit:
            raise LaneError(f"the driver hangs: {self._pool!r} is pinned, no more in {limit:g} s")

    def _is_pinned(self, transfer: Transfer) -> bool:
        return self._pool.pinned >= _made_here(transfer).needed


def _made_here(transfer: Transfer) -> CudaMoves:
    if not isinstance(transfer.moves, CudaMoves):
        raise LaneError(f"{transfer.moves!r} was not prepared by this device")
    return transfer.moves
