"""A broker's and a worker's end, made by hand, around a real lane process.

Memory is read and written through mappings of the tests' own, so that what the
lane did is seen without the lane's code.
"""

import fcntl
import mmap
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvd.lane.queue import QueueLimits
from kvd.lane.workers import LaneWorker, WorkerTable
from kvd.wire.link import (
    LINK,
    BeginLane,
    BindWorker,
    Imported,
    ImportWorker,
    LaneFailed,
    LanePing,
    LanePong,
    LaneReady,
    lane_socket,
)
from kvd_proto.channel import Channel
from kvd_proto.directory import HEADER_BYTES, RECORD_DTYPE, DirectoryHeader, SlotState
from kvd_proto.jobs import CONTROL_BYTES, JobBlocks
from kvd_proto.layout import RankLayout
from kvd_proto.messages import (
    HOST,
    Done,
    Handle,
    HostHandle,
    Job,
    JobStatus,
    Join,
    Message,
    Ok,
    Store,
)
from tests.layouts import flat_layout
from tests.raw_client import RawConnection
from tests.waiting import PATIENCE

TIMELINE, EPOCH = 0, 1  # words of a control page; the second is that of stores
SLOTS = 16  # of a directory
NULL_BLOCK = 31
LAYOUT = flat_layout(4096, 4096, blocks=32, factor=2, null_block=NULL_BLOCK)
NAMESPACE = bytes(range(16))
BOOT = b"b" * 16
M = TypeVar("M", bound=Message)


class Memory:
    """A memory file, sealed as a worker's is, and the tests' own mapping of it."""

    def __init__(self, nbytes: int, flags: int = 0) -> None:
        self.fd = os.memfd_create("kvd-test", flags | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.fd, nbytes), np.uint8)

    def close(self) -> None:
        """Close the file; the mapping goes with the last array over it."""
        os.close(self.fd)


class Directory:
    """A namespace's directory whose records the test sets as it likes."""

    def __init__(self, num_slots: int) -> None:
        header = DirectoryHeader.plan(num_slots, NAMESPACE, BOOT)
        self.memory = Memory(header.total_bytes)
        packed = np.frombuffer(header.pack(), np.uint8)
        self.memory.bytes[: len(packed)] = packed
        self.records: npt.NDArray[Any] = np.frombuffer(
            self.memory.bytes, RECORD_DTYPE, num_slots, HEADER_BYTES
        )

    def set(self, slots: Sequence[int], state: SlotState, **fields: int) -> None:
        """Write these slots' records: of engine 7 and generation 1, if nothing else is said."""
        record = {"generation": 1, "owner": 7, "first": 0, "count": 0, "group": 0, "loan": 0}
        for name, value in (record | fields | {"state": int(state)}).items():
            self.records[name][list(slots)] = value


