"""A daemon for the client's tests: the real protocol over real sockets, in one thread.

It decides next to nothing by itself: it lends slots, answers from a table that a test may
change, and keeps what it was told. Its lane copies no bytes.
"""

import contextlib
import mmap
import os
import queue
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from kvd.cache.directory import DirectoryWriter
from kvd.wire.server import Client, Server
from kvd_client.session import ClientSession
from kvd_proto.codec import MAX_MESSAGE_BYTES, WIRE
from kvd_proto.descriptions import max_description_bytes
from kvd_proto.directory import DirectoryHeader, SlotState
from kvd_proto.jobs import IntArray
from kvd_proto.messages import (
    PROTOCOL_VERSION,
    Attached,
    Cancel,
    Done,
    Error,
    ErrorCode,
    Hello,
    Job,
    JobStatus,
    Join,
    LaneUp,
    Message,
    Ok,
    Ping,
    Pong,
    Register,
    Registered,
    Reset,
    ResetDone,
    Status,
    StatusReport,
    Step,
    Stepped,
    TierInfo,
    Unregister,
    Wait,
    Welcome,
)
from kvd_proto.tier_table import MIN_TIER_ENTRIES, TierHealth
from tests.waiting import PATIENCE

NAMESPACE = b"namespace-16byte"
NUM_SLOTS = 256
RECORD_BYTES = 256
BLOCKS_PER_CHUNK = 2
OWNER, OTHER = 1, 2  # who has the slots: the one engine, and others
SECONDS = PATIENCE
USABLE = TierHealth(usable=True, latency_us=0, bytes_per_second=0, queued_bytes=0)
T = TypeVar("T")
M = TypeVar("M", bound=Message)


def make_directory(boot_id: bytes, tiers: int) -> tuple[int, DirectoryWriter]:
    """A memory file with a directory of two chunks: `ready`, and `writing`, which is not yet."""
    homes = MIN_TIER_ENTRIES if tiers else 0
    header = DirectoryHeader.plan(
        *(NUM_SLOTS, NAMESPACE, boot_id, BLOCKS_PER_CHUNK), tier_capacity=homes, num_tiers=tiers
    )
    fd = os.memfd_create("directory", os.MFD_CLOEXEC)
    os.ftruncate(fd, header.total_bytes)
    directory = DirectoryWriter(mmap.mmap(fd, header.total_bytes), header)
    directory.place(b"ready", 0, OTHER)
    directory.place(b"writing", 1, OTHER)
    for slot in range(2):
        directory.add_share(slot, 0, 0, BLOCKS_PER_CHUNK, 0)
    directory.make_ready(0)
    if directory.tiers is not None:
        for tier in range(tiers):
            directory.tiers.set_health(tier, USABLE)
    return fd, directory


