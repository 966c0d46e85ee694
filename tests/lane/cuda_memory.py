"""Device memory that another process owns, as a worker's is, and raw access to it.

Run as a process of its own: an allocation cannot be opened where it was made.
"""

import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvd_client import sealed
from kvd_proto.messages import Handle, IpcHandle, VmmHandle
from tests.lane.device_contract import Bytes, Source

GAP = 256
GRANULE = 2 * 2**20
PATIENCE = 60


class CudaWorkers:
    """A process with device memory.

    Args:
        ipc: handles are those of CUDA IPC; otherwise descriptors of virtual memory.
    """

    def __init__(self, *, ipc: bool) -> None:
        self._ipc = ipc
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = near
        self._process = context.Process(target=_serve, args=(theirs, far), daemon=True)
        self._process.start()
        theirs.close()
        far.close()
        self._addresses: dict[tuple[int, ...], list[int]] = {}
        self._descriptors: list[int] = []

    def make(self, sizes: Sequence[int]) -> Source:
        """Storages with gaps between them; the first two share an allocation."""
        together, apart = sizes[:2], sizes[2:]
        handles: list[Handle] = []
        addresses: list[int] = []
        descriptors = [sealed.make("control page", 4096)]
        for group in (together, *((size,) for size in apart)):
            total = sum(group) + GAP * (len(group) + 1)
            offset = GAP
            if self._ipc:
                base, name = self._ask("allocate", total)
            else:
                total = -(-total // GRANULE) * GRANULE
                base = self._ask("create", total)
                descriptors += socket.recv_fds(self._socket, 1, 1)[1]
            for size in group:
                handles.append(
                    IpcHandle(name, total, offset)
                    if self._ipc
                    else VmmHandle(len(descriptors) - 1, total, offset)
                )
                addresses.append(base + offset)
                offset += size + GAP
        self._descriptors += descriptors
        source = Source(tuple(handles), tuple(descriptors))
        self._addresses[tuple(descriptors)] = addresses
        return source

    def get(self, source: Source, storage: int, offset: int, nbytes: int) -> Bytes:
        """A copy of a storage's bytes."""
        data = self._ask("get", self._address(source, storage) + offset, nbytes)
        return np.frombuffer(data, np.uint8)

    def put(self, source: Source, storage: int, offset: int, data: Bytes) -> None:
        """Write a storage's bytes."""
        self._ask("put", self._address(source, storage) + offset, data.tobytes())

    def close(self) -> None:
        """End the process."""
        self._ours.close()
        self._process.join(PATIENCE)
        self._process.kill()
        self._process.join()
        self._socket.close()
        self.forget()

    def forget(self) -> None:
        """Close the descriptors of all that was made; nobody uses it any more."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._addresses.clear()

    def _address(self, source: Source, storage: int) -> int:
        return self._addresses[tuple(source.descriptors)][storage]

    def _ask(self, *request: object) -> Any:
        self._ours.send(request)
        if not self._ours.poll(PATIENCE):
            raise TimeoutError(f"the process with device memory does not do {request[0]}")
        answer = self._ours.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(pipe: Connection, descriptors: socket.socket) -> None:
    """The process: does what it is asked until the other end closes."""
    from tests.fakecuda import cudatensor  # noqa: PLC0415  # the driver starts in this process

    cudatensor.use_device()

    def allocate(nbytes: int) -> tuple[int, bytes]:
        made = cudatensor.DeviceMemory(nbytes)
        return made.address, made.handle()

    def create(nbytes: int) -> int:
        made = cudatensor.VirtualMemory(nbytes)
        descriptor = made.descriptor()
        socket.send_fds(descriptors, [b"."], [descriptor])
        os.close(descriptor)
        return made.address

    def get(address: int, nbytes: int) -> bytes:
        return cudatensor.DeviceBytes(address, nbytes).read()

    def put(address: int, data: bytes) -> None:
        cudatensor.DeviceBytes(address, len(data)).write(data)

    does: dict[str, Callable[..., Any]] = {
        "allocate": allocate,
        "create": create,
        "get": get,
        "put": put,
    }
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(does[name](*arguments))
        except Exception as error:  # noqa: BLE001  # the test is to see it
            pipe.send(RuntimeError(str(error)))
