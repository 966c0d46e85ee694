"""A scheduler's session spoken by hand, message by message, and the rank that its engine needs."""

import mmap
import os
import select
import socket
import time
from collections import deque
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import zmq
from harness import SECONDS, engine_name, layout

from kvd_client import JobBlocks, Store
from kvd_client.dealer import Dealer
from kvd_client.memory import HostMemory
from kvd_client.worker import Worker
from kvd_proto.codec import WIRE
from kvd_proto.directory import DirectoryView
from kvd_proto.messages import PROTOCOL_VERSION, Attached, Fingerprint, Hello, Message

M = TypeVar("M", bound=Message)
Array = npt.NDArray[Any]


class Wire:
    """A DEALER socket as engines have one, without libzmq; what the benchmarks need of it."""

    def __init__(self, path: Path) -> None:
        self._dealer = Dealer(str(path))
        self._poll = select.poll()
        self._poll.register(self._dealer, select.POLLIN)
        self._arrived: deque[bytes] = deque()

    def fileno(self) -> int:
        """For polling."""
        return self._dealer.fileno()

    def send(self, frame: bytes) -> None:
        """Send a message."""
        if not self._dealer.send(frame):
            raise RuntimeError("the connection is closed")

    def receive(self) -> deque[bytes]:
        """What has arrived, to be taken out."""
        self._arrived += self._dealer.receive()
        return self._arrived

    def poll(self, milliseconds: float) -> bool:
        """Wait until there is a message; whether there is."""
        end = time.monotonic() + milliseconds / 1e3
        while not self.receive() and (left := end - time.monotonic()) > 0:
            self._poll.poll(left * 1e3)
        return bool(self._arrived)

    def recv(self) -> bytes:
        """The next message, which has arrived."""
        return self._arrived.popleft()

    def close(self) -> None:
        """Close it."""
        self._dealer.close()


class RawScheduler:
    """A session of kind `scheduler` of an engine.

    Args:
        context: for a socket of libzmq's; None: a `Wire`.

    Attributes:
        socket: its DEALER socket, for frames that `frame` has made.
    """

    def __init__(self, context: "zmq.Context[Any] | None", runtime_dir: Path, engine: str) -> None:
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(SECONDS)
        self._control.connect(str(runtime_dir / "control.sock"))
        header, _ = WIRE.decode(self._control.recv(65536))
        self._ids = header.boot_id, header.session
        self._sent = 0
        path = runtime_dir / "broker.sock"
        self.socket: Any = None
        if context is None:
            self.socket = Wire(path)
        else:
            self.socket = context.socket(zmq.DEALER)
            self.socket.linger = 0
            self.socket.connect(f"ipc://{path}")
        self.ask(
            Hello(
                kind="scheduler",
                engine=engine,
                pid=os.getpid(),
                protocol_min=PROTOCOL_VERSION,
                protocol_max=PROTOCOL_VERSION,
                client="bench",
            )
        )

    def frame(self, message: Message) -> bytes:
        """The next request."""
        self._sent += 1
        return WIRE.encode(message, self._sent, *self._ids)

    def ask(self, message: Message) -> Message:
        """The reply to a request."""
        return WIRE.decode(self.exchange(self.frame(message)))[1]

    def exchange(self, frame: bytes) -> bytes:
        """Send a request and wait for its reply."""
        self.socket.send(frame)
        if not self.socket.poll(int(SECONDS * 1e3)):
            raise RuntimeError(f"no reply to {frame!r}")
        reply: bytes = self.socket.recv()
        return reply

    def wait_attached(self) -> DirectoryView:
        """Wait until the engine is complete; its directory."""
        while True:
            frame, fds, _, _ = socket.recv_fds(self._control, 65536, 4)
            try:
                if not frame:
                    raise RuntimeError("the daemon has ended")
                if isinstance(WIRE.decode(frame)[1], Attached):
                    return DirectoryView(mmap.mmap(fds[0], 0, prot=mmap.PROT_READ))
            finally:
                for fd in fds:
                    os.close(fd)

    def close(self) -> None:
        """Leave."""
        self._control.close()
        self.socket.close()


def reply_to(frame: bytes, kind: type[M]) -> M:
    """The message of a reply.

    Raises:
        RuntimeError: it is another one.
    """
    message = WIRE.decode(frame)[1]
    if isinstance(message, kind):
        return message
    raise RuntimeError(f"{message!r} for a {kind.__name__}")


class RawWorker:
    """The only rank of an engine; a chunk is one block of one page."""

    def __init__(
        self, runtime_dir: Path, engine: str, *, page: int, num_blocks: int, model: str = "bench"
    ) -> None:
        shape = layout(1, page, num_blocks)
        self._num_blocks = num_blocks
        self._memory = HostMemory.allocate(shape.storages[0])
        self._job = 0
        self.worker = Worker(runtime_dir, engine, 0, 1)
        self.worker.register([self._memory], shape, Fingerprint(model=model), required=True)
        if not self.worker.wait_attached(SECONDS):
            raise RuntimeError("the engine does not become complete")

    def submit(self, slots: Array, generations: Array) -> int:
        """Begin to write chunks into these slots; the number of the job."""
        self._job += 1
        blocks = 1 + np.arange(len(slots)) % (self._num_blocks - 1)
        job = JobBlocks.of(blocks, [len(blocks)], [0], slots, generations)
        self.worker.submit(Store, self._job, job)
        return self._job

    def write(self, slots: Array, generations: Array) -> None:
        """Write chunks into these slots, so that they become READY."""
        job = self.submit(slots, generations)
        self.worker.wait([job], SECONDS)
        if not all(result.success for result in self.worker.get_finished()):
            raise RuntimeError("a store has failed")

    def close(self) -> None:
        """Leave."""
        self.worker.close()
        self._memory.close()


class RawEngine:
    """An engine of one rank whose scheduler is spoken by hand; ended with the context."""

    def __init__(
        self, context: "zmq.Context[Any]", runtime_dir: Path, *, page: int, num_blocks: int
    ) -> None:
        name = engine_name()
        self.worker = RawWorker(runtime_dir, name, page=page, num_blocks=num_blocks)
        self.scheduler = RawScheduler(context, runtime_dir, name)
        self.directory = self.scheduler.wait_attached()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.scheduler.close()
        self.worker.close()
