"""Messages that the lane sends: replies and Dones to workers, stored shares to the broker.

Waking the broker costs more than a small copy, and on few cores delays the next job. So shares wait
for others until none has come for a millisecond, five milliseconds at most, and until the current
piece has moved. Shares of many jobs travel in one message, since reading one costs the broker as
much as everything else it does for a share. All other messages to the broker go behind the shares
that wait: a write is reported before anything that depends on it.
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
SHARES_WAIT_MS, LONGEST_SHARES_WAIT_MS = 1, 5  # since the latest share, since the oldest one
SHARES_PER_MESSAGE = 4096  # 20 bytes each: well inside one message of the link
_ITEM_BYTES = (4, 8, 2, 2, 2)  # of slots, generations, first, count, groups: Chunks.columns
_ShareKey: TypeAlias = tuple[int, int, bytes, bool]
"""Session, rank, namespace, and whether the chunks were stored."""


class ShareBuffer:
    """Shares to report to the broker, in order for each worker."""

    def __init__(self) -> None:
        self._pending: dict[_ShareKey, list[Chunks]] = {}
        self._oldest_at = self._latest_at = 0.0

    @property
    def due(self) -> bool:
        """Whether shares are pending and have waited long enough for others."""
        if not self._pending:
            return False
        now = time.monotonic()
        return (
            now >= self._latest_at + SHARES_WAIT_MS / 1e3
            or now >= self._oldest_at + LONGEST_SHARES_WAIT_MS / 1e3
        )

    def add(
        self,
        worker: LaneWorker,
        binding: Binding,
        chunks: Chunks,
        indices: Sequence[int],
        *,
        ok: bool,
    ) -> None:
        """Add these of a job's chunks: stored, or given up if not `ok`."""
        if not indices:
            return
        self._latest_at = time.monotonic()
        if not self._pending:
            self._oldest_at = self._latest_at
        key = worker.order.session, worker.order.rank, binding.order.namespace, ok
        if len(indices) < len(chunks):
            chunks = Chunks(
                *(array(column.typecode, [column[i] for i in indices]) for column in chunks.columns)
            )
        self._pending.setdefault(key, []).append(chunks)

    def take(self) -> list[ShareDone]:
        """Return all pending shares as messages, and forget them."""
        pending, self._pending = self._pending, {}
        return [
            message for key, parts in pending.items() for message in _share_messages(key, parts)
        ]

    def __bool__(self) -> bool:
        return bool(self._pending)


def _share_messages(key: _ShareKey, parts: Sequence[Chunks]) -> Iterator[ShareDone]:
    """Yield the messages that report a worker's shares, at most `SHARES_PER_MESSAGE` in each."""
    session, rank, namespace, ok = key
    joined = [b"".join(column) for column in zip(*(part.columns for part in parts), strict=True)]
    count = sum(map(len, parts))
    for begin in range(0, count, SHARES_PER_MESSAGE):
        columns = [
            column[begin * item_bytes : (begin + SHARES_PER_MESSAGE) * item_bytes]
            for column, item_bytes in zip(joined, _ITEM_BYTES, strict=True)
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
    """Sends all messages of the lane but its first, and counts.

    `server` has the workers' connections, `link` leads to the broker, `runner` has the jobs.
    `counts` are since the lane's start; `shares` are not sent yet.
    """

    def __init__(self, server: Server, link: Channel, runner: Runner) -> None:
        self.server = server
        self.link = link
        self.runner = runner
        self.counts = LaneCounts()
        server.limits = self.counts.limits
        self._stages = {
            direction: [self.counts.stages[f"{direction}_{stage}"] for stage in STAGES]
            for direction in Direction
        }
        self.shares = ShareBuffer()

    # ---------------------------------------------------------- to workers

    def attach(self, client: Client, worker: LaneWorker) -> None:
        """Make this the worker's connection; end its previous one, with unread replies."""
        if worker.client is not None:
            self.server.end(worker.client)
        worker.client = client
        self.server.adopt(client, worker)

    def detach(self, worker: LaneWorker) -> None:
        """Separate the worker from its connection; requests there get `bad_session`."""
        if worker.client is not None:
            self.server.adopt(worker.client, None)
            worker.client = None

    def forget_ended_connections(self) -> None:
        """Detach workers from connections that have ended."""
        server = self.server
        server.accepted.clear()
        while server.ended:
            client = server.ended.popleft()
            worker: LaneWorker | None = client.owner
            if worker is not None and worker.client is client:
                worker.client = None

    def report_ended(self) -> None:
        """Report every job that has ended, then run the callbacks that waited for it."""
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
            # After the reply, since the worker waits for that.
            if job.direction is Direction.STORE:
                ok = status is JobStatus.OK
                indices = job.reportable_indices(ok=ok)
                self.shares.add(job.worker, job.binding, job.chunks, indices, ok=ok)
        for callback in self.runner.take_due_callbacks():
            callback()

    def refuse_job(self, worker: LaneWorker, request: Job, request_id: int, text: str) -> None:
        """Answer that a job is refused, and why."""
        direction = Direction.LOAD if isinstance(request, Load) else Direction.STORE
        status = JobStatus.REFUSED
        self.counts.jobs[f"{direction}_{status}"] += 1
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
        for stage, duration in zip(self._stages[job.direction], nanoseconds, strict=True):
            stage.observe(duration / 1e9)

    def reply(self, client: Client | None, request_id: int, message: Message) -> None:
        """Answer a request, without waiting.

        If the worker does not read, the reply is dropped and its connection ended. The worker then
        joins again, and so learns that its jobs have ended.
        """
        if client is None or not self.server.send(client, WIRE.encode(message, request_id)):
            self.counts.dropped_replies += 1
            if client is not None:
                self.server.end(client)

    # ------------------------------------------------------- to the broker

    @property
    def counters(self) -> dict[str, Any]:
        """The counts by name; dropped frames include connections that do not speak ZMTP."""
        dropped = self.counts.dropped_frames + self.server.num_invalid
        counters: dict[str, Any] = msgspec.to_builtins(replace(self.counts, dropped_frames=dropped))
        return counters

    def send_to_broker(self, message: Message) -> None:
        """Send the pending shares, then a message.

        Raises:
            ChannelFull: the broker does not read; no message to it may be dropped.
            EOFError: the broker has exited.
        """
        self.send_shares()
        self.link.send(LINK.encode(message))

    def send_shares(self) -> None:
        """Send the pending shares.

        Raises:
            ChannelFull, EOFError: see `send_to_broker`.
        """
        for share in self.shares.take():
            self.link.send(LINK.encode(share))
