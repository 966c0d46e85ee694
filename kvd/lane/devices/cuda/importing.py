"""A worker's device memory, opened by handle.

Allocations are opened once, however many storages lie in them. How large they are
is the driver's word, not the worker's: of an IPC handle it tells the size, and of
a descriptor it maps no more than there is. (Virtual memory's size is not asked for:
`cuMemGetAddressRange` tells it in some drivers, and only once it may be reached.)
"""

from collections.abc import Sequence

import numpy as np

from kvd.errors import CudaError, HandleRefused, ImportFailed
from kvd.lane.devices.cuda import driver
from kvd.lane.devices.cuda.driver import Addresses
from kvd.machine import cuda
from kvd.machine.cuda import Undo
from kvd_proto.messages import Handle, IpcHandle, VmmHandle, VmmSegment

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
        except CudaError as error:
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
        except CudaError as error:
            raise HandleRefused(
                f"{error}; the worker must run on this machine and use this device, and its pid"
                " must differ from the lane's as a number: share the host's pids with containers"
            ) from error
        self._undo.add(driver.close_ipc, address)
        start, nbytes = driver.address_range(address)
        # Offsets count from the allocation's start, which is what opening it returns.
        return address, nbytes - (address - start)

    def _open_descriptors(self, segments: Sequence[VmmSegment]) -> tuple[int, int]:
        nbytes, limit = sum(segment.nbytes for segment in segments), cuda.memory_of(self._device)
        self._mapped += nbytes
        if nbytes > limit or self._mapped > _MAPPED_TIMES * limit:
            raise ImportFailed(
                f"an allocation of {nbytes} bytes is claimed, {self._mapped} bytes in all; the"
                f" device has {limit}"
            )
        named = [(self._descriptors[segment.fd_index], segment.nbytes) for segment in segments]
        return driver.map_descriptors(named, self._device, self._undo), nbytes
