"""A worker's device memory, opened by handle.

Every allocation is opened once, however many storages lie in it, and the worker's
figures are compared with the driver's.
"""

from collections.abc import Sequence

import numpy as np

from kvd.errors import CudaError, ImportFailed
from kvd.lane.devices.cuda import driver
from kvd.lane.devices.cuda.driver import Addresses, Undo
from kvd_proto.messages import Handle, IpcHandle, VmmHandle, VmmSegment

_Key = bytes | tuple[VmmSegment, ...]


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
        ImportFailed: memory that is not as described; nothing stays open.
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
                else self._open_descriptor(handle.segments)
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
            raise ImportFailed(
                f"{error}; the worker must run on this machine and use this device, and its pid"
                " must differ from the lane's as a number: share the host's pids with containers"
            ) from error
        self._undo.add(driver.close_ipc, address)
        start, nbytes = driver.address_range(address)
        # Offsets count from the allocation's start, which is what opening it returns.
        return address, nbytes - (address - start)

    def _open_descriptor(self, segments: Sequence[VmmSegment]) -> tuple[int, int]:
        if len(segments) > 1:
            raise ImportFailed(f"a storage of {len(segments)} segments: one is served")
        nbytes, limit = segments[0].nbytes, driver.memory_of(self._device)
        if nbytes > limit:
            raise ImportFailed(
                f"an allocation of {nbytes} bytes is claimed, the device has {limit}"
            )
        descriptor = self._descriptors[segments[0].fd_index]
        address = driver.map_descriptor(descriptor, nbytes, self._device, self._undo)
        # The driver refuses to map more than there is; the size of the mapping is checked too.
        start, have = driver.address_range(address)
        if start > address or start + have < address + nbytes:
            raise ImportFailed(f"{nbytes} bytes of an allocation are claimed, it has {have}")
        return address, nbytes
