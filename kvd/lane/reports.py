"""What the lane reports: replies and the Done of every ended job to workers, shares to the broker.

To wake the broker costs more than a small copy, so shares wait for others for a millisecond, and
until the piece that is being copied has moved. Those of many jobs travel in one message: to read
one costs the broker as much as the rest of what it does for a share. The broker is sent nothing
newer than a share that still waits: what was written is reported before anything that depends on
it.
"""

import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec

from kvd.lane.device import Direction
from kvd.lane.jobs import LaneJob
from kvd.lane.runner import Runner
from kvd.lane.workers import Binding, LaneWorker
from kvd.metrics.counts import STAGES, LaneCounts
from kvd.wire.link import LINK, ShareDone
from kvd.wire.server import Client, Server
from kvd_proto.channel import Channel
from kvd_proto.codec import WIRE
from kvd_proto.jobs import Chunks, IntArray
from kvd_proto.messages import Done, Job, JobStatus, Load, Message

TEXT_LIMIT = 1000
SHARES_WAIT_MS = 1
PER_MESSAGE = 4096  # 20 bytes each: well inside one message of the link
_WIDTHS = (4, 8, 2, 2, 2)  # bytes of one item of each column of Chunks
_Whose: TypeAlias = tuple[int, int, bytes, bool]
"""Session, rank, namespace, and whether they were stored."""


class ShareBuffer:
    """What the broker is not told yet, in the order in which it happened to each worker."""

    def __init__(self) -> None:
        self._kept: dict[_Whose, list[Chunks]] = {}
        self._since = 0.0

    @property
    def waited(self) -> float:
        """Seconds since the first of these was added."""
        return time.monotonic() - self._since

    def add(
        self,
        worker: LaneWorker,
        binding: Binding,
        chunks: Chunks,
        which: Sequence[int],
        *,
        ok: bool,
    ) -> None:
        """Add a job's chunks of these numbers: stored, or, where not `ok`, given up."""
        if not which:
            return
        if not self._kept:
            self._since = time.monotonic()
        whose = worker.order.session, worker.order.rank, binding.order.namespace, ok
        if len(which) < len(chunks):
            chunks = Chunks(
                *(array(column.typecode, [column[i] for i in which]) for column in chunks.columns)
            )
        self._kept.setdefault(whose, []).append(chunks)

    def take(self) -> list[ShareDone]:
        """The messages that tell all of it; nothing waits then."""
        taken, self._kept = self._kept, {}
        return [message for whose, kept in taken.items() for message in _messages(whose, kept)]

    def __bool__(self) -> bool:
        return bool(self._kept)


def _messages(whose: _Whose, kept: Sequence[Chunks]) -> Iterator[ShareDone]:
    session, rank, namespace, ok = whose
    joined = [b"".join(column) for column in zip(*(one.columns for one in kept), strict=True)]
    count = sum(map(len, kept))
    for begin in range(0, count, PER_MESSAGE):
        columns = [
            column[begin * width : (begin + PER_MESSAGE) * width]
            for column, width in zip(joined, _WIDTHS, strict=True)
        ]
        yield ShareDone(
            session=session,
            rank=rank,
            namespace=namespace,
            slots=IntArray("u4", columns[0]),
            generations=IntArray("u8", columns[1]),
            first=IntArray("u2", columns[2]),
            count=IntArray("u2", columns[3]),
            groups=IntArray("u2", columns[4]),
            ok=ok,
        )


