"""The lane's loop: jobs from workers, orders from the broker, turns of the device.

One thread, and nothing in it waits for a peer: sends to workers and to the
broker are non-blocking, copies come in pieces of a fraction of a millisecond,
and both sockets are looked at between two pieces.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvd.errors import BadDatagram, ImportFailed, LaneError
from kvd.lane.device import Device, Direction
from kvd.lane.jobs import LaneJob, ReplyTo, refused_shares
from kvd.lane.queue import Limits
from kvd.lane.runner import Runner
from kvd.lane.sockets import Sockets, Woken
from kvd.lane.stages import Stages
from kvd.lane.wiping import Wiping
from kvd.lane.workers import Binding, Worker, Workers, who_is
from kvd.link import (
    LINK,
    BindWorker,
    Imported,
    ImportWorker,
    LaneCounters,
    LaneLog,
    LanePing,
    LanePong,
    LaneReady,
    PoolUsable,
    Released,
    ReleaseWorker,
    Revoke,
    Revoked,
    ShareDone,
    StopLane,
    UnbindWorker,
    Wipe,
    Wiped,
)
from kvd.logs.setup import set_level
from kvd.seqpacket import close_all
from kvd_proto.codec import WIRE, Header
from kvd_proto.errors import BadHeader, DecodeError, JobShapeError, VersionMismatch
from kvd_proto.messages import (
    Cancel,
    CancelDone,
    Done,
    Error,
    ErrorCode,
    Job,
    JobStatus,
    Load,
    Message,
    Ping,
    Pong,
    Store,
    Wait,
    WaitDone,
)
from kvd_proto.states import JobState

_log = logging.getLogger(__name__)

FRAMES_PER_TURN = 64  # of each socket, before the device gets its turn
TEXT_LIMIT = 1000
SHORTEST_NAP = 20e-6
LONGEST_NAP = 1e-3
SHARES_WAIT_SECONDS = 1e-3
BREATH_EVERY = 1e-3
BREATH_SECONDS = 30e-6
FILLING_MS = 10


class LaneService:
    """One lane process's life.

    Args:
        name: the device's name.
        incarnation: which lane of this device since the broker started.
        endpoint: where workers send jobs, as they are told.
        sockets: bound there, with the link to the broker.
        device: the backend.
        pool_bytes: size of the pool that the device maps.
        lifeline: the read end of this process's; see lifeline.py. Taken over.
        limits: of what an engine may have waiting.
    """

    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        endpoint: str,
        sockets: Sockets,
        device: Device,
        pool_bytes: int,
        lifeline: int,
        limits: Limits | None = None,
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._endpoint = endpoint
        self._sockets = sockets
        self._link = sockets.link
        self._device = device
        self._pool_bytes = pool_bytes
        self._workers = Workers(device)
        self._runner = Runner(device, limits)
        self._wiping = Wiping(device, pool_bytes)
        self._stopping = False
        self._counts: Counter[str] = Counter()
        self._moved: Counter[str] = Counter()
        self._stages = Stages()
        self._dropped_frames = 0
        self._lifeline = lifeline
        self._usable = 0
        self._shares: list[ShareDone] = []
        self._shares_since = 0.0
        self._on_link: dict[type[Message], Callable[[Any, tuple[int, ...]], None]] = {
            ImportWorker: self._import,
            BindWorker: self._bind,
            UnbindWorker: self._unbind,
            ReleaseWorker: self._release,
            Revoke: self._revoke,
            Wipe: self._take_wipe,
            LanePing: self._answer_broker,
            StopLane: self._stop,
            LaneLog: lambda message, _fds: set_level(message.level),
        }
        self._on_wire: dict[type[Message], Callable[[Worker, Any, ReplyTo], None]] = {
            Store: self._job,
            Load: self._job,
            Cancel: self._cancel,
            Wait: self._wait,
        }

    def run(self) -> None:
        """Serve until the broker says stop (queued work is finished first) or is gone.

        Raises:
            ChannelFull: the broker does not read what it must know.
        """
        try:
            self._announce()
            nap = breathed = 0.0
            while not (self._stopping and not len(self._runner) and not len(self._wiping)):
                woken = self._sockets.wait(self._patience(nap))
                if self._usable < self._pool_bytes:
                    self._tell_usable()
                if self._shares and self._shares_are_due(woken):
                    self._tell_shares()
                if woken.link:
                    self._read_link()
                if woken.workers:
                    self._read_workers()
                moved = self._runner.turn()
                self._report()
                wiped = self._wipe()
                nap = self._rest(nap, busy=moved or wiped or woken.link or woken.workers)
                stores = moved and self._runner.stores_only
                if (stores or wiped) and not self._device.pins:
                    breathed = self._breathe(breathed)
        except EOFError:
            _log.warning("the broker is gone: ending")
        else:
            self._tell_shares()
        finally:
            self._sockets.close(deliver=self._stopping)

    # ---------------------------------------------------------------- pace

    def _patience(self, nap: float) -> int | None:
        """Milliseconds to wait for messages; None: for ever, there is nothing to do."""
        if self._shares:
            return 0
        if not len(self._runner):
            if len(self._wiping):
                return 0
            return FILLING_MS if self._usable < self._pool_bytes else None
        return 1 if nap >= LONGEST_NAP else 0

    def _rest(self, nap: float, *, busy: bool) -> float:
        """Sleep for less than a poll can, where jobs wait for a timeline or for the device."""
        if busy or not len(self._runner):
            return 0.0
        if nap < LONGEST_NAP:
            nap = max(2 * nap, SHORTEST_NAP)
            time.sleep(nap)
        return nap

    def _wipe(self) -> bool:
        """Zero a little of what is to be zeroed, and say what is done; whether there was any."""
        some, finished = self._wiping.turn(self._runner.now, jobs=bool(len(self._runner)))
        if finished is not None:
            self._tell(Wiped(number=finished))
        return some

    def _breathe(self, last: float) -> float:
        """Sleep a little where the last time is a while ago; when it was the last time.

        Stores that this CPU copies without a pause, or bytes that it zeroes, keep those that
        share the CPU waiting, the thread first of all that sends replies to engines that load.
        """
        if time.monotonic() - last < BREATH_EVERY:
            return last
        time.sleep(BREATH_SECONDS)
        return time.monotonic()

    def _announce(self) -> None:
        self._usable = self._device.usable_bytes
        ready = LaneReady(
            device=self._name,
            incarnation=self._incarnation,
            pid=os.getpid(),
            endpoint=self._endpoint,
            pins=self._device.pins,
            usable_bytes=self._usable,
        )
        self._link.send(LINK.encode(ready), (self._lifeline,))
        os.close(self._lifeline)

    def _tell_usable(self) -> None:
        """Say how much of the pool can be copied, whenever that is more than before."""
        error, usable = self._device.pool_error, self._device.usable_bytes
        if error:
            self._tell(PoolUsable(usable_bytes=0, error=error[:TEXT_LIMIT]))
            self._usable = self._pool_bytes  # nothing follows
        elif usable > self._usable:
            self._tell(PoolUsable(usable_bytes=usable, error=""))
            self._usable = usable

    # ---------------------------------------------------------------- link

    def _read_link(self) -> None:
        self._link.flush()
        for _ in range(FRAMES_PER_TURN):
            received = self._link.recv()
            if received is None:
                return
            frame, fds = received
            try:
                _, message = LINK.decode(frame)
                self._on_link[type(message)](message, fds)
            except (DecodeError, KeyError, BadDatagram):
                _log.exception("a frame of the link makes no sense")
            finally:
                close_all(fds)
            self._report()

    def _tell(self, message: Message) -> None:
        self._tell_shares()  # in order: what was written comes before what is said of it
        self._link.send(LINK.encode(message))

    def _shares_are_due(self, woken: Woken) -> bool:
        """Nothing else to do, or they have waited long enough.

        To wake the broker costs more than a small copy, so under load one
        wake-up serves the shares of several jobs.
        """
        idle = not woken.workers and not len(self._runner)
        return idle or time.monotonic() - self._shares_since >= SHARES_WAIT_SECONDS

    def _tell_shares(self) -> None:
        shares, self._shares = self._shares, []
        for share in shares:
            self._link.send(LINK.encode(share))

    def _import(self, message: ImportWorker, fds: tuple[int, ...]) -> None:
        error = ""
        try:
            worker = self._workers.add(message, fds)
            _log.info("imported the memory of %s", worker.who, extra=worker.who.fields)
        except ImportFailed as problem:
            error = str(problem)[:TEXT_LIMIT]
            who = who_is(message)
            _log.warning("%s: memory not imported: %s", who, error, extra=who.fields)
        self._tell(Imported(session=message.session, error=error))

    def _bind(self, message: BindWorker, fds: tuple[int, ...]) -> None:
        worker = self._workers.by_session(message.session)
        if worker is None or worker.leaving:
            fields = {"session": message.session}
            _log.warning("session %d is to be bound and is not here", message.session, extra=fields)
            return
        try:
            worker.binding = Binding.of(message, fds, worker.layout, self._pool_bytes)
        except LaneError:
            # Unbound, its jobs are refused; the broker's log and this one say why.
            _log.exception("%s cannot be bound", worker.who, extra=worker.who.fields)

    def _unbind(self, message: UnbindWorker, _fds: tuple[int, ...]) -> None:
        worker = self._workers.by_session(message.session)
        if worker is not None:
            worker.binding = None
            self._stop_all(worker, "the engine is no longer complete")

    def _release(self, message: ReleaseWorker, _fds: tuple[int, ...]) -> None:
        worker = self._workers.by_session(message.session)
        if worker is None:
            self._tell(Released(session=message.session))
            return
        worker.leaving = True
        jobs = self._stop_all(worker, "the worker is gone")

        def let_go() -> None:
            self._workers.remove(worker)
            _log.info("released the memory of %s", worker.who, extra=worker.who.fields)
            self._tell(Released(session=message.session))

        self._runner.when_ended(jobs, let_go)

    def _stop_all(self, worker: Worker, reason: str) -> list[LaneJob]:
        jobs = self._runner.jobs_of(worker)
        for job in jobs:
            self._runner.stop(job, JobStatus.CANCELLED, reason)
        return jobs

    def _revoke(self, message: Revoke, _fds: tuple[int, ...]) -> None:
        """Stop what writes there. What has not started meets the directory, which says DRAINING."""
        slots = set(message.slots.numpy().tolist())
        writing = [
            job
            for job in self._runner
            if job.direction is Direction.STORE
            and job.machine.state in (JobState.COPYING, JobState.DRAINING)
            and job.binding.namespace == message.namespace
            and not slots.isdisjoint(job.chunks.slots.tolist())
        ]
        for job in writing:
            self._runner.stop(job, JobStatus.STALE, "a chunk was given up while it was written")
        answer = Revoked(
            namespace=message.namespace, slots=message.slots, generations=message.generations
        )
        self._runner.when_ended(writing, lambda: self._tell(answer))

    def _take_wipe(self, message: Wipe, _fds: tuple[int, ...]) -> None:
        try:
            self._wiping.add(message)
        except LaneError:
            _log.exception("piece %d is not wiped", message.number)

    def _answer_broker(self, message: LanePing, _fds: tuple[int, ...]) -> None:
        self._tell(
            LanePong(
                sequence=message.sequence,
                queued_jobs=self._runner.queued_jobs,
                bytes_in_flight=self._runner.bytes_in_flight,
                workers=len(self._workers),
                counters=LaneCounters(
                    store_bytes=self._moved["store_bytes"],
                    load_bytes=self._moved["load_bytes"],
                    store_ns=self._moved["store_ns"],
                    load_ns=self._moved["load_ns"],
                    jobs=dict(self._counts),
                    dropped_frames=self._dropped_frames + self._sockets.dropped_messages,
                    dropped_replies=self._sockets.dropped_replies,
                    stages=self._stages.spreads(),
                    limits=dict(self._sockets.limits),
                ),
                oldest_job_ns=self._runner.oldest_job_ns,
            )
        )

    def _stop(self, _message: StopLane, _fds: tuple[int, ...]) -> None:
        self._stopping = True

    # -------------------------------------------------------------- workers

    def _read_workers(self) -> None:
        for _ in range(FRAMES_PER_TURN):
            received = self._sockets.recv()
            if received is None:
                return
            self._frame(received.identity, received.frame)
            self._report()

    def _frame(self, identity: bytes, frame: bytes) -> None:
        try:
            header = WIRE.decode_header(frame)
        except BadHeader:
            self._dropped_frames += 1
            return
        # The token proves that the sender means this boot of the daemon: it was made by it.
        reply = ReplyTo(identity, header.request_id, header.boot_id)
        worker = self._workers.by_token(header.session)
        if worker is not None and not worker.requests.is_new(header.request_id):
            self._dropped_frames += 1
            return
        try:
            self._request(worker, header, frame, reply)
        except VersionMismatch as error:
            self._refuse(reply, ErrorCode.BAD_VERSION, str(error))
        except DecodeError as error:
            self._refuse(reply, ErrorCode.BAD_MESSAGE, str(error))
        except Exception:  # noqa: BLE001  # one request must not end the other engines' lane
            _log.exception("request %d could not be served", header.request_id)
            self._refuse(reply, ErrorCode.INTERNAL, "a bug in the lane; its log has the details")

    def _request(self, worker: Worker | None, header: Header, frame: bytes, reply: ReplyTo) -> None:
        message = WIRE.decode_body(header, frame)
        handler = self._on_wire.get(type(message))
        if worker is None:
            self._refuse(reply, ErrorCode.BAD_SESSION, "no worker of this lane has this token")
            return
        self._sockets.prove(reply.identity)
        if isinstance(message, Ping):
            self._send(reply, Pong(pid=os.getpid()))
        elif handler is None:
            name = type(message).__name__
            self._refuse(reply, ErrorCode.BAD_STATE, f"a lane serves jobs, not {name}")
        else:
            handler(worker, message, reply)

    def _job(self, worker: Worker, request: Job, reply: ReplyTo) -> None:
        if self._stopping:
            self._refuse_job(request, reply, "the lane is stopping")
            return
        if worker.binding is None:  # the broker's word may have come since the link was read
            self._read_link()
        try:
            self._runner.submit(worker, request, reply)
        except JobShapeError as error:
            self._refuse_job(request, reply, str(error))
            if isinstance(request, Store) and worker.binding is not None:
                for share in refused_shares(worker, worker.binding, request):
                    self._tell(share)
        except LaneError as error:
            self._refuse_job(request, reply, str(error))

    def _cancel(self, worker: Worker, request: Cancel, reply: ReplyTo) -> None:
        jobs = [job for job in map(self._finder(worker), set(request.jobs)) if job is not None]
        for job in jobs:
            self._runner.stop(job, JobStatus.CANCELLED, "cancelled")
        self._send(reply, CancelDone(stopped=len(jobs)))

    def _wait(self, worker: Worker, request: Wait, reply: ReplyTo) -> None:
        named = map(self._finder(worker), dict.fromkeys(request.jobs))
        jobs = [job for job in named if job is not None]
        for job in jobs:
            self._runner.hoist(job)
        self._runner.when_ended(jobs, lambda: self._send(reply, WaitDone()))

    def _finder(self, worker: Worker) -> Callable[[int], LaneJob | None]:
        return lambda number: self._runner.find(worker, number)

    # ------------------------------------------------------------- reporting

    def _report(self) -> None:
        """Tell of every job that has ended, then do what waited for it."""
        for job in self._runner.take_ended():
            status, text = job.outcome
            self._count(job, status)
            started = job.started_ns or self._runner.now
            self._send(
                job.reply,
                Done(
                    job=job.request.job,
                    status=status,
                    text=text[:TEXT_LIMIT],
                    bytes=job.moved_bytes,
                    queued_ns=started - job.accepted_ns,
                    copy_ns=job.copy_ns,
                ),
            )
            if status is JobStatus.OK:
                self._stages.observe(job, self._runner.now)
            # After the reply: the worker is what waits, the broker makes chunks READY meanwhile.
            if job.direction is Direction.STORE:
                if not self._shares:
                    self._shares_since = time.monotonic()
                self._shares += job.shares(ok=status is JobStatus.OK)
            for action in job.on_end:
                action()

    def _count(self, job: LaneJob, status: JobStatus) -> None:
        self._counts[f"{job.direction}_{status}"] += 1
        self._moved[f"{job.direction}_bytes"] += job.moved_bytes
        self._moved[f"{job.direction}_ns"] += job.copy_ns

    def _refuse_job(self, request: Job, reply: ReplyTo, text: str) -> None:
        way = Direction.LOAD if isinstance(request, Load) else Direction.STORE
        self._counts[f"{way}_{JobStatus.REFUSED}"] += 1
        self._send(
            reply,
            Done(
                job=request.job,
                status=JobStatus.REFUSED,
                text=text[:TEXT_LIMIT],
                bytes=0,
                queued_ns=0,
                copy_ns=0,
            ),
        )

    def _refuse(self, reply: ReplyTo, code: ErrorCode, text: str) -> None:
        self._send(reply, Error(code=code, text=text[:TEXT_LIMIT]))

    def _send(self, reply: ReplyTo, message: Message) -> None:
        frame = WIRE.encode(message, reply.request_id, reply.boot_id)
        self._sockets.send(reply.identity, frame)

    def __repr__(self) -> str:
        return f"<LaneService {self._name}#{self._incarnation} {self._runner!r}>"
