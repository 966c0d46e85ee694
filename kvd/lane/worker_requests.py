"""What workers ask of a lane: to join a connection to a worker, jobs, to cancel or await them.

Whatever comes in, nothing but its sender is disturbed: a frame that is no request is dropped,
one that makes no sense is refused.
"""

import logging
import os

from kvd.errors import LaneError, Refused
from kvd.lane.jobs import refused_chunks
from kvd.lane.reports import TEXT_LIMIT, Reports
from kvd.lane.workers import Worker, Workers
from kvd.wire.server import Client, Received
from kvd_proto.codec import REQUESTS
from kvd_proto.errors import DecodeError, JobShapeError, VersionMismatch
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


class Requests:
    """Serves what comes over the workers' connections.

    Args:
        reports: where answers go; of the runner that takes the jobs.
        workers: who may ask.
    """

    def __init__(self, reports: Reports, workers: Workers) -> None:
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
        worker: Worker | None = client.owner
        try:
            message = REQUESTS.decode_body(header, frame)
            if worker is None:
                self._join(client, request_id, message)
            else:
                self._carry_out(worker, client, request_id, message)
        except Refused as error:
            self._refuse(client, request_id, error.code, str(error))
        except DecodeError as error:
            bad_version = isinstance(error, VersionMismatch)
            code = ErrorCode.BAD_VERSION if bad_version else ErrorCode.BAD_MESSAGE
            self._refuse(client, request_id, code, str(error)[:TEXT_LIMIT])
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
            raise Refused(ErrorCode.BAD_SESSION, text)
        worker = self._workers.by_token(message.token)
        if worker is None:
            raise Refused(ErrorCode.BAD_SESSION, "no worker of this lane has this token")
        self._reports.join(client, worker)
        jobs = self._runner.jobs_of(worker)
        for job in jobs:
            self._runner.stop(job, JobStatus.CANCELLED, "the worker has joined anew")
        reply = self._reports.reply
        self._runner.when_ended(jobs, lambda: reply(client, request_id, Ok()))

    def _carry_out(self, worker: Worker, client: Client, request_id: int, message: Message) -> None:
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
                raise Refused(ErrorCode.BAD_STATE, "this connection belongs to a worker already")
            case _:
                text = f"a lane serves jobs, not {type(message).__name__}"
                raise Refused(ErrorCode.BAD_STATE, text)

    def _job(self, worker: Worker, request: Job, request_id: int) -> None:
        try:
            self._runner.submit(worker, request, request_id)
        except (JobShapeError, LaneError) as error:
            self._reports.refuse_job(worker, request, request_id, str(error))
            shapeless = isinstance(error, JobShapeError) and isinstance(request, Store)
            if shapeless and worker.binding is not None:
                chunks, which = refused_chunks(worker, worker.binding, request)
                self._reports.shares.add(worker, worker.binding, chunks, which, ok=False)
