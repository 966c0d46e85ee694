"""The broker's orders and the workers' requests.

Orders say whose memory is here, where their chunks are, what is to stop. Those that wait for jobs,
such as to release memory that a copy may still touch, are answered when the last of these has
ended.

Workers ask to join a connection to a worker, for jobs, to cancel or await them. Whatever comes in,
nothing but its sender is disturbed: a frame that is no request is dropped, one that makes no sense
is refused.
"""

import logging
import os

from kvd.errors import ImportFailed, LaneError, Refusal
from kvd.lane.device import Device, Direction
from kvd.lane.jobs import JobState, LaneJob, refused_chunks
from kvd.lane.reports import TEXT_LIMIT, Reporter
from kvd.lane.workers import Binding, LaneWorker, WorkerTable, identity_of
from kvd.logs import set_level
from kvd.machine.process import is_out_of_files, open_files_remedy
from kvd.wire.link import (
    LINK,
    BindWorker,
    Imported,
    Importing,
    ImportWorker,
    LaneLog,
    LanePing,
    LanePong,
    Released,
    ReleaseWorker,
    Revoke,
    Revoked,
    StopLane,
    UnbindWorker,
)
from kvd.wire.server import Client, Received, decode_error_reply
from kvd_proto.channel import close_all
from kvd_proto.codec import REQUESTS
from kvd_proto.errors import DecodeError, DescriptorsLost, JobShapeError
from kvd_proto.messages import (
    Cancel,
    Error,
    ErrorCode,
    Job,
    JobStatus,
    Join,
    Load,
    Message,
    Ok,
    Ping,
    Pong,
    Store,
    Wait,
)

_log = logging.getLogger(__name__)

FRAMES_PER_TURN = 64  # of the broker, before the device gets its turn


