"""Device memory that another process owns, as a worker's is, and raw access to it.

Run as a process of its own: an allocation cannot be opened where it was made.
"""

import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from kvd_client.memory import sealed_file
from kvd_proto.messages import Handle, IpcHandle, VmmHandle, VmmSegment
from tests.asked import Asked
from tests.fakecuda import cudatensor
from tests.fakecuda.harness import FakeCuda
from tests.lane.device_contract import Bytes, Source

GAP = 256


class CudaWorkers:
    """A process with device memory.

    Args:
        ipc: handles are those of CUDA IPC; otherwise descriptors of virtual memory, whose first
            storage begins in the midst of one segment and goes on in the next.
        library: the test driver's, for a process that is forked from this one, which has not
            loaded it yet; without it the process is a fresh one.
    """

    def __init__(self, *, ipc: bool, library: Path | None = None) -> None:
        self._ipc = ipc
        self._socket, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = Asked(_Memory, far, library, forked=library is not None)
        far.close()
        self._addresses: dict[tuple[int, ...], list[int]] = {}
        self._descriptors: list[int] = []

    def make(self, sizes: Sequence[int]) -> Source:
        """Storages with gaps between them; the first two share an allocation, or segments."""
        together, apart = sizes[:2], sizes[2:]
        handles: list[Handle] = []
        addresses: list[int] = []
        descriptors = [sealed_file("control page", 4096)]
        for group in (together, *((size,) for size in apart)):
            handle: Callable[[int], Handle]
            total = sum(group) + GAP * (len(group) + 1)
            offset = GAP if self._ipc else cudatensor.GRANULARITY - group[0] // 2
            if self._ipc:
                base, name = self._process.ask("allocate", total)
                handle = partial(IpcHandle, name, total)
            else:
                base, segments = self._create(offset + total, descriptors)
                handle = partial(VmmHandle, segments)
            for size in group:
                handles.append(handle(offset))
                addresses.append(base + offset)
                offset += size + GAP
        self._descriptors += descriptors
        source = Source(tuple(handles), tuple(descriptors))
        self._addresses[tuple(descriptors)] = addresses
        return source

    def _create(self, total: int, descriptors: list[int]) -> tuple[int, tuple[VmmSegment, ...]]:
        """Virtual memory of at least so many bytes; its address and segments."""
        nbytes = cudatensor.GRANULARITY
        count = -(-total // nbytes)
        base = self._process.ask("create", count)
        first = len(descriptors)
        while len(descriptors) < first + count:
            descriptors += socket.recv_fds(self._socket, 1, 1)[1]
        return base, tuple(VmmSegment(first + index, nbytes) for index in range(count))

    def get(self, source: Source, storage: int, offset: int, nbytes: int) -> Bytes:
        """A copy of a storage's bytes."""
        data = self._process.ask("get", self._address(source, storage) + offset, nbytes)
        return np.frombuffer(data, np.uint8)

    def put(self, source: Source, storage: int, offset: int, data: Bytes) -> None:
        """Write a storage's bytes."""
        self._process.ask("put", self._address(source, storage) + offset, data.tobytes())

    def close(self) -> None:
        """End the process."""
        self._process.close()
        self._socket.close()
        self._close_descriptors()

    def forget(self) -> None:
        """Give back all that was made; nobody uses it any more."""
        self._process.ask("free")
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._addresses.clear()

    def _address(self, source: Source, storage: int) -> int:
        return self._addresses[tuple(source.descriptors)][storage]


class _Memory:
    """The memory itself, in its process."""

    def __init__(self, descriptors: socket.socket, library: Path | None) -> None:
        if library is not None:
            FakeCuda(library).load()
        cudatensor.use_device()
        self._socket = descriptors
        self._allocated: list[cudatensor.DeviceMemory] = []

    def allocate(self, nbytes: int) -> tuple[int, bytes]:
        """Memory with an IPC handle: its address, and the handle."""
        made = cudatensor.DeviceMemory(nbytes)
        self._allocated.append(made)
        return made.address, made.handle()

    def free(self) -> None:
        """Give back what `allocate` made: the device's memory is as large as a test's."""
        while self._allocated:
            self._allocated.pop().free()

    def create(self, segments: int) -> int:
        """Virtual memory: its address; the descriptors are sent."""
        made = cudatensor.VirtualMemory(segments=segments)
        for descriptor in made.descriptors():
            socket.send_fds(self._socket, [b"."], [descriptor])
            os.close(descriptor)
        return made.address

    def get(self, address: int, nbytes: int) -> bytes:
        """A copy of bytes."""
        return cudatensor.DeviceBytes(address, nbytes).read()

    def put(self, address: int, data: bytes) -> None:
        """Write bytes."""
        cudatensor.DeviceBytes(address, len(data)).write(data)

    def close(self) -> None:
        """The process ends, and its memory with it."""
