"""An engine that is spoken by hand, message by message: its scheduler, and its only rank."""

import mmap
import os
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import zmq
from harness import SECONDS, engine_name, layout

from kvd_client import JobBlocks
from kvd_client.memory import sealed_file
from kvd_proto.codec import WIRE
from kvd_proto.directory import DirectoryView
from kvd_proto.jobs import CONTROL_BYTES
from kvd_proto.messages import (
    HOST,
    PROTOCOL_VERSION,
    Attached,
    Done,
    Fingerprint,
    Hello,
    HostHandle,
    JobStatus,
    LaneUp,
    Message,
    Register,
    Registered,
    Store,
    Welcome,
)
from tests.raw_client import RawClient

M = TypeVar("M", bound=Message)
Array = npt.NDArray[Any]
JOB_MS = int(SECONDS * 1e3)


class RawScheduler:
    """A session of kind `scheduler` over libzmq, which drops descriptors: it has no directory.

    Attributes:
        socket: its DEALER socket, for frames that `frame` has made.
    """

    def __init__(self, context: "zmq.Context[Any]", runtime_dir: Path, engine: str) -> None:
        self._sent = 0
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(f"ipc://{runtime_dir / 'broker.sock'}")
        hello = Hello(
            kind="scheduler",
            engine=engine,
            pid=os.getpid(),
            protocol_min=PROTOCOL_VERSION,
            protocol_max=PROTOCOL_VERSION,
            client="bench",
        )
        expect(self.ask(hello), Welcome)

    def frame(self, message: Message) -> bytes:
        """The next request."""
        self._sent += 1
        return WIRE.encode(message, self._sent)

    def ask(self, message: Message) -> Message:
        """The reply to a request."""
        return WIRE.decode(self.exchange(self.frame(message)))[1]

    def exchange(self, frame: bytes) -> bytes:
        """Send a request and wait for its reply."""
        self.socket.send(frame)
        return self._receive()

    def wait_attached(self) -> None:
        """Wait until the engine is complete."""
        expect(WIRE.decode(self._receive())[1], Attached)

    def _receive(self) -> bytes:
        if not self.socket.poll(int(SECONDS * 1e3)):
            raise RuntimeError("the daemon does not answer")
        frame: bytes = self.socket.recv()
        return frame

    def close(self) -> None:
        """Leave."""
        self.socket.close()


def expect(message: Message, kind: type[M]) -> M:
    """The message, which is of this kind.

    Raises:
        RuntimeError: it is another one.
    """
    if isinstance(message, kind):
        return message
    raise RuntimeError(f"{message!r} in place of {kind.__name__}")


def directory_of(session: RawClient) -> DirectoryView:
    """Wait until the session's engine is complete; return the directory of its namespace."""
    _, fds = session.notice(Attached)
    return DirectoryView(mmap.mmap(fds[0], 0, prot=mmap.PROT_READ))


class RawWorker:
    """The only rank of an engine; a chunk is one block of one page.

    Attributes:
        directory: of the engine's namespace.
    """

    def __init__(
        self, runtime_dir: Path, engine: str, *, page: int, num_blocks: int, model: str = "bench"
    ) -> None:
        shape = layout(1, page, num_blocks)
        self._num_blocks = num_blocks
        self._job = 0
        self._session = RawClient(runtime_dir)
        expect(self._session.hello("worker", engine), Welcome)
        register = Register(
            rank=0,
            world_size=1,
            device=HOST,
            fingerprint=Fingerprint(model=model),
            layout=shape,
            handles=(HostHandle(fd_index=1),),
        )
        sizes = CONTROL_BYTES, shape.storages[0]
        fds = [sealed_file("kvd-memory", nbytes) for nbytes in sizes]
        expect(self._session.register(register, fds), Registered)
        lane_up, _ = self._session.notice(LaneUp)
        self.directory = directory_of(self._session)
        self._lane = self._session.join_lane(lane_up)

    def submit(self, slots: Array, generations: Array) -> None:
        """Begin to write chunks into these slots."""
        self._job += 1
        blocks = 1 + np.arange(len(slots)) % (self._num_blocks - 1)
        job = JobBlocks.of(blocks, [len(blocks)], [0], slots, generations)
        self._lane.request(Store(job=self._job, blocks=job, after=0, deadline_ms=JOB_MS))

    def drop_finished(self) -> None:
        """Read what has arrived of jobs that have ended."""
        self._lane.channel.receive_all()

    def write(self, slots: Array, generations: Array) -> None:
        """Write chunks into these slots, so that they become READY; no other job is under way."""
        self.submit(slots, generations)
        done = expect(self._lane.reply(SECONDS)[1], Done)
        if done.status is not JobStatus.OK:
            raise RuntimeError(f"a store has failed: {done!r}")

    def close(self) -> None:
        """Leave."""
        self._lane.close()
        self._session.close()


class RawEngine:
    """An engine of one rank; ended with the context."""

    def __init__(
        self, context: "zmq.Context[Any]", runtime_dir: Path, *, page: int, num_blocks: int
    ) -> None:
        name = engine_name()
        self.worker = RawWorker(runtime_dir, name, page=page, num_blocks=num_blocks)
        self.directory = self.worker.directory
        self.scheduler = RawScheduler(context, runtime_dir, name)
        self.scheduler.wait_attached()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.scheduler.close()
        self.worker.close()