class FakeWorker:
    """A worker's memory, and its connection to the lane."""

    connection: RawConnection

    def __init__(self, layout: RankLayout, *, session: int = 1) -> None:
        self.layout, self.session = layout, session
        self.page = Memory(CONTROL_BYTES)
        self.words = self.page.bytes.view("<u8")
        self.storages = [Memory(size) for size in layout.storages]

    @property
    def fds(self) -> list[int]:
        """Control page first, then the storages."""
        return [self.page.fd, *(storage.fd for storage in self.storages)]

    def fill(self, seed: int) -> None:
        """Random bytes everywhere."""
        rng = np.random.default_rng(seed)
        for storage in self.storages:
            storage.bytes[:] = rng.integers(0, 256, len(storage.bytes), dtype=np.uint8)

    def poison(self) -> None:
        """0xEE everywhere."""
        for storage in self.storages:
            storage.bytes[:] = 0xEE

    def pages(self, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Bytes of these blocks in all tensors of a flat layout: [tensor, block, page byte]."""
        tables = [storage.bytes.reshape(self.layout.num_blocks, -1) for storage in self.storages]
        return np.stack([table[list(blocks)] for table in tables])

    def job(
        self,
        kind: type[Job],
        number: int,
        blocks: Sequence[int],
        slots: Sequence[int],
        **changes: Any,
    ) -> None:
        """Send a job."""
        self.connection.request(make_job(kind, number, blocks, slots, **changes))

    def run(self, *job: Any, **changes: Any) -> JobStatus:
        """Send a job and wait for its Done; the status."""
        self.job(*job, **changes)
        return self.done().status

    def reply(self) -> Message:
        """The next message from the lane."""
        return self.connection.reply()[1]

    def done(self) -> Done:
        """The next message, which is a Done."""
        message = self.reply()
        assert isinstance(message, Done), message
        return message

    def close(self) -> None:
        """Let go of everything."""
        if hasattr(self, "connection"):
            self.connection.close()
        for memory in (self.page, *self.storages):
            memory.close()


def make_job(
    kind: type[Job],
    number: int,
    blocks: Sequence[int],
    slots: Sequence[int],
    *,
    generation: int = 1,
    group_sizes: Sequence[int] | None = None,
    block_indices: Sequence[int] = (0,),
    **fields: int,
) -> Job:
    """A job; of one group that starts at a chunk's first block if nothing else is said.

    Stores share a word of the control page if nothing else is said, and end together by it.
    """
    named = (
        {"after": 0, "deadline_ms": 20_000} | ({"word": EPOCH} if kind is Store else {}) | fields
    )
    generations = [generation] * len(slots)
    sizes = group_sizes or [len(blocks)]
    arrays = JobBlocks.of(blocks, sizes, block_indices, slots, generations)
    return kind(job=number, blocks=arrays, **named)


def token_of(session: int) -> bytes:
    """The token of a session."""
    return bytes([session]) * 16


def import_message(
    layout: RankLayout,
    handles: Sequence[Handle] = (),
    *,
    session: int = 1,
    uid: int = 0,
) -> ImportWorker:
    """The order by which a worker's memory is mapped; one descriptor a storage without handles."""
    return ImportWorker(
        session=session,
        token=token_of(session),
        engine="llama",
        pid=41,
        uid=uid,
        rank=0,
        world_size=1,
        layout=layout,
        handles=tuple(handles or (HostHandle(1 + i) for i in range(len(layout.storages)))),
    )


def bind_message(
    session: int, num_slots: int = SLOTS, *, owner: int = 7, arena_base: int = 0
) -> BindWorker:
    """The order by which a worker's chunks live in a directory's first slots."""
    return BindWorker(
        session=session,
        namespace=NAMESPACE,
        owner=owner,
        arena_base=arena_base,
        num_slots=num_slots,
    )


def bound_worker(
    workers: WorkerTable,
    layout: RankLayout,
    fds: Sequence[int],
    directory_fd: int,
    *,
    owner: int = 7,
    session: int | None = None,
    num_slots: int = SLOTS,
    handles: Sequence[Handle] = (),
) -> LaneWorker:
    """A worker with this memory, bound to a directory; its session has the owner's number."""
    session = owner if session is None else session
    worker = workers.import_worker(import_message(layout, handles, session=session), fds)
    bind = bind_message(session, num_slots, owner=owner)
    pool_bytes = layout.slot_bytes * num_slots
    worker.binding = workers.bindings.bind(bind, [directory_fd], layout, pool_bytes)
    return worker


class Lane:
    """A real lane process and the broker's end of its link.

    Args:
        runtime_dir: for its socket.
        pool_bytes: of a pool of its own.
        within: a command that starts it.
    """

    def __init__(self, runtime_dir: Path, pool_bytes: int, within: Sequence[str] = ()) -> None:
        self.pool = Memory(pool_bytes)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.link_number = theirs.fileno()  # in the lane too
        command = [*within, sys.executable, "-m", "kvd.lane", str(self.link_number)]
        self.process = subprocess.Popen(command, pass_fds=[self.link_number])
        theirs.close()
        self.link = Channel(ours, b"ROUTER")
        self.socket = runtime_dir / lane_socket(HOST, 1, bytes(2))
        begin = BeginLane(
            device=HOST,
            incarnation=1,
            endpoint=f"ipc://{self.socket}",
            pool_bytes=pool_bytes,
            max_queued_jobs=QueueLimits().jobs,
            max_queued_bytes=QueueLimits().nbytes,
            log_level="info",
            log_style="human",
        )
        self.tell(begin, [self.pool.fd, self.pool.fd])  # a host lane pins nothing
        self.workers: list[FakeWorker] = []
        self._seen: list[Message] = []
        self._fds: list[int] = []
        self.pid = self.hear(LaneReady).pid
        (self.lifeline,) = self._fds

    def attach(self, worker: FakeWorker, directory: Directory, arena_base: int = 0) -> FakeWorker:
        """Import and bind a worker, and join it; `close` closes it."""
        self.workers.append(worker)
        assert not self.import_worker(worker).error
        self.bind(worker, directory, arena_base)
        worker.connection = RawConnection(self.socket)
        assert worker.connection.ask(Join(token=token_of(worker.session))) == Ok()
        return worker

    def import_worker(self, worker: FakeWorker, fds: Sequence[int] = ()) -> Imported:
        """Ask for the worker's memory to be mapped; the answer."""
        self.tell(import_message(worker.layout, session=worker.session), fds or worker.fds)
        return self.hear(Imported)

    def bind(self, worker: FakeWorker, directory: Directory, arena_base: int = 0) -> None:
        """Say where the worker's chunks live."""
        message = bind_message(worker.session, len(directory.records), arena_base=arena_base)
        self.tell(message, [directory.memory.fd])
        self.ping()

    def tell(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send over the link."""
        self.link.send(LINK.encode(message), fds)

    def hear(self, kind: type[M]) -> M:
        """The next message of this kind; others are kept for later calls."""
        while True:
            for index, message in enumerate(self._seen):
                if isinstance(message, kind):
                    del self._seen[index]
                    return message
            self._receive()

    def heard(self, kind: type[M]) -> list[M]:
        """What has arrived of this kind until now: everything that the lane sent before a ping."""
        self.ping()
        heard = [message for message in self._seen if isinstance(message, kind)]
        self._seen = [message for message in self._seen if not isinstance(message, kind)]
        return heard

    def ping(self) -> LanePong:
        """Ask the loop."""
        self.tell(LanePing())
        return self.hear(LanePong)

    def _receive(self) -> None:
        end = time.monotonic() + PATIENCE
        while (received := self.link.receive()) is None:
            left = max(0.0, end - time.monotonic())
            assert select.select([self.link], [], [], left)[0], "the lane is silent"
        _, message = LINK.decode(received[0])
        assert not isinstance(message, LaneFailed), message
        self._fds += received[1]
        self._seen.append(message)

    def close(self) -> None:
        """Kill the lane and let go of everything."""
        self.process.kill()
        self.process.wait(PATIENCE)
        self.link.close()
        os.close(self.lifeline)
        self.pool.close()
        for worker in self.workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