@dataclass(eq=False)
class FakeSession:
    """One client session, as the fake sees it."""

    client: Client
    token: bytes  # of its lane
    device: str = ""  # that it has registered
    fds: list[int] = field(default_factory=list)

    def drop_fds(self) -> None:
        """Close what its registration came with."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


class FakeDaemon:
    """Broker and lane in one thread. `kill` it or leave its `with` block."""

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        self.boot_id = os.urandom(16)
        self._received: list[Message] = []
        self.hold_jobs = False
        self.incarnation = 0
        self.replies = dict(_REPLIES)
        self.replies[Step] = self.step
        self.replies[Reset] = self._reset
        self.reuse_threshold = 1
        self.lendable: list[int] | None = None  # these alone are lent; None: what is free
        self.tiers: tuple[TierInfo, ...] = ()  # that the next `attach` has; all usable
        self.descriptions: int | None = None  # descriptor of the file that is sent, not closed
        self.directory: DirectoryWriter | None = None  # before the first `attach`
        self.sessions: list[FakeSession] = []
        self._workers: dict[bytes, Client | None] = {}  # by token: who has joined the lane
        self._seen = threading.Condition()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0)
        self._running = True
        self._thawed = threading.Event()
        self._thawed.set()
        self._server = Server(
            runtime_dir / "broker.sock", max_bytes=MAX_MESSAGE_BYTES, takes_descriptors=True
        )
        self._held: list[tuple[bytes, int, Job]] = []  # token, request id
        self.lane: Server | None = None
        self._lifeline = (-1, -1)
        self._endpoint = ""
        self._open_lane()
        self._thread = threading.Thread(target=self._serve, name="fake-daemon")
        self._thread.start()

    # ------------------------------------------------------- the test's side

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Die: every connection and lifeline is closed at once."""
        if self._thread.is_alive():
            self._running = False
            self._thawed.set()  # not before: it would serve again
            os.eventfd_write(self._wake, 1)
            self._thread.join(SECONDS)
            os.close(self._wake)

    def freeze(self) -> None:
        """Stop serving, with everything left open, as SIGSTOP does."""
        self.call(self._thawed.clear)

    def thaw(self) -> None:
        """Serve again."""
        self._thawed.set()

    def call(self, action: Callable[[], T]) -> T:
        """Run `action` in the daemon's thread."""
        result: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._commands.put(lambda: result.put(action()))
        os.eventfd_write(self._wake, 1)
        return result.get(timeout=SECONDS)

    @property
    def received(self) -> list[Message]:
        """All messages so far, each from before its answer could be seen."""
        with self._seen:
            return list(self._received)

    def wait_for(self, kind: type[M], count: int = 1) -> list[M]:
        """The messages of this kind, once there are `count` of them."""

        def those() -> list[M]:
            return [m for m in self._received if isinstance(m, kind)]

        with self._seen:
            assert self._seen.wait_for(lambda: len(those()) >= count, SECONDS), kind
            return those()

    def attach(self, *sessions: ClientSession) -> None:
        """Tell every session that the engine is attached, and wait until these ones know it."""
        fd, self.directory = make_directory(self.boot_id, len(self.tiers))
        describes = self.descriptions is not None
        message = Attached(
            namespace=NAMESPACE,
            world_size=1,
            bytes_per_chunk=4096,
            num_chunks=NUM_SLOTS,
            reuse_threshold=self.reuse_threshold,
            description_bytes=max_description_bytes(RECORD_BYTES) if describes else 0,
            tiers=self.tiers,
        )
        self.notify(message, (fd,) if self.descriptions is None else (fd, self.descriptions))
        os.close(fd)
        for session in sessions:
            assert session.wait_attached(SECONDS)

    def notify(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send a notice to every session."""
        self.call(lambda: self.send(WIRE.encode(message), fds))

    def send(self, frame: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send bytes to every session, in the daemon's thread, from which this is called."""
        for session in self.sessions:
            self._server.send(session.client, frame, fds)

    def finish(self, status: JobStatus = JobStatus.OK) -> None:
        """Answer the jobs that were held back."""
        self.call(lambda: self._finish(status))

    def cut(self, *, loses_jobs: bool = False) -> None:
        """Close the lane's connections; it lives, and takes others.

        It may take the jobs that were held back for done, without a message.
        """

        def end() -> None:
            assert self.lane is not None
            for token, client in self._workers.items():
                if client is not None:
                    self.lane.end(client)
                    self._workers[token] = None
            if loses_jobs:
                self._held.clear()

        self.call(end)

    def disconnect(self) -> None:
        """Close the broker's connections; it lives, and takes others."""

        def end() -> None:
            for session in self.sessions:
                self._server.end(session.client)

        self.call(end)

    def kill_lane(self) -> None:
        """End the lane process."""
        self.call(self._close_lane)

    def start_lane(self) -> None:
        """Start another lane process."""

        def start() -> None:
            self._open_lane()
            for session in self.sessions:
                if session.fds:
                    self._lane_up(session)

        self.call(start)

    def worker_fds(self) -> list[int]:
        """Descriptors that the one worker has sent."""
        return next(session.fds for session in self.sessions if session.fds)

    def lent(self) -> list[int]:
        """Slots that are on loan."""
        directory = self.directory
        assert directory is not None
        return [slot for slot in range(NUM_SLOTS) if directory.loan_of(slot)]

    def take_back(self, besides: int = -1) -> None:
        """Take all loans back, without a word, but for one slot."""
        assert self.directory is not None
        self.directory.end_loans(slot for slot in self.lent() if slot != besides)

    def free(self) -> list[int]:
        """Slots that hold nothing and are not on loan."""
        directory = self.directory
        assert directory is not None
        return [slot for slot in directory.slots_in(SlotState.FREE) if not directory.loan_of(slot)]

    def make_ready(self, key: bytes, first: int = 0, count: int = BLOCKS_PER_CHUNK) -> None:
        """A chunk, of these blocks, that others have stored, or this engine, if it has begun."""
        directory = self.directory
        assert directory is not None
        if (slot := directory.find(key)) < 0:
            slot = self.free()[-1]
            directory.place(key, slot, OTHER)
        directory.add_share(slot, 0, first, count, 0)
        directory.make_ready(slot)

    # ---------------------------------------------------- the daemon's thread

    def _reset(self, _: Reset) -> Message:
        """End loans and stores; the chunks stay, for tests that look for them afterwards."""
        if self.directory is not None:
            self.take_back()
            for slot in self.directory.slots_in(SlotState.WRITING):
                self._give_up(slot)
        return ResetDone(dropped=4, deferred=1)

    def _give_up(self, slot: int) -> None:
        """End a store, unless it is somebody else's."""
        directory = self.directory
        if directory is not None and directory.owner(slot) == OWNER:
            directory.unindex(slot)
            directory.write_state(slot, SlotState.DRAINING)

    def step(self, message: Step) -> Message:
        """Carry out what a scheduler has decided, as far as the directory shows it; lend slots."""
        directory = self.directory
        if directory is None:
            return Error(code=ErrorCode.NOT_READY, text="no rank has registered yet")
        for key in message.dropped:
            if (slot := directory.find(key)) >= 0:
                self._give_up(slot)
        loans = zip(
            message.slots.numpy().tolist(), message.generations.numpy().tolist(), strict=True
        )
        for key, (slot, generation) in zip(message.keys, loans, strict=True):
            if directory.is_lent(slot, generation) and directory.find(key) < 0:
                if directory.state(slot) == SlotState.READY:
                    directory.free([slot])
                directory.place(key, slot, OWNER, generation)
        short = message.wanted - len(self.lent())
        lendable = self.free() if self.lendable is None else self.lendable
        slots = [slot for slot in lendable if not directory.loan_of(slot)][:short]
        if 2 * short <= message.wanted:
            slots = []
        return stepped(slots, directory.lend(slots))

    def _open_lane(self) -> None:
        self.incarnation += 1
        path = self.runtime_dir / f"lane-host-{self.incarnation}.sock"
        self._endpoint = f"ipc://{path}"
        self.lane = Server(path, max_bytes=MAX_MESSAGE_BYTES)
        self._lifeline = os.pipe2(os.O_CLOEXEC)

    def _close_lane(self) -> None:
        if self.lane is not None:
            self.lane.close()
            self.lane = None
            for fd in self._lifeline:
                os.close(fd)
        self._workers = dict.fromkeys(self._workers)
        self._held.clear()

    def _serve(self) -> None:
        try:
            while self._running:
                self._turn()
        finally:
            self._close_lane()
            self._server.close()
            for session in self.sessions:
                session.drop_fds()

    def _turn(self) -> None:
        poller = select.poll()
        for source in (self._wake, self._server, self.lane):
            if source is not None:
                poller.register(source, select.POLLIN)
        if self._wake in dict(poller.poll()):
            os.eventfd_read(self._wake)
            with contextlib.suppress(queue.Empty):
                while True:
                    self._commands.get_nowait()()
        self._thawed.wait(10 * SECONDS)
        if self._running:
            self._read(self._server, self._request)
        if self._running and self.lane is not None:
            self._read(self.lane, self._job)

    def _read(
        self, server: Server, serve: Callable[[Client, bytes, tuple[int, ...]], None]
    ) -> None:
        server.handle_events()
        while server.accepted:
            client = server.accepted.popleft()
            if server is self._server:
                server.adopt(client, FakeSession(client, os.urandom(16)))
                self.sessions.append(client.owner)
        while server.pending:
            received = server.next_message()
            if received is not None:
                serve(*received)
        while server.ended:
            session = server.ended.popleft().owner
            if isinstance(session, FakeSession):
                self.sessions.remove(session)
                session.drop_fds()

    def _lane_up(self, session: FakeSession) -> None:
        self._workers.setdefault(session.token, None)
        message = LaneUp(
            device=session.device,
            incarnation=self.incarnation,
            endpoint=self._endpoint,
            token=session.token,
        )
        self._server.send(session.client, WIRE.encode(message), (self._lifeline[0],))

    @contextlib.contextmanager
    def _noting(self, message: Message) -> Iterator[None]:
        """Answer in here: who sees the answer sees the note, and who sees the note was answered."""
        with self._seen:
            yield
            self._received.append(message)
            self._seen.notify_all()

    def _request(self, client: Client, frame: bytes, fds: tuple[int, ...]) -> None:
        header, message = WIRE.decode(frame)
        session: FakeSession = client.owner
        session.fds += fds
        reply = self.replies[type(message)](message)
        with self._noting(message):
            if isinstance(message, Unregister) or isinstance(reply, Error):
                session.drop_fds()
            if isinstance(message, Register):
                session.device = message.device
            if isinstance(reply, Registered):
                self._lane_up(session)
            if reply is not None:
                self._server.send(client, WIRE.encode(reply, header.request_id))

    def _job(self, client: Client, frame: bytes, _: tuple[int, ...]) -> None:
        header, message = WIRE.decode(frame)
        assert self.lane is not None
        if isinstance(message, Join):
            reply = self.replies[Join](message)
            if isinstance(reply, Ok):
                if (before := self._workers[message.token]) is not None:
                    self.lane.end(before)
                self._workers[message.token] = client
                self.lane.adopt(client, message.token)
            if reply is not None:
                self.lane.send(client, WIRE.encode(reply, header.request_id))
            return
        with self._noting(message):
            if isinstance(message, Job):
                self._held.append((client.owner, header.request_id, message))
                if not self.hold_jobs:
                    self._finish(JobStatus.OK)
                return
            if isinstance(message, Cancel):
                self._finish(JobStatus.CANCELLED)
            reply = self.replies[type(message)](message)
            if reply is not None and (isinstance(reply, Error) or not self._held):
                self._to_worker(client.owner, header.request_id, reply)

    def _finish(self, status: JobStatus) -> None:
        jobs, self._held = self._held, []
        for token, request_id, job in jobs:
            done = Done(job=job.job, status=status, text="", bytes=64, copy_ns=2_000_000)
            self._to_worker(token, request_id, done)

    def _to_worker(self, token: bytes, request_id: int, message: Message) -> None:
        client = self._workers[token]
        if client is not None and self.lane is not None:
            self.lane.send(client, WIRE.encode(message, request_id))


def stepped(slots: Sequence[int] = (), generations: Sequence[int] = ()) -> Stepped:
    """An answer with these loans."""
    return Stepped(slots=IntArray.of(slots, "u4"), generations=IntArray.of(generations, "u8"))


_REPLIES: dict[type[Message], Callable[[Any], Message | None]] = {
    Hello: lambda _: Welcome(protocol=PROTOCOL_VERSION, daemon="fake 1", pid=os.getpid()),
    Register: lambda _: Registered(missing_ranks=()),
    Unregister: lambda _: Ok(),
    Join: lambda _: Ok(),
    Ping: lambda _: Pong(pid=os.getpid()),
    Status: lambda _: StatusReport(status={"ready": True}),
    Wait: lambda _: Ok(),
    Cancel: lambda _: Ok(),
}