class Reporter:
    """Everything that the lane sends but for its first message, and what it counts.

    Attributes:
        server: of the workers' connections.
        link: to the broker.
        runner: whose jobs are reported.
        counts: since the lane's start; see `counted`.
        shares: that have not been sent.
    """

    def __init__(self, server: Server, link: Channel, runner: Runner) -> None:
        self.server = server
        self.link = link
        self.runner = runner
        self.counts = LaneCounts()
        server.limits = self.counts.limits
        self._stages = {
            way: [self.counts.stages[f"{way}_{stage}"] for stage in STAGES] for way in Direction
        }
        self.shares = ShareBuffer()

    # ---------------------------------------------------------- to workers

    def join(self, client: Client, worker: LaneWorker) -> None:
        """Make a connection the worker's; end the one before it, with what was not read there."""
        if worker.client is not None:
            self.server.end(worker.client)
        worker.client = client
        self.server.adopt(client, worker)

    def part(self, worker: LaneWorker) -> None:
        """Part the worker from its connection; requests there get `bad_session`."""
        if worker.client is not None:
            self.server.adopt(worker.client, None)
            worker.client = None

    def note_connections(self) -> None:
        """Note which connections have ended."""
        server = self.server
        server.accepted.clear()
        while server.ended:
            client = server.ended.popleft()
            worker: LaneWorker | None = client.owner
            if worker is not None and worker.client is client:
                worker.client = None

    def report_ended(self) -> None:
        """Report every job that has ended, then do what waited for it."""
        for job in self.runner.take_ended():
            status, text = job.outcome
            self._count(job, status)
            done = Done(
                job=job.request.job,
                status=status,
                text=text[:TEXT_LIMIT],
                bytes=job.moved_bytes,
                copy_ns=job.copy_ns,
            )
            self.reply(job.worker.client, job.request_id, done)
            if status is JobStatus.OK:
                self._count_stages(job, self.runner.clock())
            # After the reply: the worker is what waits, the broker makes chunks READY meanwhile.
            if job.direction is Direction.STORE:
                ok = status is JobStatus.OK
                which = job.to_report(ok=ok)
                self.shares.add(job.worker, job.binding, job.chunks, which, ok=ok)
        for action in self.runner.take_due():
            action()

    def refuse_job(self, worker: LaneWorker, request: Job, request_id: int, text: str) -> None:
        """Answer that a job is not taken, and why."""
        way = Direction.LOAD if isinstance(request, Load) else Direction.STORE
        status = JobStatus.REFUSED
        self.counts.jobs[f"{way}_{status}"] += 1
        done = Done(job=request.job, status=status, text=text[:TEXT_LIMIT], bytes=0, copy_ns=0)
        self.reply(worker.client, request_id, done)

    def _count(self, job: LaneJob, status: JobStatus) -> None:
        counts = self.counts
        counts.jobs[f"{job.direction}_{status}"] += 1
        if job.direction is Direction.STORE:
            counts.store_bytes += job.moved_bytes
            counts.store_seconds += job.copy_ns / 1e9
        else:
            counts.load_bytes += job.moved_bytes
            counts.load_seconds += job.copy_ns / 1e9

    def _count_stages(self, job: LaneJob, reported_ns: int) -> None:
        nanoseconds = (
            job.started_ns - job.accepted_ns - job.stream_wait_ns,
            job.stream_wait_ns,
            job.ended_ns - job.started_ns,
            reported_ns - job.ended_ns,
        )
        for stage, spent in zip(self._stages[job.direction], nanoseconds, strict=True):
            stage.observe(spent / 1e9)

    def reply(self, client: Client | None, request_id: int, message: Message) -> None:
        """Answer a request. Never waits.

        The connection of a worker that does not read ends with the first answer that is dropped:
        the worker joins anew, and learns so that the jobs from before have ended.
        """
        if client is None or not self.server.send(client, WIRE.encode(message, request_id)):
            self.counts.dropped_replies += 1
            if client is not None:
                self.server.end(client)

    # ------------------------------------------------------- to the broker

    @property
    def counted(self) -> dict[str, Any]:
        """The counts by name, with connections that were closed because they speak no ZMTP."""
        dropped = self.counts.dropped_frames + self.server.num_invalid
        counted: dict[str, Any] = msgspec.to_builtins(replace(self.counts, dropped_frames=dropped))
        return counted

    def tell_broker(self, message: Message) -> None:
        """Send a message, after the shares that wait.

        Raises:
            ChannelFull: the broker does not read what it must know.
            EOFError: it is gone.
        """
        self.send_shares()
        self.link.send(LINK.encode(message))

    def send_shares(self) -> None:
        """Send the shares that wait.

        Raises:
            ChannelFull, EOFError: see `tell_broker`.
        """
        for share in self.shares.take():
            self.link.send(LINK.encode(share))

    @property
    def shares_due(self) -> bool:
        """Whether shares wait and have waited enough."""
        return bool(self.shares) and self.shares.waited >= SHARES_WAIT_MS / 1e3
