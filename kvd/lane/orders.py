"""The broker's orders and the workers' requests.

Orders say which memory to map, where a worker's chunks lie, and what to stop. An order that must
wait for jobs, such as releasing memory that a copy may still touch, is answered once the last of
them has ended.

Workers request to join a connection to a worker, to run, cancel or await jobs. A bad request
affects only its sender: a frame that is no request is dropped, an invalid request is refused.
"""

import logging
import os

from kvd.errors import ImportFailed, LaneError, Refusal
from kvd.lane.device import Device, Direction
from kvd.lane.jobs import JobState, LaneJob, abandoned_chunks
from kvd.lane.reports import TEXT_LIMIT, Reporter
from kvd.lane.workers import LaneWorker, WorkerTable, identity_of
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

FRAMES_PER_TURN = 64  # of the broker, before the loop goes on


class OrderHandler:
    """Executes the orders that come over the link, which the reporter has.

    Attributes:
        num_bindings: BindWorker orders received, executed or not.
    """

    def __init__(
        self, reporter: Reporter, workers: WorkerTable, device: Device, pool_bytes: int
    ) -> None:
        self._reporter = reporter
        self._link = reporter.link
        self._runner = reporter.runner
        self._workers = workers
        self._device = device
        self._pool_bytes = pool_bytes
        self.num_bindings = 0

    def read_orders(self) -> None:
        """Execute the orders that have come, at most `FRAMES_PER_TURN`.

        Raises:
            EOFError: the broker has exited.
        """
        link = self._link
        link.flush()
        for _ in range(FRAMES_PER_TURN):
            try:
                received = link.receive()
            except DescriptorsLost as error:
                close_all(link.take_descriptors())  # those received before the limit
                self._refuse_order(error)
                continue
            if received is None:
                if link.more:
                    continue
                return
            frame, fds = received
            try:
                _, message = LINK.decode(frame)
                self.execute(message, fds)
            except DecodeError:
                _log.exception("a frame of the link cannot be decoded")
            finally:
                close_all(fds)
            self._reporter.report_ended()

    def execute(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Execute one order. The descriptors stay the caller's."""
        match message:
            case ImportWorker():
                self._import(message, fds)
            case BindWorker():
                self._bind(message, fds)
            case UnbindWorker():
                worker = self._workers.by_session(message.session)
                if worker is not None:
                    worker.binding = None
                    self._stop_jobs(worker, "the engine is no longer complete")
            case ReleaseWorker():
                self._release(message)
            case Revoke():
                self._revoke(message)
            case LanePing():
                self._answer_ping()
            case StopLane():
                self._runner.stopping = True
            case LaneLog():
                set_level(message.level)
            case _:
                _log.error("%s is no order", type(message).__name__)

    def _refuse_order(self, error: DescriptorsLost) -> None:
        """Answer an order whose descriptors could not be received."""
        _, message = LINK.decode(error.frame)
        if isinstance(message, ImportWorker):
            self._report_import_error(message, f"{error}; {open_files_remedy()}", out_of_files=True)
            return
        if isinstance(message, BindWorker):
            self.num_bindings += 1  # the broker counts them
            worker = self._workers.by_session(message.session)
            if worker is not None:
                self._report_unbound(worker, error)
            return
        _log.error("%s is not executed: %s", type(message).__name__, error)

    def _import(self, message: ImportWorker, fds: tuple[int, ...]) -> None:
        self._reporter.send_to_broker(Importing(session=message.session))
        try:
            worker = self._workers.import_worker(message, fds)
        except ImportFailed as error:
            if is_out_of_files(error.__cause__):
                text = f"{error}; {open_files_remedy()}"
                self._report_import_error(message, text, out_of_files=True)
            else:
                self._report_import_error(message, str(error))
            return
        _log.info("imported the memory of %s", worker.identity, extra=worker.identity.fields)
        answer = Imported(session=message.session, error="", attempt=message.attempt)
        self._reporter.send_to_broker(answer)

    def _report_import_error(
        self, message: ImportWorker, error: str, *, out_of_files: bool = False
    ) -> None:
        identity = identity_of(message)
        _log.warning("%s: memory not imported: %s", identity, error, extra=identity.fields)
        answer = Imported(
            session=message.session,
            error=error[:TEXT_LIMIT],
            attempt=message.attempt,
            out_of_files=out_of_files,
        )
        self._reporter.send_to_broker(answer)

    def _report_unbound(self, worker: LaneWorker, error: Exception) -> None:
        """Report that a worker cannot be bound: its jobs are refused, its session is ended."""
        _log.error("%s: not bound: %s", worker.identity, error, extra=worker.identity.fields)
        text = f"it cannot be bound to its chunks: {error}"[:TEXT_LIMIT]
        order = worker.order
        answer = Imported(session=order.session, error=text, attempt=order.attempt)
        self._reporter.send_to_broker(answer)

    def _bind(self, message: BindWorker, fds: tuple[int, ...]) -> None:
        self.num_bindings += 1
        worker = self._workers.by_session(message.session)
        if worker is None or worker.is_leaving:
            text = "session %d cannot be bound: its memory is not mapped here"
            _log.warning(text, message.session, extra={"session": message.session})
            return
        try:
            bindings = self._workers.bindings
            binding = bindings.bind(message, fds, worker.layout, self._pool_bytes)
        except LaneError as error:
            self._report_unbound(worker, error)
            return
        worker.binding = binding
        end = message.arena_base + binding.slot_bytes * message.num_slots
        self._device.pin_arena(worker.memory, message.arena_base, end)

    def _release(self, message: ReleaseWorker) -> None:
        """Stop a worker's jobs; release its memory and report that once they have ended."""
        worker = self._workers.by_session(message.session)
        if worker is None:
            self._reporter.send_to_broker(Released(session=message.session))
            return
        worker.is_leaving = True
        jobs = self._stop_jobs(worker, "the worker is gone")

        def release_and_report() -> None:
            # A repeated ReleaseWorker: the first one may have released it already.
            if self._workers.by_session(message.session) is worker:
                self._reporter.detach(worker)
                self._workers.release(worker)
                identity = worker.identity
                _log.info("released the memory of %s", identity, extra=identity.fields)
            self._reporter.send_to_broker(Released(session=message.session))

        self._runner.when_ended(jobs, release_and_report)

    def _stop_jobs(self, worker: LaneWorker, reason: str) -> list[LaneJob]:
        jobs = self._runner.jobs_of(worker)
        for job in jobs:
            self._runner.stop(job, JobStatus.CANCELLED, reason)
        return jobs

    def _revoke(self, message: Revoke) -> None:
        """Stop stores that write to these slots. Those that start later find the slots DRAINING."""
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
        self._runner.when_ended(writing, lambda: self._reporter.send_to_broker(answer))

    def _answer_ping(self) -> None:
        self._reporter.send_to_broker(
            LanePong(
                **self._runner.gauges(),
                workers=len(self._workers),
                pinned_bytes=self._device.pinned_bytes,
                counters=self._reporter.counters,
            )
        )


class RequestHandler:
    """Serves the requests that come over workers' connections."""

    def __init__(self, reporter: Reporter, workers: WorkerTable) -> None:
        self._reporter = reporter
        self._runner = reporter.runner
        self._workers = workers

    def serve(self, received: Received) -> None:
        """Serve one request, then report the jobs that it has ended."""
        client, frame, _ = received
        try:
            header = REQUESTS.decode_header(frame)
        except DecodeError as error:
            self._reporter.counts.dropped_frames += 1
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
                self._execute(worker, client, request_id, message)
        except Refusal as error:
            self._refuse(client, request_id, error.code, str(error))
        except DecodeError as error:
            self._reporter.reply(client, request_id, decode_error_reply(error))
        except Exception:  # noqa: BLE001  # one request must not end the lane of all engines
            _log.exception("request %d could not be served", request_id)
            text = "a bug in the lane; its log has the details"
            self._refuse(client, request_id, ErrorCode.INTERNAL, text)
        self._reporter.report_ended()

    def _refuse(self, client: Client, request_id: int, code: ErrorCode, text: str) -> None:
        self._reporter.reply(client, request_id, Error(code=code, text=text))

    def _join(self, client: Client, request_id: int, message: Message) -> None:
        """Attach a connection to the worker whose token its first request names.

        The worker's unfinished jobs are stopped. Their Dones, under their old request ids, come
        over the new connection, then Ok. A Done that the previous connection has not delivered is
        lost; its job has ended all the same.
        """
        if not isinstance(message, Join):
            name = type(message).__name__
            text = f"{name} came before Join; send that first, with the token of LaneUp"
            raise Refusal(ErrorCode.BAD_SESSION, text)
        worker = self._workers.by_token(message.token)
        if worker is None:
            raise Refusal(
                ErrorCode.BAD_SESSION,
                "no worker of this lane has this token; send that of the newest LaneUp",
            )
        self._reporter.attach(client, worker)
        jobs = self._runner.jobs_of(worker)
        for job in jobs:
            self._runner.stop(job, JobStatus.CANCELLED, "the worker has joined anew")
        reply = self._reporter.reply
        self._runner.when_ended(jobs, lambda: reply(client, request_id, Ok()))

    def _execute(
        self, worker: LaneWorker, client: Client, request_id: int, message: Message
    ) -> None:
        """Execute one request of a joined worker. Jobs are answered when they end.

        Raises:
            Refusal: a second Join, or a message that is no request to a lane.
        """
        match message:
            case Store() | Load():
                self._submit(worker, message, request_id)
            case Ping():
                self._reporter.reply(client, request_id, Pong(pid=os.getpid()))
            case Cancel():
                for job in self._runner.find_jobs(worker, message.jobs):
                    self._runner.stop(job, JobStatus.CANCELLED, "cancelled")
                self._reporter.reply(client, request_id, Ok())
            case Wait():
                jobs = self._runner.find_jobs(worker, message.jobs)
                for job in jobs:
                    self._runner.prioritize(job)
                reply = self._reporter.reply
                self._runner.when_ended(jobs, lambda: reply(client, request_id, Ok()))
            case Join():
                raise Refusal(
                    ErrorCode.BAD_STATE,
                    "Join has opened this connection already; connect again for another worker",
                )
            case _:
                text = f"{type(message).__name__} is for the broker; send it to broker.sock"
                raise Refusal(ErrorCode.BAD_STATE, text)

    def _submit(self, worker: LaneWorker, request: Job, request_id: int) -> None:
        try:
            self._runner.submit(worker, request, request_id)
        except (JobShapeError, LaneError) as error:
            self._reporter.refuse_job(worker, request, request_id, str(error))
            is_misshaped_store = isinstance(error, JobShapeError) and isinstance(request, Store)
            if is_misshaped_store and worker.binding is not None:
                chunks, indices = abandoned_chunks(worker, worker.binding, request)
                self._reporter.shares.add(worker, worker.binding, chunks, indices, ok=False)