class OrderHandler:
    """Carries out what comes over the link.

    Args:
        reports: where orders come from, answers go, and the ends of jobs that an order has stopped.
        workers: what orders are about.
        device: pins the arenas of bound workers.
        pool_bytes: size of the pool.

    Attributes:
        bindings: BindWorker orders that came, executed or not.
    """

    def __init__(
        self, reports: Reporter, workers: WorkerTable, device: Device, pool_bytes: int
    ) -> None:
        self._reports = reports
        self._link = reports.link
        self._runner = reports.runner
        self._workers = workers
        self._device = device
        self._pool_bytes = pool_bytes
        self.bindings = 0

    def read(self) -> None:
        """Carry out what has come, some of it where it is much.

        Raises:
            EOFError: the broker is gone.
        """
        link = self._link
        link.flush()
        for _ in range(FRAMES_PER_TURN):
            try:
                received = link.receive()
            except DescriptorsLost as error:
                close_all(link.take_descriptors())  # those that there was room for
                self._refuse(error)
                continue
            if received is None:
                if link.more:
                    continue
                return
            frame, fds = received
            try:
                _, message = LINK.decode(frame)
                self.carry_out(message, fds)
            except DecodeError:
                _log.exception("a frame of the link makes no sense")
            finally:
                close_all(fds)
            self._reports.report_ended()

    def carry_out(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """One order. The descriptors stay the caller's."""
        match message:
            case ImportWorker():
                self._import(message, fds)
            case BindWorker():
                self._bind(message, fds)
            case UnbindWorker():
                worker = self._workers.by_session(message.session)
                if worker is not None:
                    worker.binding = None
                    self._stop_all(worker, "the engine is no longer complete")
            case ReleaseWorker():
                self._release(message)
            case Revoke():
                self._revoke(message)
            case LanePing():
                self._answer_broker()
            case StopLane():
                self._runner.stopping = True
            case LaneLog():
                set_level(message.level)
            case _:
                _log.error("%s is no order", type(message).__name__)

    def _refuse(self, error: DescriptorsLost) -> None:
        """Refuse an order whose descriptors could not be received."""
        _, message = LINK.decode(error.frame)
        if isinstance(message, ImportWorker):
            self._not_imported(message, f"{error}; {open_files_remedy()}", out_of_files=True)
            return
        if isinstance(message, BindWorker):  # the broker counts it; the worker stays unbound
            self.bindings += 1
        _log.error("%s is left out: %s", type(message).__name__, error)

    def _import(self, message: ImportWorker, fds: tuple[int, ...]) -> None:
        self._reports.tell_broker(Importing(session=message.session))
        try:
            worker = self._workers.add(message, fds)
        except ImportFailed as error:
            if is_out_of_files(error.__cause__):
                text = f"{error}; {open_files_remedy()}"
                self._not_imported(message, text, out_of_files=True)
            else:
                self._not_imported(message, str(error))
            return
        _log.info("imported the memory of %s", worker.identity, extra=worker.identity.fields)
        answer = Imported(session=message.session, error="", attempt=message.attempt)
        self._reports.tell_broker(answer)

    def _not_imported(
        self, message: ImportWorker, error: str, *, out_of_files: bool = False
    ) -> None:
        who = identity_of(message)
        _log.warning("%s: memory not imported: %s", who, error, extra=who.fields)
        answer = Imported(
            session=message.session,
            error=error[:TEXT_LIMIT],
            attempt=message.attempt,
            out_of_files=out_of_files,
        )
        self._reports.tell_broker(answer)

    def _bind(self, message: BindWorker, fds: tuple[int, ...]) -> None:
        self.bindings += 1
        worker = self._workers.by_session(message.session)
        if worker is None or worker.leaving:
            fields = {"session": message.session}
            _log.warning("session %d is to be bound and is not here", message.session, extra=fields)
            return
        try:
            binding = Binding.of(message, fds, worker.layout, self._pool_bytes)
        except LaneError:
            # Unbound, its jobs are refused.
            _log.exception("%s cannot be bound", worker.identity, extra=worker.identity.fields)
            return
        worker.binding = binding
        end = message.arena_base + binding.slot_bytes * message.num_slots
        self._device.use_arena(worker.memory, message.arena_base, end)

    def _release(self, message: ReleaseWorker) -> None:
        worker = self._workers.by_session(message.session)
        if worker is None:
            self._reports.tell_broker(Released(session=message.session))
            return
        worker.leaving = True
        jobs = self._stop_all(worker, "the worker is gone")

        def release() -> None:
            if self._workers.by_session(message.session) is worker:  # no order before did it
                self._reports.part(worker)
                self._workers.remove(worker)
                _log.info(
                    "released the memory of %s", worker.identity, extra=worker.identity.fields
                )
            self._reports.tell_broker(Released(session=message.session))

        self._runner.when_ended(jobs, release)

    def _stop_all(self, worker: LaneWorker, reason: str) -> list[LaneJob]:
        jobs = self._runner.jobs_of(worker)
        for job in jobs:
            self._runner.stop(job, JobStatus.CANCELLED, reason)
        return jobs

    def _revoke(self, message: Revoke) -> None:
        """Stop jobs that write to these slots; those not started find them DRAINING."""
        slots = set(message.slots.numpy().tolist())
        writing = [
            job
            for job in self._runner
            if job.direction is Direction.STORE
            and job.state in (JobState.COPYING, JobState.DRAINING)
            and job.binding.order.namespace == message.namespace
            and not slots.isdisjoint(job.own_slots)
        ]
        for job in writing:
            self._runner.stop(job, JobStatus.STALE, "a chunk was given up while it was written")
        answer = Revoked(
            namespace=message.namespace, slots=message.slots, generations=message.generations
        )
        self._runner.when_ended(writing, lambda: self._reports.tell_broker(answer))

    def _answer_broker(self) -> None:
        self._reports.tell_broker(
            LanePong(
                **self._runner.figures(),
                workers=len(self._workers),
                pinned_bytes=self._device.pinned_bytes,
                counters=self._reports.counted,
            )
        )


class RequestHandler:
    """Serves what comes over the workers' connections.

    Args:
        reports: where answers go; of the runner that takes the jobs.
        workers: who may ask.
    """

    def __init__(self, reports: Reporter, workers: WorkerTable) -> None:
        self._reports = reports
        self._runner = reports.runner
        self._workers = workers

    def serve(self, received: Received) -> None:
        """Serve one message, then report what ended by it."""
        client, frame, _ = received
        try:
            header = REQUESTS.decode_header(frame)
        except DecodeError as error:
            self._reports.counts.dropped_frames += 1
            pid, uid = client.peer.pid, client.peer.uid
            _log.warning("a message of pid %d, uid %d, cannot be read: %s", pid, uid, error)
            return
        request_id = header.request_id
        worker: LaneWorker | None = client.owner
        try:
            message = REQUESTS.decode_body(header, frame)
            if worker is None:
                self._join(client, request_id, message)
            else:
                self._carry_out(worker, client, request_id, message)
        except Refusal as error:
            self._refuse(client, request_id, error.code, str(error))
        except DecodeError as error:
            self._reports.reply(client, request_id, decode_error_reply(error))
        except Exception:  # noqa: BLE001  # one request must not end the other engines' lane
            _log.exception("request %d could not be served", request_id)
            text = "a bug in the lane; its log has the details"
            self._refuse(client, request_id, ErrorCode.INTERNAL, text)
        self._reports.report_ended()

    def _refuse(self, client: Client, request_id: int, code: ErrorCode, text: str) -> None:
        self._reports.reply(client, request_id, Error(code=code, text=text))

    def _join(self, client: Client, request_id: int, message: Message) -> None:
        """Make a connection the worker's that its first request names.

        The jobs of its connection before are stopped, and the answer comes when they have ended: a
        Done that was sent there may be lost, but nothing of these jobs moves any more.
        """
        if not isinstance(message, Join):
            text = "this connection belongs to no worker; send Join with the token of LaneUp first"
            raise Refusal(ErrorCode.BAD_SESSION, text)
        worker = self._workers.by_token(message.token)
        if worker is None:
            raise Refusal(ErrorCode.BAD_SESSION, "no worker of this lane has this token")
        self._reports.join(client, worker)
        jobs = self._runner.jobs_of(worker)
        for job in jobs:
            self._runner.stop(job, JobStatus.CANCELLED, "the worker has joined anew")
        reply = self._reports.reply
        self._runner.when_ended(jobs, lambda: reply(client, request_id, Ok()))

    def _carry_out(
        self, worker: LaneWorker, client: Client, request_id: int, message: Message
    ) -> None:
        match message:
            case Store() | Load():
                self._job(worker, message, request_id)
            case Ping():
                self._reports.reply(client, request_id, Pong(pid=os.getpid()))
            case Cancel():
                for job in self._runner.find(worker, message.jobs):
                    self._runner.stop(job, JobStatus.CANCELLED, "cancelled")
                self._reports.reply(client, request_id, Ok())
            case Wait():
                jobs = self._runner.find(worker, message.jobs)
                for job in jobs:
                    self._runner.prioritize(job)
                reply = self._reports.reply
                self._runner.when_ended(jobs, lambda: reply(client, request_id, Ok()))
            case Join():
                raise Refusal(ErrorCode.BAD_STATE, "this connection belongs to a worker already")
            case _:
                text = f"a lane serves jobs, not {type(message).__name__}"
                raise Refusal(ErrorCode.BAD_STATE, text)

    def _job(self, worker: LaneWorker, request: Job, request_id: int) -> None:
        try:
            self._runner.submit(worker, request, request_id)
        except (JobShapeError, LaneError) as error:
            self._reports.refuse_job(worker, request, request_id, str(error))
            shapeless = isinstance(error, JobShapeError) and isinstance(request, Store)
            if shapeless and worker.binding is not None:
                chunks, which = refused_chunks(worker, worker.binding, request)
                self._reports.shares.add(worker, worker.binding, chunks, which, ok=False)
